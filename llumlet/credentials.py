# SPDX-License-Identifier: Apache-2.0
"""How llumlets and their callers prove who they are: mutual TLS, and a bearer token.

Both ends of a connection show a certificate of the same authority; with each call the caller sends the token that all
instances of a cluster share. Only paths travel between processes. The contents are read where they are used, and are
never printed.
"""

from __future__ import annotations

import argparse
import hmac
import os
import re
import ssl
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self

import grpc
from grpc import aio

from llumlet.types import MAX_MESSAGE_BYTES, Address

MIN_TOKEN_CHARACTERS: Final = 32
"""The token must not be guessable: who records the relay's traffic can try guesses without asking anybody."""

TOKEN_METADATA: Final = "authorization"

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

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # Llumlets are reached directly: an http_proxy of the environment is meant for something else.
    ("grpc.enable_http_proxy", 0),
    # A restarted engine is found again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: the time that one attempt to connect may take. A busy peer needs some.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


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

    def load(self) -> Credentials:
        """Read the files. Raises CredentialsError."""
        faults: list[str] = []
        paths = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(paths) and not all(paths):
            flags = ", ".join(_flag(each.name) for each in fields(self)[:3] if not getattr(self, each.name))
            faults.append(f"mutual TLS needs {flags} as well")
        contents = {
            each.name: _read(_flag(each.name), getattr(self, each.name), each.name in ("tls_key", "token_file"), faults)
            for each in fields(self)
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
        return Credentials(contents["tls_cert"], contents["tls_key"], contents["tls_ca"], token)

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


@dataclass(frozen=True, slots=True)
class Credentials:
    """The contents; empty for what is not used. Their representation shows none of it."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    token: bytes = field(default=b"", repr=False)

    @property
    def tls(self) -> bool:
        return bool(self.certificate)

    @property
    def complete(self) -> bool:
        """Whether both ends of every connection are authenticated, and it is encrypted."""
        return self.tls and bool(self.token)

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Goes with each call."""
        return ((TOKEN_METADATA, f"Bearer {self.token.decode()}"),) if self.token else ()

    def accepts(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call with this metadata shows the token, compared in constant time."""
        if not self.token:
            return True
        shown = [value for key, value in metadata if key == TOKEN_METADATA]
        if len(shown) != 1:
            return False
        value = shown[0].encode() if isinstance(shown[0], str) else shown[0]
        return hmac.compare_digest(value, b"Bearer " + self.token)

    def channel(self, address: Address) -> aio.Channel:
        """A channel to a llumlet, opened by its first call. Every client's channel is made here.

        The scheme is written out: a host called `unix` would be taken for one.
        """
        target = f"dns:///{address}"
        if not self.tls:
            return aio.insecure_channel(target, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return aio.secure_channel(target, credentials, options=_OPTIONS)

    def listen(self, server: aio.Server, address: str) -> int:
        """Add a port to `server` and return its number. Raises RuntimeError if it cannot be had."""
        if not self.tls:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )
        return server.add_secure_port(address, credentials)


NONE: Final = Credentials()
"""Anybody may call, in clear."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The flags, the same for servers and callers."""
    for name, text in _HELP.items():
        parser.add_argument(_flag(name), default=None, metavar="FILE", help=f"{text} Default: {VARIABLES[name]}.")


def _flag(name: str) -> str:
    return "--llumlet-" + name.replace("_", "-")


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _read(flag: str, path: str, secret: bool, faults: list[str]) -> bytes:
    """The contents of a file; nothing, and a fault, if it cannot or must not be used."""
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
