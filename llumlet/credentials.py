# SPDX-License-Identifier: Apache-2.0
"""How llumlets and their callers prove who they are: mutual TLS, and a bearer token.

Both ends of a connection show a certificate of the same authority; with each call the caller sends a token of its role.
Only paths travel between processes. The contents are read where they are used, and are never printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

import grpc
from grpc import aio

from llumlet.credential_files import CredentialFiles, CredentialsError, flag
from llumlet.roles import ALL, Role
from llumlet.secret_files import Current
from llumlet.tokens import Tokens, read_peers_tokens, read_tokens
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
    """Contents of the credential files; empty for what is not used. Their representation shows none of it."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    token_file: Current[Tokens] | None = field(default=None, repr=False, compare=False)
    role: Role = Role.PEER
    """The role whose token this process shows."""

    @classmethod
    def load(cls, files: CredentialFiles, role: Role = Role.PEER) -> Self:
        """Reads the files. Raises CredentialsError."""
        faults, tls, tokens = [], dict[str, bytes](), None
        try:
            tls = files.read_tls()
        except CredentialsError as error:
            faults += error.faults
        try:
            if files.token_file:
                reader = read_peers_tokens if role is Role.PEER else read_tokens
                tokens = Current(files.token_file, reader, "llumlets' tokens")
        except ValueError as error:
            faults.append(f"{flag('token_file')} {error}")
        if faults:
            raise CredentialsError(faults)
        return cls(tls["tls_cert"], tls["tls_key"], tls["tls_ca"], tokens, role)

    @property
    def tls(self) -> bool:
        return bool(self.certificate)

    @property
    def complete(self) -> bool:
        """Whether both ends of every connection are authenticated, and it is encrypted."""
        return self.tls and self.token_file is not None

    @property
    def tokens(self) -> Tokens | None:
        """The tokens that the file has now; None without a file."""
        return self.token_file.value if self.token_file else None

    @property
    def own_tokens(self) -> tuple[bytes, ...]:
        """Tokens of this process's role, in clear; the first is the one that it shows."""
        return self.tokens.in_clear(self.role) if self.tokens else ()

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """The token, as gRPC metadata that goes with each call; empty without a token file."""
        own = self.own_tokens
        return ((TOKEN_METADATA, f"Bearer {own[0].decode()}"),) if own else ()

    def roles(self, metadata: Iterable[tuple[str, str | bytes]]) -> frozenset[Role]:
        """Roles of the token that a call's metadata shows; none for a stranger, all if there is no token file."""
        tokens = self.tokens
        if tokens is None:
            return ALL
        shown = [value for key, value in metadata if key == TOKEN_METADATA]
        if len(shown) != 1:
            return frozenset()
        value = shown[0].decode("latin-1") if isinstance(shown[0], bytes) else shown[0]
        scheme, _, token = value.partition(" ")
        return tokens.roles(token) if scheme == "Bearer" else frozenset()

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
"""No credentials: anybody may call, in clear."""
