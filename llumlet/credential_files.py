# SPDX-License-Identifier: Apache-2.0
"""The flags that name credentials, and the files behind them. Standard library only, as parsers are built early."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from llumlet.secret_files import read_file
from llumlet.tokens import MIN_TOKEN_CHARACTERS

VARIABLES: Final = {
    "tls_cert": "LLUMNIX_TLS_CERT",
    "tls_key": "LLUMNIX_TLS_KEY",
    "tls_ca": "LLUMNIX_TLS_CA",
    "token_file": "LLUMNIX_TOKEN_FILE",
}
"""What a flag that is not given falls back to."""

_HELP = {
    "tls_cert": "This side's certificate (PEM). It must name the address under which others reach it.",
    "tls_key": "The certificate's private key (PEM), not readable for everybody.",
    "tls_ca": "Certificates of the authority whose certificates are accepted (PEM).",
    "token_file": "A file, not readable for everybody, with the token that all instances and their callers share, "
    f"at least {MIN_TOKEN_CHARACTERS} characters, or with the tokens of each role, as JSON.",
}


class CredentialsError(ValueError):
    """Credentials that cannot be used; `faults` holds every fault found, a sentence each. Never their contents."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Paths; empty for what is not used."""

    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token_file: str = ""

    @classmethod
    def given(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Self:
        """From the flags of `add_arguments`, or the variables in place of those that are not given."""
        values = {name: getattr(args, f"llumlet_{name}", None) for name in VARIABLES}
        return cls(**{name: _absolute(values[name] or environ.get(VARIABLES[name], "")) for name in VARIABLES})

    def read_tls(self) -> dict[str, bytes]:
        """The contents of those for TLS by field, empty for what is not used. Raises CredentialsError."""
        faults: list[str] = []
        contents: dict[str, bytes] = {}
        paths = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(paths) and not all(paths):
            flags = ", ".join(flag(each.name) for each in fields(self)[:3] if not getattr(self, each.name))
            faults.append(f"mutual TLS needs {flags} as well")
        for each in fields(self)[:3]:
            path = getattr(self, each.name)
            try:
                contents[each.name] = read_file(path, is_secret=each.name == "tls_key") if path else b""
            except ValueError as error:
                faults.append(f"{flag(each.name)} {error}")
        if not faults and all(paths):
            faults += self._tls_faults()
        if faults:
            raise CredentialsError(faults)
        return contents

    def _tls_faults(self) -> list[str]:
        """What gRPC would only say to its log, at the first connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self.tls_ca)
        except (OSError, ValueError) as error:
            return [f"{flag('tls_ca')} {self.tls_ca} holds no certificates: {error}"]
        try:
            # A key with a passphrase is refused, not asked for at a terminal that may not be there.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ValueError) as error:
            return [f"{flag('tls_cert')} {self.tls_cert} and {flag('tls_key')} {self.tls_key} do not fit: {error}"]
        return []


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The flags, the same for servers and callers."""
    for name, text in _HELP.items():
        parser.add_argument(flag(name), default=None, metavar="FILE", help=f"{text} Default: {VARIABLES[name]}.")


def flag(name: str) -> str:
    """Of a field."""
    return "--llumlet-" + name.replace("_", "-")


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""
