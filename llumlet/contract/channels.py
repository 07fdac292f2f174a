# SPDX-License-Identifier: Apache-2.0
"""gRPC channels to llumlets and stores. Every client's channel is made here."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from grpc import aio

from llumlet.contract.types import MAX_MESSAGE_BYTES
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials, Tls

_LONGEST_CALL_S: Final = 3600.0
"""Time after which calls on a channel with former certificates are ended: the longest deadline of all calls."""
_OPTIONS: Final = [
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


def open_channel(address: Address, credentials: Credentials) -> aio.Channel:
    """A channel that its first call opens, with the credential files as they are now.

    The scheme is written out: a host called `unix` would be taken for one.
    """
    target, tls = f"dns:///{address}", credentials.tls
    if tls is None:
        return aio.insecure_channel(target, options=_OPTIONS)
    of_tls = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return aio.secure_channel(target, of_tls, options=_OPTIONS)


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
            self._channel = open_channel(self._address, self._credentials)
        return self._channel

    def rest(self) -> None:
        """Lets go of the channel and ends its calls; the next call opens another."""
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
