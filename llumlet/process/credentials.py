# SPDX-License-Identifier: Apache-2.0
"""How llumlets and their callers prove who they are: mutual TLS, and a bearer token.

Both ends of a connection show a certificate of the same authority; with each call the caller sends a token of its role.
Only paths travel between processes. The contents are read where they are used, and are never printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

import grpc
from grpc import aio

from llumlet.contract.types import MAX_MESSAGE_BYTES
from llumlet.process.addresses import Address
from llumlet.process.credential_files import CredentialFiles, CredentialsError, Tls, flag
from llumlet.process.roles import ALL, Role
from llumlet.process.secret_files import Current
from llumlet.process.tokens import Tokens, read_peers_tokens, read_tokens

TOKEN_METADATA: Final = "authorization"
_LONGEST_CALL_S: Final = 3600.0
"""Time after which calls on a channel with former certificates are ended: the longest deadline of all calls."""

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
    """The credential files; None for what is not used. The representation shows nothing of their contents."""

    tls_files: Current[Tls] | None = field(default=None, repr=False, compare=False)
    token_file: Current[Tokens] | None = field(default=None, repr=False, compare=False)
    role: Role = Role.PEER
    """The role whose token this process shows."""

    @classmethod
    def load(cls, files: CredentialFiles, role: Role = Role.PEER) -> Self:
        """Reads the files. Raises CredentialsError."""
        faults, tls, tokens = [], None, None
        try:
            tls = files.tls()
        except CredentialsError as error:
            faults += error.faults
        try:
            if files.token_file:
                reader = read_peers_tokens if role is Role.PEER else read_tokens
                tokens = Current(reader, "llumlets' tokens", files.token_file)
        except ValueError as error:
            faults.append(f"{flag('token_file')} {error}")
        if faults:
            raise CredentialsError(faults)
        return cls(tls, tokens, role)

    @property
    def tls(self) -> Tls | None:
        """The certificate, key and authority that the files have now; None without files."""
        return self.tls_files.value if self.tls_files else None

    @property
    def complete(self) -> bool:
        """Whether both ends of every connection are authenticated, and it is encrypted."""
        return self.tls_files is not None and self.token_file is not None

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
        """A channel to a llumlet, opened by its first call, with the files as they are now. Every client's channel is
        made here.

        The scheme is written out: a host called `unix` would be taken for one.
        """
        target, tls = f"dns:///{address}", self.tls
        if tls is None:
            return aio.insecure_channel(target, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
        return aio.secure_channel(target, credentials, options=_OPTIONS)

    def listen(self, server: aio.Server, address: str) -> int:
        """Add a port to `server` and return its number. Raises RuntimeError if it cannot be had.

        Each handshake asks for the files as they are then; connections that are open go on."""
        known = self.tls
        if known is None:
            return server.add_insecure_port(address)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal known
            if (now := self.tls) is known or now is None:
                return None
            known = now
            return _configuration_of(now)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration_of(known),
            changed,  # type: ignore[arg-type]  # the stubs forget that None keeps what there is
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)


def _configuration_of(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], root_certificates=tls.authority)


class RenewedChannel:
    """A channel to one address that is made anew when the TLS files change. Belongs to one event loop."""

    def __init__(self, credentials: Credentials, address: Address) -> None:
        self._credentials = credentials
        self._address = address
        self._channel: aio.Channel | None = None
        self._tls: Tls | None = None
        self._closing: dict[asyncio.Task[None], aio.Channel] = {}
        """Channels that close once their calls have ended, by what waits for that."""

    def get(self) -> aio.Channel:
        """The channel for a call that begins now. Calls on a former one go on."""
        if self._channel is not None and self._tls is not self._credentials.tls:
            self._let_go(_LONGEST_CALL_S)
        if self._channel is None:
            self._tls = self._credentials.tls
            self._channel = self._credentials.channel(self._address)
        return self._channel

    def rest(self) -> None:
        """Let go of the channel and end its calls; the next call opens another."""
        self._let_go(None)

    async def close(self) -> None:
        """Ends all calls of this channel, and of former ones."""
        self._let_go(None)
        former = dict(self._closing)
        for waiting in former:
            waiting.cancel()
        await asyncio.gather(*former, return_exceptions=True)
        await asyncio.gather(*(channel.close(None) for channel in former.values()))

    def _let_go(self, grace_s: float | None) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            closing = asyncio.get_running_loop().create_task(channel.close(grace_s))
            self._closing[closing] = channel
            closing.add_done_callback(self._closing.pop)


NONE: Final = Credentials()
"""No credentials: anybody may call, in clear."""
