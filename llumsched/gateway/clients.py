# SPDX-License-Identifier: Apache-2.0
"""Clients' connections. A connection is closed if a head does not end, or if its client does not read; `Clients.look`
checks all of them periodically instead of a timer per connection.

aiohttp closes idle connections after `keep_alive_timeout_s`. Requests that its parser refuses and failed TLS handshakes
go to `Refusals`, since aiohttp would quote the unreadable line. Bodies are not decompressed: that would cost the event
loop time and memory before the key is checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from llumlet.process.tasks import cancel
from llumsched.gateway import errors
from llumsched.gateway.config import Config
from llumsched.gateway.refusals import Refusals

_log = logging.getLogger(__name__)


class _Request(web.BaseRequest):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Removes the header that names the server's software."""
        response.headers.pop("Server", None)


class ClientConnection(web.RequestHandler):
    __slots__ = ("_body", "_num_head_bytes", "_refusals", "head_since_s", "is_answering")

    def __init__(self, server: ClientServer, config: Config, refusals: Refusals) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=config.keep_alive_timeout_s,
            max_line_size=config.max_head_bytes,
            max_field_size=config.max_head_bytes,
            auto_decompress=False,
        )
        self._refusals = refusals
        self._num_head_bytes = 0
        self._body: StreamReader | None = None

    @property
    def peer(self) -> str:
        return peer_of(self.transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_answering = False
        self.head_since_s: float | None = time.monotonic()
        """When the head of the present request began to arrive; None if there is none."""
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        is_body = self._body is not None and not self._body.is_eof()  # of a request that was refused unread, perhaps
        if self.head_since_s is None and not self.is_answering and not is_body:
            self.head_since_s = time.monotonic()
        super().data_received(data)
        if self.head_since_s is not None and not self._messages:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_line_size and self.transport is not None:
                self.transport.write(self._refusals.head_too_large(self.peer, self.max_line_size))
                self.close()
                self.transport.close()

    def answering(self, body: StreamReader) -> None:
        """Notes that a head is complete."""
        self._body = body
        self.head_since_s, self.is_answering, self._num_head_bytes = None, True, 0

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent already")
        if isinstance(exc, LineTooLong):
            limit = self.max_line_size
            return self._refusals.unreadable(
                self.peer, errors.HeadTooLarge(f"A line of the head exceeds {limit} bytes.")
            )
        if isinstance(exc, HttpProcessingError):
            return self._refusals.unreadable(self.peer, errors.InvalidRequest("The request's head cannot be read."))
        _log.error("a request failed", exc_info=exc)
        return self._refusals.unreadable(self.peer, errors.GatewayError("The gateway failed at this request."))

    def answered(self) -> None:
        self.is_answering = False


class ClientServer(web.Server):
    """A server that calls `answer` for each request whose head is complete."""

    def __init__(
        self,
        config: Config,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        refusals: Refusals,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(self._run, request_factory=self._request, handler_cancellation=True)
        self._answer = answer
        self._config = config
        self._refusals = refusals
        self._tls = tls
        self._handshakes: set[asyncio.Task[None]] = set()
        self.is_leaving = False
        """True if connections end with their answers."""

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._config, self._refusals)

    def accepted(self) -> asyncio.Protocol:
        """Makes the protocol of a new connection."""
        return self() if self._tls is None else _BeforeTls(self._begin_tls)

    def _begin_tls(self, accepted: socket.socket, peer: str) -> None:
        task = asyncio.create_task(self._shake_hands(accepted, peer))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        task.add_done_callback(lambda _: accepted.close() if task.cancelled() else None)

    async def _shake_hands(self, accepted: socket.socket, peer: str) -> None:
        """Has a `ClientConnection` speak TLS. `create_server` would not report failed handshakes."""
        try:
            await self._loop.connect_accepted_socket(
                self, accepted, ssl=self._tls, ssl_handshake_timeout=self._config.header_timeout_s
            )
        except ssl.SSLError as error:
            self._refusals.no_tls(peer, error.reason or "failed")
        except OSError:
            pass  # the client left, or took too long

    async def end_handshakes(self) -> None:
        await cancel(*self._handshakes)

    @property
    def clients(self) -> list[ClientConnection]:
        return cast(list[ClientConnection], self.connections)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.answering(payload)
        limit = self._config.max_body_bytes
        return _Request(message, payload, protocol, writer, task, self._loop, client_max_size=limit)

    async def _run(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._answer(request)
            if self.is_leaving:
                response.force_close()
            return response
        finally:
            cast(ClientConnection, request.protocol).answered()


class _BeforeTls(asyncio.Protocol):
    """Takes the socket of a new connection from its transport before the transport reads.

    `start_tls` would lose bytes that arrive before and right after the handshake.
    """

    def __init__(self, begin: Callable[[socket.socket, str], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = peer_of(transport)
        with suppress(OSError):  # no descriptor is left
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            accepted.setblocking(False)
            self._begin(accepted, peer)
        cast(asyncio.Transport, transport).abort()  # uvloop's is not a subclass


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """A client's address, for logs."""
    found = None if transport is None else transport.get_extra_info("peername")
    return str(found[0]) if found else "somebody"


class _Untaken(NamedTuple):
    """Bytes written to a client that have not left this process."""

    num_bytes: int
    since_s: float


class Clients:
    """The connections of a server."""

    def __init__(self, config: Config, server: ClientServer) -> None:
        self._config = config
        self._server = server
        self._untaken: dict[asyncio.Transport, _Untaken] = {}

    @property
    def shortest_s(self) -> float:
        """The shorter of the limits."""
        return min(self._config.client_timeout_s, self._config.header_timeout_s)

    def forgive(self, late_s: float, now_s: float) -> None:
        """Extends all limits by `late_s` seconds in which this process could not read."""
        for transport, untaken in self._untaken.items():
            self._untaken[transport] = untaken._replace(since_s=min(now_s, untaken.since_s + late_s))
        for connection in self._server.clients:
            if connection.head_since_s is not None:
                connection.head_since_s = min(now_s, connection.head_since_s + late_s)

    def look(self, now_s: float) -> None:
        untaken = {}
        for connection in self._server.clients:
            transport = connection.transport
            if transport is None:
                continue
            head_since_s = connection.head_since_s
            if head_since_s is not None and now_s - head_since_s > self._config.header_timeout_s:
                transport.abort()
            elif num_bytes := transport.get_write_buffer_size():
                before = self._untaken.get(transport)
                if before is None or before.num_bytes != num_bytes:
                    untaken[transport] = _Untaken(num_bytes, now_s)
                elif now_s - before.since_s <= self._config.client_timeout_s:
                    untaken[transport] = before
                else:
                    transport.abort()
        self._untaken = untaken
