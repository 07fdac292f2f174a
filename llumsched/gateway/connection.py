# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection to an engine, for the path that every token takes.

aiohttp's client took more than half of the gateway's time per request; it serves everything but clients' requests. This
class writes a request at once, hands on a body as it is read, and keeps the connection if the answer ended well.

    IDLE -send-> HEAD -(1xx)-> HEAD -> BODY -> DONE -> IDLE        any state -connection lost-> CLOSED
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from typing import cast

from multidict import CIMultiDict

from llumsched.gateway.body import Content
from llumsched.gateway.errors import StreamLost

_MOST_HEAD_BYTES = 64 << 10
_MOST_LINE_BYTES = 4096
_PAUSE_ABOVE_BYTES = 1 << 20
"""Unread bytes at which reading pauses, so that a slow client slows its engine's socket."""


def _text(head: bytes) -> str:
    """Decodes a head as UTF-8, or else as ISO 8859-1, in which every byte is a character."""
    try:
        return head.decode()
    except UnicodeDecodeError:
        return head.decode("latin-1")


class ConnectionState(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()
    CLOSED = enum.auto()


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.state = ConnectionState.IDLE
        self.idle_since_s = 0.0
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.has_answered = False
        """True once a byte of the present answer has come."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._raw = b""
        self._parts: list[bytes] = []
        self._num_buffered = 0
        self._is_paused = False
        self._is_kept = False
        self._is_chunked = False
        self._left: int | None = None
        """Bytes of the body or the present chunk still to come; None: until the connection ends."""
        self._num_separators = 0
        """Bytes still to come of the line end after a chunk."""
        self._in_trailers = False

    def send(self, request: Content) -> None:
        """Writes head and body. The connection must be IDLE."""
        assert self.state is ConnectionState.IDLE
        self.state = ConnectionState.HEAD
        self.has_answered = False
        self._transport.writelines(request)

    async def head(self) -> None:
        """Waits until `status` and `headers` are there. Raises StreamLost."""
        while self.state is ConnectionState.HEAD:
            await self._wait()
        if self.state is ConnectionState.CLOSED and not self._parts:
            raise StreamLost("the connection was lost")

    async def read(self) -> bytes:
        """The next part of the body; b"" at its end. Raises StreamLost if it ends early."""
        while not self._parts:
            if self.state is ConnectionState.DONE:
                return b""
            if self.state is ConnectionState.CLOSED:
                raise StreamLost("the connection was lost")
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_buffered = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, most: float = math.inf) -> bytes:
        """The whole body, or its first part once that exceeds `most` bytes. Raises StreamLost."""
        parts, num_bytes = [], 0
        while num_bytes <= most and (data := await self.read()):
            parts.append(data)
            num_bytes += len(data)
        return b"".join(parts)

    @property
    def has_ended(self) -> bool:
        """True if all of the body was read."""
        return self.state is ConnectionState.DONE and not self._parts

    @property
    def is_delimited(self) -> bool:
        """True if the end of the answer can be told from a lost connection."""
        return self._is_chunked or self._left is not None

    def settle(self) -> bool:
        """True if the connection can take another request; otherwise it is closed."""
        if self.state is ConnectionState.DONE and self._is_kept and not self._parts:
            self.state = ConnectionState.IDLE
            self.idle_since_s = time.monotonic()
            return True
        self.close()
        return False

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        until_end = self.state is ConnectionState.BODY and self._left is None and not self._is_chunked and exc is None
        self.state = ConnectionState.DONE if until_end else ConnectionState.CLOSED
        self._is_kept = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        try:
            if self.state is ConnectionState.HEAD:
                data = self._take_head(data)
            if self.state is ConnectionState.BODY and data:
                data = self._take_chunks(data) if self._is_chunked else self._take_body(data)
            if data and self.state is not ConnectionState.CLOSED:
                self._is_kept = False  # more than was asked for
                if self.state is ConnectionState.IDLE:
                    self.close()
        except ValueError:
            self.close()
        if self.state is not ConnectionState.HEAD:
            self._wake()

    def _take_head(self, data: bytes) -> bytes:
        """Returns the bytes after the head once it is complete."""
        data = self._raw + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MOST_HEAD_BYTES:
                raise ValueError("the head is too long")
            self._raw = data
            return b""
        self._raw = b""
        first, *lines = _text(data[:end]).split("\r\n")
        version, _, status = first.partition(" ")
        rest = data[end + 4 :]
        if not version.startswith("HTTP/1."):
            raise ValueError("not HTTP/1")
        self.status = int(status[:3])
        if 100 <= self.status < 200:
            return self._take_head(rest)
        self.headers = CIMultiDict()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers.add(name, value.strip())
        self._begin_body(is_kept=version != "HTTP/1.0")
        return rest

    def _begin_body(self, *, is_kept: bool) -> None:
        headers = self.headers
        self._is_kept = is_kept and headers.get("Connection", "").lower() != "close"
        self._is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length")
        self._left = 0 if self._is_chunked or self.status in (204, 304) else int(length) if length else None
        self._num_separators = 0
        self._in_trailers = False
        if not self._is_chunked and self._left is None:
            self._is_kept = False
        self.state = ConnectionState.DONE if self._left == 0 and not self._is_chunked else ConnectionState.BODY

    def _take_body(self, data: bytes) -> bytes:
        if self._left is None:
            self._put(data)
            return b""
        taken, rest = data[: self._left], data[self._left :]
        self._put(taken)
        self._left -= len(taken)
        if not self._left:
            self.state = ConnectionState.DONE
        return rest

    def _take_chunks(self, data: bytes) -> bytes:
        if self._raw:
            data, self._raw = self._raw + data, b""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                part = data[at : at + self._left]
                self._put(part)
                at += len(part)
                self._left -= len(part)
                self._num_separators = 0 if self._left else 2
            elif self._num_separators:
                if data[at] != (13 if self._num_separators == 2 else 10):
                    raise ValueError("no line end after a chunk")
                at += 1
                self._num_separators -= 1
            else:
                end = data.find(b"\r\n", at)
                if end < 0:
                    if size - at > _MOST_LINE_BYTES:
                        raise ValueError("a chunk's head is too long")
                    self._raw = data[at:]
                    return b""
                line, at = data[at:end], end + 2
                if self._in_trailers:
                    if not line:
                        self.state = ConnectionState.DONE
                        return data[at:]
                else:
                    self._left = int(line.split(b";", 1)[0], 16)
                    self._in_trailers = not self._left
                    if self._left < 0:
                        raise ValueError("a chunk of negative length")
        return b""

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_buffered += len(data)
        if self._num_buffered > _PAUSE_ABOVE_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
