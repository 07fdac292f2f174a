# SPDX-License-Identifier: Apache-2.0
"""Clients' connections: how long a head, a body and nothing at all may take, and what happens without descriptors."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from llumsched import descriptors
from llumsched.gateway import workers
from llumsched.gateway.config import Config
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}


def _post(content: bytes, length: int | None = None) -> bytes:
    length = len(content) if length is None else length
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), length) + content


REQUEST = _post(json.dumps(BODY).encode())


async def _answer(reader: asyncio.StreamReader) -> int:
    """The status of one answer, which is read to its end."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length))
    return int(head.split()[1])


async def _end(reader: asyncio.StreamReader) -> float:
    """Seconds until the gateway closes the connection."""
    began_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        with suppress(ConnectionResetError):
            assert not await reader.read()
    return time.monotonic() - began_s


@pytest.mark.asyncio
@pytest.mark.parametrize("begun", [b"", b"POST", REQUEST[:40]], ids=["nothing", "a word", "half"])
async def test_a_first_head_is_to_come_in_time(begun: bytes) -> None:
    async with cluster(num_engines=1, header_timeout_s=0.3) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(begun)
        assert 0.2 < await _end(reader) < 10
        writer.close()


@pytest.mark.asyncio
async def test_bytes_that_trickle_give_a_head_no_more_time() -> None:
    async with cluster(num_engines=1, header_timeout_s=0.5) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(REQUEST)
        assert await _answer(reader) == 200
        ended = asyncio.create_task(_end(reader))
        for number in range(1, len(REQUEST)):
            writer.write(REQUEST[number - 1 : number])
            await asyncio.sleep(0.02)
            if ended.done():
                break
        assert number < 100
        writer.close()


@pytest.mark.asyncio
async def test_between_requests_a_connection_may_wait_longer_than_for_a_head() -> None:
    async with cluster(num_engines=1, header_timeout_s=0.1, keep_alive_timeout_s=3.0) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        for _ in range(2):
            writer.write(REQUEST)
            assert await _answer(reader) == 200
            answered_s = time.monotonic()
            await asyncio.sleep(0.3)
        await _end(reader)
        assert time.monotonic() - answered_s > 1.0
        writer.close()


@pytest.mark.asyncio
async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with cluster(mock=Mock(interval_s=0.1), header_timeout_s=0.05, keep_alive_timeout_s=0.05) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(REQUEST)
        assert await _answer(reader) == 200
        writer.close()


@pytest.mark.asyncio
async def test_a_request_may_come_slowly_but_not_by_the_byte() -> None:
    """While this process stands still it hears nothing, and that is not the client's doing."""
    async with cluster(client_timeout_s=0.5, max_requests=1) as it:
        content = json.dumps(BODY | {"prompt": "x" * 8000}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(_post(b"", len(content)))
        for at in range(0, len(content), 2048):
            await asyncio.sleep(0.15)
            writer.write(content[at : at + 2048])
            if at:
                time.sleep(0.6)  # noqa: ASYNC251 - it stands still
        assert await _answer(reader) == 200
        writer.write(_post(b"", len(content)))
        answered = asyncio.create_task(_answer(reader))
        for at in range(len(content)):
            writer.write(content[at : at + 1])
            await asyncio.sleep(0.05)
            if answered.done():
                break
        assert answered.result() == 408
        await it.until_idle()
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
async def test_a_request_that_says_that_it_is_too_large_is_not_read(expects: bytes) -> None:
    async with cluster(max_body_bytes=1000) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(_post(b"", 1001).replace(b"\r\n", b"\r\n" + expects, 1))
        assert await _answer(reader) == 413, "nor was it asked for"
        await it.until_idle()
        writer.close()


@contextmanager
def _files(number: int) -> Iterator[None]:
    """No more than so many for a while. Those that are open stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.asyncio
async def test_being_out_of_descriptors_is_nobody_elses_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await _answer(reader) == 200
        with _files(3):
            for _ in range(8):
                writer.write(REQUEST)
                assert await _answer(reader) == 503
            await it.gateway.backends.refresh()
            for backend in it.gateway.backends:
                assert await it.gateway.backends.is_healthy(backend, 1.0), "nothing is known of it"
        _is_well(it)
        assert "RLIMIT_NOFILE" in caplog.text
        assert len([record for record in caplog.records if "RLIMIT_NOFILE" in record.message]) == 1
        writer.write(REQUEST)
        assert await _answer(reader) == 200
        writer.close()


def _is_well(it: Cluster) -> None:
    assert not it.gateway.backends.avoided()
    assert len(it.gateway.backends) == 2


def test_the_limit_is_raised_and_compared_with_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(workers, "_work", lambda config: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with _files(hard // 2):
        assert workers.run(Config(max_requests=8)) == hard
        assert not capsys.readouterr().err
        assert workers.run(Config(max_requests=hard)) == hard
    said = capsys.readouterr().err
    assert f"{hard} open files are allowed" in said
    assert f"take --max-requests {(hard - 256) // 2}" in said
    assert not descriptors.shortage(resource.RLIM_INFINITY, 1 << 40)


@pytest.mark.asyncio
async def test_body_that_comes_steadily_but_for_too_long_is_refused() -> None:
    async with cluster(num_engines=1, body_timeout_s=0.5) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(_post(b"", 10_000_000))
        answer = asyncio.create_task(_answer(reader))
        while not answer.done():
            writer.write(b" " * 2048)
            await asyncio.sleep(0.02)
        assert await answer == 408
        writer.close()
        await it.until_idle()


@pytest.mark.asyncio
async def test_bodies_in_flight_have_a_limit_together() -> None:
    body = BODY | {"filler": "x" * 10_000}
    async with cluster(num_engines=1, max_bodies_bytes=25_000, mock=Mock(seen=[], interval_s=0.05)) as it:
        long = body | {"max_tokens": 1000}
        running = [asyncio.create_task(it.post(COMPLETIONS, long)) for _ in range(2)]
        await until(lambda: len(it.engines.answering) == 2)
        reply = await it.post(COMPLETIONS, body)
        assert (reply.status, "Retry-After" in reply.headers) == (429, True)
        assert (await it.post(COMPLETIONS, BODY)).status == 200, "a small one has room"
        for one in running:
            one.cancel()
        await it.until_idle()
        assert it.gateway.services.bodies.num_bytes == 0
        assert (await it.post(COMPLETIONS, body)).status == 200


@pytest.mark.asyncio
async def test_byte_order_mark_before_a_body_is_left_out() -> None:
    async with cluster(num_engines=1) as it:
        assert (await it.post(COMPLETIONS, b"\xef\xbb\xbf" + json.dumps(BODY).encode())).status == 200
        assert json.loads((it.engines.seen or [])[0]["content"]) == BODY
