# SPDX-License-Identifier: Apache-2.0
"""The flags that name credentials, and the files behind them. Standard library only, as parsers are built early."""

from __future__ import annotations

import argparse
import os
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

MIN_TOKEN_CHARACTERS: Final = 32
"""The token must not be guessable: who records the relay's traffic can try guesses without asking anybody."""

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
    "token_file": "A file with the token that all instances and their callers share: at least "
    f"{MIN_TOKEN_CHARACTERS} characters, not readable for everybody.",
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

    def read(self) -> dict[str, bytes]:
        """The contents by field, empty for what is not used. Raises CredentialsError."""
        faults: list[str] = []
        paths = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(paths) and not all(paths):
            flags = ", ".join(_flag(each.name) for each in fields(self)[:3] if not getattr(self, each.name))
            faults.append(f"mutual TLS needs {flags} as well")
        contents = {
            name: read_file(_flag(name), getattr(self, name), name in ("tls_key", "token_file"), faults)
            for name in (each.name for each in fields(self))
        }
        if not faults and all(paths):
            faults += self._tls_faults()
        token = contents["token_file"].strip()
        if self.token_file and not faults and not re.fullmatch(rb"[!-~]{%d,}" % MIN_TOKEN_CHARACTERS, token):
            faults.append(
                f"{_flag('token_file')} {self.token_file} must hold one word of at least {MIN_TOKEN_CHARACTERS} "
                "printable ASCII characters"
            )
        if faults:
            raise CredentialsError(faults)
        return contents | {"token_file": token}

    def _tls_faults(self) -> list[str]:
        """What gRPC would only say to its log, at the first connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self.tls_ca)
        except (OSError, ValueError) as error:
            return [f"{_flag('tls_ca')} {self.tls_ca} holds no certificates: {error}"]
        try:
            # A key with a passphrase is refused, not asked for at a terminal that may not be there.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ValueError) as error:
            return [f"{_flag('tls_cert')} {self.tls_cert} and {_flag('tls_key')} {self.tls_key} do not fit: {error}"]
        return []


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The flags, the same for servers and callers."""
    for name, text in _HELP.items():
        parser.add_argument(_flag(name), default=None, metavar="FILE", help=f"{text} Default: {VARIABLES[name]}.")


def _flag(name: str) -> str:
    return "--llumlet-" + name.replace("_", "-")


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def read_file(flag: str, path: str, secret: bool, faults: list[str]) -> bytes:
    """The contents of a file; nothing, and a fault, if it cannot be used, or is a `secret` that all may read."""
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            if secret and os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                faults.append(f"{flag} {path} can be read or written by everybody on this host: chmod o-rw it")
                return b""
            return file.read()
    except OSError as error:
        faults.append(f"{flag} {path}: {error.strerror}")
        return b""
