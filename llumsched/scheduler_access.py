# SPDX-License-Identifier: Apache-2.0
"""How commands ask the HTTP service of a scheduler."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from llumlet.secret_files import read_secret
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
"""And as nobody in particular."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service-token-file", metavar="FILE", help="a token that the scheduler accepts of readers")
    parser.add_argument(
        "--scheduler-ca-file",
        metavar="FILE",
        help="authorities of the scheduler's certificate (PEM): it is asked over https",
    )


def given(args: argparse.Namespace) -> tuple[Access, list[str]]:
    """And the faults of the files."""
    headers, tls, faults = {}, None, []
    try:
        if args.service_token_file:
            token = read_secret(args.service_token_file).decode("ascii").strip()
            headers = {"Authorization": f"Bearer {token}"}
    except ValueError as error:  # UnicodeDecodeError is one, and would show what is there
        why = "holds no token" if isinstance(error, UnicodeError) else str(error)
        faults.append(f"--service-token-file {why}")
    try:
        if args.scheduler_ca_file:
            tls = client_context(checked_ca_file(args.scheduler_ca_file))
    except ValueError as error:
        faults.append(f"--scheduler-ca-file {error}")
    return Access(headers, tls), faults
