# SPDX-License-Identifier: Apache-2.0
"""The roles and tokens of the scheduler's HTTP service.

{"gateway": ["5f0c…"], "reader": ["sha256:60fd…"], "operator": ["sha256:9f86…", "sha256:1a2b…"]}

A token is sent as `Authorization: Bearer TOKEN`, alone (as gateways of Llumnix do), or as a browser's password. A role
may have two tokens while one replaces the other. `/healthz` and `/ready` need no token.
"""

from __future__ import annotations

import binascii
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final

from aiohttp import web

from llumlet.process.hashed_keys import HashedKeys
from llumlet.process.secret_files import Current
from llumlet.process.tokens import read_by_role

_OPEN: Final = frozenset({"/healthz", "/health", "/ready"})
OF_GATEWAYS: Final = frozenset(
    {"/schedule", "/release", "/report", "/complaints", "/attainment", "/keepalive", "/instances"}
)
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="llumnix scheduler: any name, and a token"'}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Role(StrEnum):
    GATEWAY = "gateway"
    """May place requests and report their outcome."""
    READER = "reader"
    """May read everything."""
    OPERATOR = "operator"
    """May use everything."""

    def may(self, method: str, path: str) -> bool:
        if self is Role.GATEWAY:
            return path in OF_GATEWAYS
        reads = path.startswith("/debug/") or (method in ("GET", "HEAD") and path not in OF_GATEWAYS)
        return reads or self is Role.OPERATOR


class ServiceTokens:
    """The tokens of a file, read again when it changes. Raises ValueError, which never quotes a token."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = Current(read_tokens, "service tokens", path, clock=clock)

    def role(self, authorization: str) -> Role | None:
        return self._tokens.value.whose(_shown(authorization))

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        role = self.role(request.headers.get("Authorization", ""))
        if role is None:
            return web.Response(status=401, text="Unauthorized", headers=_CHALLENGE)
        if not role.may(request.method, request.path):
            return web.Response(status=403, text=f"not for the role {role}")
        return await handler(request)


def read_tokens(path: str) -> HashedKeys[Role]:
    """Reads the tokens of a file. Raises ValueError, which never quotes a token."""
    return HashedKeys(read_by_role(path, Role))


def _shown(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if not rest:
        return authorization
    if scheme.lower() == "bearer":
        return rest
    if scheme.lower() == "basic":
        try:
            return b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""
