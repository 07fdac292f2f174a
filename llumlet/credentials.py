# SPDX-License-Identifier: Apache-2.0
"""How llumlets and their callers prove who they are: mutual TLS, and a bearer token.

Both ends of a connection show a certificate of the same authority; with each call the caller sends the token that all
instances of a cluster share. Only paths travel between processes. The contents are read where they are used, and are
never printed.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

import grpc
from grpc import aio

from llumlet.credential_files import CredentialFiles
from llumlet.types import MAX_MESSAGE_BYTES, Address

TOKEN_METADATA: Final = "authorization"

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


@dataclass(frozen=True, slots=True)
class Credentials:
    """The contents; empty for what is not used. Their representation shows none of it."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    token: bytes = field(default=b"", repr=False)

    @classmethod
    def load(cls, files: CredentialFiles) -> Self:
        """Raises CredentialsError."""
        read = files.read()
        return cls(read["tls_cert"], read["tls_key"], read["tls_ca"], read["token_file"])

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
