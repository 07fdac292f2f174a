# SPDX-License-Identifier: Apache-2.0
"""Stdout and stderr that nobody reads: a full pipe holds up no stream."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Iterator

import aiohttp
import pytest

from llumsched.gateway import access_log, lines
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.config import AccessLog
from llumsched.gateway.gateway_metrics import Metrics, Record
from llumsched.gateway.lines import LineHandler, LineWriter
from llumsched.up.ports import free_ports
from tests.llumsched.conftest import finish, start
from tests.llumsched.gateway.support import DEADLINE_S, engine, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small one; its reading and its writing end."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """What is there within a moment."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""


@pytest.mark.asyncio
async def test_a_stdout_that_nobody_reads_holds_up_no_request(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    port, metrics_port = free_ports(2)
    async with engine(Mock()) as (engine_port, _, _), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        arguments = ("--port", str(port), "--access-log", "json", "--scheduling-policy", "round-robin")
        arguments += ("--metrics-port", str(metrics_port))
        endpoint = f"127.0.0.1:{engine_port}"
        process = await start("gateway", *arguments, "--llm-backend-endpoints", endpoint, stdout=writing)
        try:
            await _serves_unread(client, process, reading, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _serves_unread(
    client: aiohttp.ClientSession, process: asyncio.subprocess.Process, reading: int, metrics: str
) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while b"listening" not in await process.stderr.readline():
            pass
        for _ in range(100):
            async with client.post(COMPLETIONS, json=BODY) as answer:
                assert answer.status == 200
        await asyncio.sleep(0.3)
        async with aiohttp.ClientSession() as operator, operator.get(metrics) as answer:
            assert "gateway_access_log_dropped_total 0.0" in await answer.text()
        written = b""
        while written.count(b"\n") < 100:
            written += _read(reading)
            await asyncio.sleep(0.01)
        assert {json.loads(line)["status"] for line in written.splitlines()} == {200}, "none was lost, or cut"
        for _ in range(50):
            async with client.post(COMPLETIONS, json=BODY) as answer:
                assert answer.status == 200
    process.terminate()
    assert (await finish(process)).code == 0, "nor does it wait for ever at its end"


@pytest.mark.asyncio
async def test_lines_that_stdout_does_not_take_are_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lines, "_MOST_BYTES", 20_000)
    monkeypatch.setattr(access_log, "_FLUSH_S", 0.0)
    reading, writing = pipe
    metrics = Metrics()
    log = AccessLogger(AccessLog.LINE, metrics.unlogged, writing)

    async def end(number: int) -> None:
        log.ended(Record(f"id-{number}", COMPLETIONS, status=200))
        await asyncio.sleep(0.001)

    def counted() -> float:
        return float(metrics.text().partition(b"\ngateway_access_log_dropped_total ")[2].split()[0])

    for number in range(300):
        await end(number)
    assert 50 < counted() < 250
    written = b""

    def is_empty() -> bool:
        nonlocal written
        written += (now := _read(reading))
        return not now and log._writer is not None and log._writer._num_given == log._writer._num_written

    await until(is_empty)
    await end(300)
    log.close()
    written += _read(reading)
    assert written.count(b"\n") == 301 - counted()
    assert b"id=id-300 " in written.splitlines()[-1]
    assert f"{counted():.0f} lines of the access log were dropped" in caplog.text


def test_log_lines_do_not_block(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    monkeypatch.setattr(lines, "STDERR", writing)
    handler = LineHandler()
    for number in range(PIPE_BYTES):
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "line %d", (number,), None))
    written = b""
    while written.count(b"\n") < PIPE_BYTES:
        written += _read(reading)
    handler.close()
    assert written.splitlines()[-1] == b"line %d" % (PIPE_BYTES - 1)


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LineWriter(writing)
    assert writer.write("one\n")
    writer.close()
    assert writer._num_written == 4
    os.close(writing)


def test_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    writer = LineWriter(writing)
    assert writer.write("x" * 50_000 + "\n")
    written = b""
    while not written.endswith(b"\n"):
        written += _read(reading)
    writer.close()
    assert len(written) == 50_001
