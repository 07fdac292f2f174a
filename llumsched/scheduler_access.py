# SPDX-License-Identifier: Apache-2.0
"""Access to a scheduler's HTTP service for commands."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.secret_files import Bearer, read_word
from llumlet.process.settings import Group
from llumsched.endpoints import Endpoint
from llumsched.tls import checked_ca_file, client_context


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
