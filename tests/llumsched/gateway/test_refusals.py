# SPDX-License-Identifier: Apache-2.0
"""Refusals at the door: heads that cannot be read, codings, methods, paths, and handshakes that fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import ssl
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from aiohttp import compression_utils

from llumsched.gateway.access_log import _line
from llumsched.gateway.config import AccessLog
from llumsched.gateway.gateway_metrics import Record
from llumsched.gateway.refusals import Refusals
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, until
from tests.support.authority import Authority

SECRET = "sk-SECRET-0123456789"
KEY = b"Authorization: Bearer " + SECRET.encode()
COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one", "max_tokens": 2}


async def _raw(it: Cluster, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to some bytes, after which the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


HEADS = {
    "long header": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + KEY + b"a" * 9000 + b"\r\n\r\n", 431),
    "long line": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n\r\n", 431),
    "long head": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x%d: %b\r\n" % (n, b"a" * 900) for n in range(9)), 431),
    "no name": (b"GET / HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n: \x01" + SECRET.encode() + b"\r\n\r\n", 400),
    "no HTTP": (SECRET.encode() + b" \x00\x01\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\n" + KEY + b"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "NUL": (b"GET / HTTP/1.1\r\nHost: x\r\n" + KEY + b"\x00\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("name", HEADS)
async def test_head_that_cannot_be_read_is_refused_without_a_word_of_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status = HEADS[name]
    async with cluster(num_engines=1, max_head_bytes=8000) as it:
        answered, headers, body = await _raw(it, sent)
        assert (answered, headers["content-type"]) == (status, "application/json")
        assert json.loads(body)["error"]["code"] == status
        for _ in range(3):
            await _raw(it, sent)
        counted = (await it.get("/metrics")).content.decode()
        assert f'gateway_refused_total{{status_code="{status}"}} 4.0' in counted
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    line = told.getMessage()
    assert "127.0.0.1" in line
    assert not told.exc_info
    for text in (body.decode(), str(headers), line):
        assert "SECRET" not in text
        assert "aaaa" not in text


@pytest.mark.asyncio
async def test_heads_may_be_as_large_as_those_of_identity_aware_proxies() -> None:
    large = {"Cookie": "a" * 20_000, "X-Forwarded-Access-Token": "b" * 20_000}
    async with cluster(num_engines=1) as it:
        assert (await it.post(COMPLETIONS, BODY, large)).status == 200


@pytest.mark.asyncio
async def test_body_that_is_not_framed_is_refused_without_a_word_of_it() -> None:
    async with cluster(num_engines=1) as it:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, _, body = await _raw(it, head + SECRET.encode() + b"\r\n")
        assert status == 400
        assert b"SECRET" not in body


def _bomb(num_bytes: int) -> bytes:
    body = gzip.compress(b" " * num_bytes)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


@pytest.mark.asyncio
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "GZIP, identity"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
async def test_coded_body_is_refused_whoever_sends_it(path: str, coding: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"a": {"keys": [SECRET]}}))
    keys.chmod(0o600)
    async with cluster(num_engines=1, api_key_file=str(keys)) as it:
        for key in ({}, {"Authorization": f"Bearer {SECRET}"}):
            reply = await it.post(path, b"no such coding", {"Content-Encoding": coding} | key)
            assert (reply.status, reply.headers["Accept-Encoding"]) == (415, "identity")
            assert ("type" in reply.json) == (path == "/v1/messages")
        assert (await it.post(path, b"{}", {"Content-Encoding": "identity"})).status == 401


@pytest.mark.asyncio
async def test_no_byte_of_a_coded_body_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is what took the event loop, so that nothing else ran: 60 MiB come from 61 kB."""

    def decoded(*_: object) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(compression_utils.ZLibDecompressor, "__init__", decoded)
    async with cluster(num_engines=1) as it:
        status, _, body = await _raw(it, _bomb(60 << 20))
        assert (status, json.loads(body)["error"]["code"]) == (415, 415)


@pytest.mark.asyncio
async def test_refusals_of_paths_and_methods_have_the_form_of_the_api_and_a_line_in_the_access_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with cluster(num_engines=1, access_log=AccessLog.LINE) as it:
        async with it.client.delete(it.url + COMPLETIONS) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            assert (await answer.json())["error"]["code"] == 405
            assert "Server" not in answer.headers
        assert (await it.post("/sleep", {}, {"X-Request-Id": "mine"})).status == 403
        assert (await it.get("/nothing")).status == 404
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines] == [["405", COMPLETIONS], ["403", "/sleep"], ["404", "/nothing"]]
    assert "id=mine" in lines[1]
    assert "/a\\u000ab " in _line(Record("id", "/a\nb"))


@pytest.mark.asyncio
async def test_answer_of_an_engine_does_not_name_its_server() -> None:
    async with cluster(num_engines=1) as it:
        reply = await it.post(COMPLETIONS, BODY)
        assert (reply.status, "Server" in reply.headers) == (200, False)
        assert "Server" not in (await it.get("/health")).headers


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_handshake_that_fails_is_counted_and_has_one_line(
    loop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("gateway")
    trust = ssl.create_default_context(cafile=str(authority.path))
    settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}

    async def run() -> None:
        async with cluster(num_engines=1, **settings) as it:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
                writer.write(b"GET / HTTP/1.1\r\n" + KEY + b"\r\n\r\n")
                async with asyncio.timeout(DEADLINE_S):
                    await reader.read()
                writer.close()
            await until(lambda: it.gateway.metrics.tls_failures._value.get() == 3)
            url = f"https://127.0.0.1:{it.gateway.port}{COMPLETIONS}"
            for _ in range(50):
                async with it.client.post(url, json=BODY, ssl=trust) as answer:
                    assert answer.status == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "127.0.0.1" in told
    assert "HTTP_REQUEST" in told
    assert "SECRET" not in told


def test_lines_of_the_log_are_limited_and_say_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("llumsched.gateway.refusals.time.monotonic", lambda: clock[0])
    refusals = Refusals(Mock(), Mock())
    for _ in range(5):
        refusals.no_tls("10.0.0.7", "UNKNOWN_CA")
    clock[0] += 11
    refusals.no_tls("10.0.0.8", "UNKNOWN_CA")
    first, second = [record.getMessage() for record in caplog.records]
    assert "10.0.0.7" in first
    assert "4 others" in second


@pytest.mark.asyncio
async def test_body_of_a_refused_request_is_no_head() -> None:
    """A client that is still sending is to read why it was refused, and may ask again on the same connection."""
    length = 300_000
    head = f"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    async with cluster(num_engines=1, max_head_bytes=8000) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        for _ in range(2):
            writer.write(head)
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 404")
                await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                for _ in range(10):
                    writer.write(b"x" * (length // 10))
                    await writer.drain()
                    await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.asyncio
async def test_headers_that_are_no_text_do_no_harm() -> None:
    lines = [b"Connection: close, \xff", b"Authorization: Bearer \xff", b"X-Api-Key: \xfe", b"X-Request-Id: \xfd",
             b"Traceparent: \xfc", b"Content-Type: application/json"]  # fmt: skip
    body = json.dumps(BODY).encode()
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: x", *lines, b"Content-Length: %d" % len(body)])
    async with cluster(num_engines=1) as it:
        status, _, _ = await _raw(it, head + b"\r\n\r\n" + body)
        assert status == 200
