# SPDX-License-Identifier: Apache-2.0
"""The connection to engines: answers in all forms, cut into all pieces, and answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from llumlet.process.addresses import Address
from llumsched.causes import Cause
from llumsched.endpoints import Endpoint
from llumsched.gateway.backends import Backend
from llumsched.gateway.connection import Connection, ConnectionState
from llumsched.gateway.errors import StreamLost
from llumsched.gateway.forwarded import with_client
from llumsched.gateway.sse import EventStream
from llumsched.gateway.upstream import Upstream, request_head
from tests.llumsched.gateway.support import cluster, turns

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "chunked": (CHUNKED + b"3\r\nhel\r\n2;x=1\r\nlo\r\n0\r\n\r\n", b"hello", True),
    "trailers": (CHUNKED + b"A\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\n", b"0123456789", True),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", True),
    "close": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", False),
    "more than told": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi there", b"hi", False),
}
BROKEN = {
    "not http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "no status": b"HTTP/1.1 abc\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "bad chunk": CHUNKED + b"zz\r\n",
    "negative chunk": CHUNKED + b"-5\r\n",
    "no line end": CHUNKED + b"1\r\nabcd",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "endless chunk head": CHUNKED + b"1" * 10_000,
}


class Transport:
    """Notes what a connection does with it."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False
        self.pauses: list[bool] = []

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        self.written += b"".join(parts)

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.pauses.append(True)

    def resume_reading(self) -> None:
        self.pauses.append(False)


def _connection() -> tuple[Connection, Any]:
    connection, transport = Connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.send((b"GET",))
    return connection, transport


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_answers_in_pieces_of_any_size(name: str, size: int) -> None:
    answer, body, is_kept = ANSWERS[name]
    connection, transport = _connection()
    for at in range(0, len(answer), size):
        connection.data_received(answer[at : at + size])
    await connection.head()
    assert connection.status in (200, 204)
    assert await connection.read_all() == body
    assert connection.settle() is is_kept
    assert transport.is_aborted is not is_kept


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BROKEN)
async def test_invalid_answer_closes_the_connection(name: str) -> None:
    connection, transport = _connection()
    connection.data_received(BROKEN[name])
    with pytest.raises(StreamLost):  # noqa: PT012 (either may raise)
        await connection.head()
        await connection.read_all()
    assert connection.state is ConnectionState.CLOSED
    assert transport.is_aborted


@pytest.mark.asyncio
async def test_an_answer_that_ends_early_gives_what_came_and_then_fails() -> None:
    connection, _ = _connection()
    connection.data_received(CHUNKED + b"5\r\nhel")
    connection.connection_lost(None)
    await connection.head()
    assert await connection.read() == b"hel"
    with pytest.raises(StreamLost):
        await connection.read()


@pytest.mark.asyncio
async def test_an_answer_without_length_ends_with_its_connection() -> None:
    connection, _ = _connection()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nall")
    connection.connection_lost(None)
    assert await connection.read_all() == b"all"


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["Grüß".encode(), "Grüß".encode("latin-1")])
async def test_headers_reach_the_client_in_either_coding(value: bytes) -> None:
    """UTF-8, or ISO 8859-1 as in HTTP's early days: no byte is dropped."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX-Name: %b\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % value)
        writer.close()
        await writer.wait_closed()

    raw = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = Address("127.0.0.1", raw.sockets[0].getsockname()[1])
    async with raw, cluster(num_engines=0, backend_endpoints=(address,)) as it:
        reply = await it.post("/v1/embeddings", {"model": ""})
        assert (reply.status, reply.headers["X-Name"]) == (200, "Grüß")


@pytest.mark.asyncio
async def test_a_reader_that_does_not_read_pauses_the_engine() -> None:
    connection, transport = _connection()
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n")
    for _ in range(3):
        connection.data_received(b"x" * 1_000_000)
    assert transport.pauses == [True]
    await connection.read()
    assert transport.pauses == [True, False]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_upset_a_connection(data: bytes, chunked: bool) -> None:
    async def feed() -> None:
        connection, _ = _connection()
        connection.data_received((CHUNKED if chunked else b"HTTP/1.1 ") + data)
        connection.connection_lost(None)
        with contextlib.suppress(StreamLost):
            await connection.head()
            await connection.read_all()

    asyncio.run(feed())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.booleans())
def test_a_stream_in_any_pieces_is_the_same_stream(data: bytes, cuts: list[int], wants_ids: bool) -> None:
    data = data.replace(b"\x00", b'\n\ndata: {"token_ids":[1, 2]}\n\n')
    whole = EventStream(wants_ids=wants_ids)
    expected = whole.feed(data)
    events = EventStream(wants_ids=wants_ids)
    edges = [0, *sorted(cuts), len(data)]
    pieces = [events.feed(data[start:end]) for start, end in itertools.pairwise(edges)]
    if b'{"error"' not in data and b"\r" not in data:
        assert b"".join(pieces) == expected
        assert events.token_ids == whole.token_ids


def test_request_heads_carry_what_is_listed_and_no_connection_headers() -> None:
    headers = [("Connection", "Traceparent, keep-alive"), ("Traceparent", "1"), ("Host", "a"), ("Tracestate", "2")]
    passed = with_client(make_mocked_request("POST", "/v1/completions", headers=CIMultiDict(headers)))
    head = request_head(Backend(Endpoint(Address("127.0.0.1", 1))), "/v1/completions", passed, "id", 3)
    *lines, proto, end, rest = head.split(b"\r\n")
    first = b"POST /v1/completions HTTP/1.1"
    assert lines == [first, b"Host: 127.0.0.1:1", b"Content-Length: 3", b"X-Request-Id: id", b"Tracestate: 2"]
    assert (proto, end, rest) == (b"X-Forwarded-Proto: http", b"", b"")


@contextlib.asynccontextmanager
async def _server(answer: Callable[[asyncio.StreamWriter, int], None]) -> AsyncIterator[Backend]:
    """Calls `answer` with the number of the request on its connection, once for each request."""

    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                answer(writer, number)
                number += 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Backend(Endpoint(Address("127.0.0.1", server.sockets[0].getsockname()[1])))
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await turns()  # transports close their sockets


@pytest.mark.asyncio
async def test_a_kept_connection_that_the_engine_closed_meanwhile_is_replaced() -> None:
    def answer(writer: asyncio.StreamWriter, number: int) -> None:
        if number:
            writer.close()
        else:
            writer.write(ANSWERS["length"][0])

    upstream = Upstream(1.0)
    async with _server(answer) as backend:
        for _ in range(3):
            async with upstream.call(backend, "/", b"", (), "id") as got:
                assert await got.read_all() == b"hello"
    upstream.close()


@pytest.mark.asyncio
async def test_refused_connection_is_lost() -> None:
    upstream = Upstream(1.0)
    async with _server(lambda writer, number: None) as backend:
        pass
    with pytest.raises(StreamLost, match="cannot be reached") as lost:
        async with upstream.call(backend, "/", b"", (), "id"):
            pass
    assert (lost.value.cause, lost.value.was_sent) == (Cause.UNREACHABLE, False)
    assert not upstream.calls
