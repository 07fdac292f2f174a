# SPDX-License-Identifier: Apache-2.0
"""The tokens of a cluster, as `--llumlet-token-file` has them. Standard library only, as parsers are built early.

The file holds one word, with which everybody may call everything, or the tokens of each role:

    {"peer": ["9c1b…", "57e0…"], "operator": ["sha256:9f86…"], "reader": ["sha256:60fd…"]}

Of a role all are accepted; the first one in clear is the one that a process of this role shows. So a token is replaced
without a restart: add the next behind the last everywhere, exchange the two, take the last away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, TypeVar

from llumlet.process.hashed_keys import HashedKeys, faults_of, is_hash
from llumlet.process.roles import ALL, Role
from llumlet.process.secret_files import read_secret

MIN_TOKEN_CHARACTERS: Final = 32
"""The token must not be guessable: who records the relay's traffic can try guesses without asking anybody."""


R = TypeVar("R", bound=StrEnum)


@dataclass(frozen=True)
class Tokens:
    """Tokens by the roles that they open, in clear or as `sha256:` and 64 hexadecimal digits."""

    by_roles: Mapping[frozenset[Role], tuple[str, ...]] = field(repr=False)

    def roles(self, shown: str) -> frozenset[Role]:
        """Roles of whoever shows this token; none for a stranger. Compares with all of them, each in constant time."""
        return self._hashed.whose(shown) or frozenset()

    def in_clear(self, role: Role) -> tuple[bytes, ...]:
        """Tokens of a role that can be shown: the first is."""
        return tuple(
            token.encode()
            for roles, tokens in self.by_roles.items()
            if role in roles
            for token in tokens
            if not is_hash(token)
        )

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
    """The tokens of an instance's file: the keys of its relay are made from them, so it must have them in clear."""
    tokens = read_tokens(path)
    peers = [token for roles, found in tokens.by_roles.items() if Role.PEER in roles for token in found]
    if not peers or any(map(is_hash, peers)):
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
