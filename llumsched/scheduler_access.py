# SPDX-License-Identifier: Apache-2.0
"""Access to a scheduler's HTTP service: the tokens that it accepts, by role, and how commands show theirs.

    {"gateway": ["5f0c…"], "reader": ["sha256:60fd…"], "operator": ["sha256:9f86…", "sha256:1a2b…"]}

A token is shown as `Authorization: Bearer TOKEN`, alone as gateways of Llumnix do, or as the password of a browser. Two
of a role are valid while one replaces the other. `/healthz` and `/ready` need none: whatever starts and stops processes
asks without secrets.
"""

from __future__ import annotations

import binascii
import ssl
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import aiohttp
from aiohttp import web

from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.secret_files import Bearer, Current, read_word
from llumlet.process.settings import Group
from llumlet.process.tls import checked_ca_file, client_context
from llumlet.process.tokens import HashedKeys, read_by_role
from llumsched.endpoints import Endpoint

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


@dataclass(frozen=True, slots=True)
class SchedulerAccess:
    """Credentials for a scheduler's HTTP service."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None

    def url(self, scheduler: Address, path: str) -> str:
        return Endpoint(scheduler, is_tls=self.tls is not None).url(path)

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(ssl=self.tls or True),
        )


IN_CLEAR: Final = SchedulerAccess()
"""Access over plain HTTP without a token."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    token_file: str = Group("").setting(
        "",
        kinds.file(read_word),
        "file with a token that the scheduler accepts from readers",
        flag="--service-token-file",
    )
    ca_file: str = Group("").setting(
        "",
        kinds.file(checked_ca_file),
        "certificates of authorities trusted for the scheduler (PEM), which is then asked over https; empty uses http",
        flag="--scheduler-ca-file",
    )

    @property
    def access(self) -> SchedulerAccess:
        return SchedulerAccess(
            Bearer(self.token_file, "service token"), client_context(self.ca_file) if self.ca_file else None
        )
