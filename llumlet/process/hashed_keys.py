# SPDX-License-Identifier: Apache-2.0
"""Keys and tokens that others show: as files have them, in clear or as SHA-256, and whose one is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

_HASHED: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_PREFIX: Final = "sha256:"

Owner = TypeVar("Owner")


class HashedKeys(Generic[Owner]):
    """Owners of keys, by the keys' hashes. A look-up takes the same time for any number of keys; what that time tells
    is of the hash of what was shown, from which nobody can approach a key."""

    def __init__(self, keys: Mapping[Owner, Iterable[str]]) -> None:
        self._owners = {_digest_of(key): owner for owner, own in keys.items() for key in own}

    def digest(self) -> bytes:
        """A secret derived from all keys: the same in every process that reads the same file."""
        return hashlib.sha256(b"".join(sorted(self._owners))).digest()

    def whose(self, shown: str) -> Owner | None:
        return self._owners.get(hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest())


def faults_of(keys: Mapping[str, Iterable[str]], least: int) -> list[str]:
    """Everything that is wrong with keys, a sentence each, which quotes none. `least`: characters of one in clear."""
    found, seen = [], set[bytes]()
    for owner, own in keys.items():
        for number, key in enumerate(own):
            plain = re.fullmatch(rf"[!-~]{{{least},}}", key) is not None and not key.startswith(_PREFIX)
            if not plain and _HASHED.fullmatch(key) is None:
                found.append(
                    f"key {number} of {owner!r} is neither {least} or more printable characters without a space, nor "
                    "sha256: and 64 hexadecimal digits"
                )
            elif (digest := _digest_of(key)) in seen:
                found.append(f"key {number} of {owner!r} is there twice")
            else:
                seen.add(digest)
    return found


def is_hash(key: str) -> bool:
    return _HASHED.fullmatch(key) is not None


def _digest_of(key: str) -> bytes:
    hashed = _HASHED.fullmatch(key)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
