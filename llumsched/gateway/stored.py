# SPDX-License-Identifier: Apache-2.0
"""Responses that a client may ask for again: the API server that made one keeps it (`/v1/responses`).

The client's id names the instance and the owner, so that the gateway needs no search and answers nobody else:

    resp_<home><tag>_<number>       engines know it as resp_<number>, which the gateway chose

`home` names the instance. `tag` is a MAC over home, number and the name of the client's key. Its secret is derived from
all keys of `--api-key-file`, so that all gateways with this file read each other's ids. Without the file there is one
client and no secret. Running processes also accept ids made with the previous file.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llumsched.gateway.backends import Backend, Backends

_HOME_BYTES: Final = 5
_TAG_BYTES: Final = 10
_SHOWN: Final = re.compile(r"resp_([a-z2-7]{8})([a-z2-7]{16})_([0-9a-f]{32})", re.ASCII)

Secrets = Callable[[], Sequence[bytes]]


class Stored(NamedTuple):
    """A response that a client asks for or continues."""

    shown: str
    """The client's id."""
    own: str
    """The engine's id."""
    home: Backend


def new_id() -> str:
    """A new id, for an engine to give to a response."""
    return f"resp_{os.urandom(16).hex()}"


class StoredResponses:
    def __init__(self, backends: Backends, secrets: Secrets, renew: Callable[[], None] | None = None) -> None:
        """`secrets`: the newest first, which is used for new ids. `renew` updates them and may run in any thread."""
        self._backends = backends
        self._secrets = secrets
        self._renew = renew

    def shown(self, own: str, backend: Backend, key: str) -> str:
        """The client's id. `key` is the name of its API key."""
        secret = self._secrets()[0]
        home, number = _home(secret, str(backend)), own.removeprefix("resp_")
        return f"resp_{home}{_tag(secret, home, number, key)}_{number}"

    async def find(self, shown: str, key: str) -> Stored | None:
        """The response with that id, if it belongs to this key and its instance is known."""
        match = _SHOWN.fullmatch(shown)
        if match is None:
            return None
        home, tag, number = match.groups()
        secret = self._secret_of(home, tag, number, key)
        if secret is None and self._renew is not None:  # another worker may have seen a change of the keys before
            await asyncio.to_thread(self._renew)
            secret = self._secret_of(home, tag, number, key)
        if secret is None:
            return None
        found = (backend for backend in self._backends if _home(secret, str(backend)) == home)
        return next((Stored(shown, f"resp_{number}", backend) for backend in found), None)

    def _secret_of(self, home: str, tag: str, number: str, key: str) -> bytes | None:
        """The secret with which the id was made."""
        matching = (one for one in self._secrets() if hmac.compare_digest(_tag(one, home, number, key), tag))
        return next(matching, None)


@functools.lru_cache(maxsize=1 << 14)
def _home(secret: bytes, instance: str) -> str:
    return _mac(secret, "home", instance, num_bytes=_HOME_BYTES)


def _tag(secret: bytes, home: str, number: str, key: str) -> str:
    return _mac(secret, home, number, key, num_bytes=_TAG_BYTES)


def _mac(secret: bytes, *parts: str, num_bytes: int) -> str:
    """A MAC of `num_bytes`, a multiple of 5 so that base 32 needs no padding."""
    digest = hmac.digest(secret, "\0".join(parts).encode(), hashlib.sha256)
    return base64.b32encode(digest[:num_bytes]).decode().lower()
