# SPDX-License-Identifier: Apache-2.0
"""Clients' connections, and which of them are given up: those on which a head does not end, or nothing is taken of what
waits to be written. No connection has a timer of its own for that; `Clients.look` is called once in a while.

Idle ones are ended by aiohttp, after `keep_alive_timeout_s`. What its parser refuses, and TLS handshakes that fail, go
to `Refusals`: aiohttp would quote the line that it cannot read, in its answer and in a traceback. Bodies are not
decoded: a few bytes would become many, on the event loop, before anybody asks for a key.
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
        """Takes out the header that names the software, ours or an engine's."""
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
        """The time when what may become a request began; None while there is none."""
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
        """Notes that a head is whole."""
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
    """A server whose `answer` gets each request when its head is whole."""

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
        """Whether connections end with their answers."""

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._config, self._refusals)

    def accepted(self) -> asyncio.Protocol:
        """The protocol of a connection that was just accepted."""
        return self() if self._tls is None else _BeforeTls(self._begin_tls)

    def _begin_tls(self, accepted: socket.socket, peer: str) -> None:
        task = asyncio.create_task(self._shake_hands(accepted, peer))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        task.add_done_callback(lambda _: accepted.close() if task.cancelled() else None)

    async def _shake_hands(self, accepted: socket.socket, peer: str) -> None:
        """Has a `ClientConnection` speak TLS. Not `create_server`'s own way: there nobody hears of what fails."""
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
    """Takes the socket of an accepted connection from its transport, before that reads: all that comes is for TLS.

    `start_tls` leaves moments, before the handshake and after it, in which what comes gets to nobody."""

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
    """A client's address, for people."""
    found = None if transport is None else transport.get_extra_info("peername")
    return str(found[0]) if found else "somebody"


class _Untaken(NamedTuple):
    """Bytes that are written to a client and have not left."""

    num_bytes: int
    since_s: float


class Clients:
    """All connections of a server."""

    def __init__(self, config: Config, server: ClientServer) -> None:
        self._config = config
        self._server = server
        self._untaken: dict[asyncio.Transport, _Untaken] = {}

    @property
    def shortest_s(self) -> float:
        """The shorter of the limits."""
        return min(self._config.client_timeout_s, self._config.header_timeout_s)

    def forgive(self, late_s: float, now_s: float) -> None:
        """Pardons `late_s` seconds in which nobody could be heard."""
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
