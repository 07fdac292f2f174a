# SPDX-License-Identifier: Apache-2.0
"""Tokens and keys that callers show, as files hold them: in clear, or as `sha256:` and 64 hexadecimal digits.

`--llumlet-token-file` holds one word, which opens everything, or the tokens of each role:

    {"peer": ["9c1b…", "57e0…"], "operator": ["sha256:9f86…"], "reader": ["sha256:60fd…"]}

All tokens of a role are accepted; a process of this role shows the first one in clear. So a token is replaced without a
restart: add the next behind the last everywhere, exchange the two, take the last away. Standard library only, as
parsers are built early.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, Generic, TypeVar

from llumlet.process.secret_files import read_secret

MIN_TOKEN_CHARACTERS: Final = 32
"""Length from which a token cannot be guessed: guesses can be tried offline on recorded traffic of the relay."""
_HASHED: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")

Owner = TypeVar("Owner")
R = TypeVar("R", bound=StrEnum)


class Role(StrEnum):
    """The caller of a llumlet, or of a scheduler's CMS."""

    PEER = "peer"
    """An instance: it moves requests to and from others, replays lost ones, and reports."""
    OPERATOR = "operator"
    """A person, a scheduler or a rescheduler: it moves requests, drains instances, and reads everything."""
    READER = "reader"
    """Reads everything, and changes nothing."""


ALL: Final = frozenset(Role)


class HashedKeys(Generic[Owner]):
    """Owners of keys, by the keys' SHA-256.

    A look-up takes the same time for any number of keys, and its time depends on the hash of the shown key, which does
    not help to guess one.
    """

    def __init__(self, keys: Mapping[Owner, Iterable[str]]) -> None:
        self._owners = {_digest_of(key): owner for owner, own in keys.items() for key in own}

    def digest(self) -> bytes:
        """A secret derived from all keys: the same in every process that reads the same file."""
        return hashlib.sha256(b"".join(sorted(self._owners))).digest()

    def whose(self, shown: str) -> Owner | None:
        return self._owners.get(hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest())


def faults_of(keys: Mapping[str, Iterable[str]], least: int) -> list[str]:
    """Faults of keys, a sentence each, which quotes none. `least`: characters of a key in clear."""
    found, seen = [], set[bytes]()
    for owner, own in keys.items():
        for number, key in enumerate(own):
            plain = re.fullmatch(rf"[!-~]{{{least},}}", key) is not None and not key.startswith("sha256:")
            if not (plain or _HASHED.fullmatch(key)):
                found.append(
                    f"key {number} of {owner!r} is neither {least} or more printable characters without a space, nor "
                    "sha256: and 64 hexadecimal digits"
                )
            elif (digest := _digest_of(key)) in seen:
                found.append(f"key {number} of {owner!r} is repeated")
            else:
                seen.add(digest)
    return found


def _digest_of(key: str) -> bytes:
    hashed = _HASHED.fullmatch(key)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True)
class Tokens:
    """Tokens by the roles that they open."""

    by_roles: Mapping[frozenset[Role], tuple[str, ...]] = field(repr=False)

    def roles(self, shown: str) -> frozenset[Role]:
        """Roles that this token opens; none if it is unknown."""
        return self._hashed.whose(shown) or frozenset()

    def in_clear(self, role: Role) -> tuple[bytes, ...]:
        """Tokens of a role that can be shown: the first is."""
        of_role = [token for roles, tokens in self.by_roles.items() if role in roles for token in tokens]
        return tuple(token.encode() for token in of_role if not _HASHED.fullmatch(token))

    @cached_property
    def _hashed(self) -> HashedKeys[frozenset[Role]]:
        return HashedKeys(self.by_roles)


def read_tokens(path: str) -> Tokens:
    """The tokens of a file. Raises ValueError, which never holds a token."""
    content = read_secret(path).strip()
    if content.startswith(b"{"):
        return Tokens({frozenset({role}): tuple(own) for role, own in read_by_role(path, Role).items()})
    if not re.fullmatch(rb"[!-~]{%d,}" % MIN_TOKEN_CHARACTERS, content):
        raise ValueError(
            f"{path} must hold one word of at least {MIN_TOKEN_CHARACTERS} printable ASCII characters, or the tokens "
            'of each role: {"peer": […], "operator": […], "reader": […]}'
        )
    return Tokens({ALL: (content.decode(),)})


def read_peers_tokens(path: str) -> Tokens:
    """The tokens of an instance's file. The keys of its relay are made from those of peers, which it must have in
    clear. Raises ValueError, which never holds a token."""
    tokens = read_tokens(path)
    num_peers = sum(len(found) for roles, found in tokens.by_roles.items() if Role.PEER in roles)
    if not num_peers or len(tokens.in_clear(Role.PEER)) < num_peers:
        raise ValueError(f"{path} must have the tokens of the role peer, in clear: instances show them to each other")
    return tokens


def read_by_role(path: str, roles: type[R]) -> dict[R, list[str]]:
    """Tokens by role, of a file with a JSON object. Raises ValueError, which never holds a token."""
    try:
        found = json.loads(read_secret(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object with the tokens of each role")
    faults = [f"{role!r} is none of the roles {', '.join(roles)}" for role in found if role not in set(roles)]
    for role, tokens in found.items():
        if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
            faults.append(f"{role!r} has no list of tokens")
    if not faults:
        faults = faults_of(found, MIN_TOKEN_CHARACTERS)
    if not faults and not any(found.values()):
        faults = ["it holds no tokens"]
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}")
    return {roles(role): tokens for role, tokens in found.items()}
