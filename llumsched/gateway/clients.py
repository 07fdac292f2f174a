# SPDX-License-Identifier: Apache-2.0
"""Clients' connections, and which of them are given up: those on which a head does not end, or nothing is taken of what
waits to be written. No connection has a timer of its own for that; `Clients.look` is called once in a while.

Idle ones are ended by aiohttp, after `keep_alive_timeout_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from aiohttp import web

from llumsched.gateway.config import Config


class ClientConnection(web.RequestHandler):
    __slots__ = ("head_since_s", "is_answering")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_answering = False
        self.head_since_s: float | None = time.monotonic()
        """The time when what may become a request began; None while there is none."""
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.head_since_s is None and not self.is_answering:
            self.head_since_s = time.monotonic()
        super().data_received(data)

    def answering(self) -> None:
        """Notes that a head is whole."""
        self.head_since_s, self.is_answering = None, True

    def answered(self) -> None:
        self.is_answering = False


class ClientServer(web.Server):
    """A server whose `answer` gets each request when its head is whole."""

    def __init__(self, config: Config, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(self._run, request_factory=self._request, handler_cancellation=True)
        self._answer = answer
        self._keep_alive_timeout_s = config.keep_alive_timeout_s
        self._max_body_bytes = config.max_body_bytes
        self.is_leaving = False
        """Whether connections end with their answers."""

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, loop=self._loop, keepalive_timeout=self._keep_alive_timeout_s)

    @property
    def clients(self) -> list[ClientConnection]:
        return cast(list[ClientConnection], self.connections)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.answering()
        limit = self._max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=limit)

    async def _run(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._answer(request)
            if self.is_leaving:
                response.force_close()
            return response
        finally:
            cast(ClientConnection, request.protocol).answered()


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
