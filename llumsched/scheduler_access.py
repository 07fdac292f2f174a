# SPDX-License-Identifier: Apache-2.0
"""How commands ask the HTTP service of a scheduler."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from llumlet import kinds
from llumlet.kinds import Kind
from llumlet.secret_files import read_secret
from llumlet.settings import Group
from llumlet.types import Address
from llumsched.gateway.endpoints import Endpoint
from llumsched.tls import checked_ca_file, client_context


@dataclass(frozen=True, slots=True)
class Access:
    """How the HTTP service of a scheduler is asked."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None

    def url(self, scheduler: Address, path: str) -> str:
        return Endpoint(scheduler, is_tls=self.tls is not None).url(path)

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers=self.headers,
            connector=aiohttp.TCPConnector(ssl=self.tls or True),
        )


IN_CLEAR: Final = Access()
"""Access over plain HTTP, as nobody in particular."""


def _token(path: str) -> str:
    try:
        return read_secret(path).decode("ascii").strip()
    except UnicodeError:  # which would show what is there
        raise ValueError(f"{path} holds no token") from None


@dataclass(frozen=True, slots=True)
class AccessSettings:
    token: str = Group("").setting(
        "",
        Kind(_token, "FILE"),
        "a token that the scheduler accepts of readers",
        flag="--service-token-file",
        secret=True,
    )
    ca_file: str = Group("").setting(
        "",
        kinds.file(checked_ca_file),
        "authorities of the scheduler's certificate (PEM): it is asked over https",
        flag="--scheduler-ca-file",
    )

    @property
    def access(self) -> Access:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return Access(headers, client_context(self.ca_file) if self.ca_file else None)
