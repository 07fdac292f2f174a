# SPDX-License-Identifier: Apache-2.0
"""What stands between clients and the gateway closes connections that are silent: streams get comments meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from aiohttp import web

from llumsched.gateway.sse import DONE, KEEP_ALIVE, event
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, until
from tests.support.mock_api import Mock

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 2, "messages": [], "stream": True}
SOON_S = 0.1


def _told(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


EVENTS = [_told("a"), _told("b", "stop"), DONE]
MESSAGE_EVENTS = [b'event: message_start\ndata: {"type":"message_start"}\n\n', b"event: message_stop\ndata: {}\n\n"]


@dataclass
class Slow(Mock):
    """Sends a stream's head at once, as vLLM does, and each of these parts after a while."""

    parts: list[bytes] = field(default_factory=lambda: list(EVENTS))
    pauses_s: list[float] = field(default_factory=lambda: [5 * SOON_S])
    """The last one is that of all others, too."""
    is_lost_after: list[int] = field(default_factory=list)
    """The next streams break off after so many parts."""
    num_streams: int = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in (COMPLETIONS, CHAT, MESSAGES) or not (await request.json()).get("stream"):
            return await super().answer(request)
        self.num_streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_lost_after = self.is_lost_after.pop(0) if self.is_lost_after else None
        for number, part in enumerate(self.parts):
            await asyncio.sleep(self.pauses_s[min(number, len(self.pauses_s) - 1)])
            if number == is_lost_after:
                assert request.transport is not None
                request.transport.close()
                break
            await response.write(part)
        return response


async def _stream(it: Cluster, path: str = COMPLETIONS) -> tuple[list[bytes], bytes]:
    """The chunks of a stream, and all of it but comments."""
    chunks = []
    async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + path, json=BODY) as answer:
        assert answer.status == 200
        async for chunk, _ in answer.content.iter_chunks():
            chunks.append(chunk)
    return chunks, b"".join(chunks).replace(KEEP_ALIVE, b"")


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "events"), [(COMPLETIONS, EVENTS), (MESSAGES, MESSAGE_EVENTS)])
async def test_a_silent_stream_gets_comments_from_its_head_to_its_end(path: str, events: list[bytes]) -> None:
    async with cluster(mock=Slow(parts=events), sse_keepalive_s=SOON_S) as it:
        started_s = time.monotonic()
        chunks, rest = await _stream(it, path)
        most = (time.monotonic() - started_s) / SOON_S
        assert b"".join(chunks).count(KEEP_ALIVE) <= most, "one for each silence of that length"
        assert chunks[0] == KEEP_ALIVE, "long before the first event"
        assert KEEP_ALIVE in chunks[chunks.index(events[0]) :], "and between events"
        assert rest == b"".join(events)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "events"), [(COMPLETIONS, EVENTS), (MESSAGES, MESSAGE_EVENTS)])
async def test_a_comment_stands_between_two_events(path: str, events: list[bytes]) -> None:
    whole = b"".join(events)
    cuts = [0, 3, len(events[0]) - 1, len(events[0]) + 7, len(whole)]
    parts = [whole[start:end] for start, end in itertools.pairwise(cuts)]
    async with cluster(mock=Slow(parts=parts, pauses_s=[3 * SOON_S]), sse_keepalive_s=SOON_S) as it:
        _, rest = await _stream(it, path)
        assert rest == whole


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_a_stream_that_is_not_silent_for_so_long_gets_none(seconds: float) -> None:
    async with cluster(mock=Slow(), sse_keepalive_s=seconds) as it:
        chunks, _ = await _stream(it)
        assert KEEP_ALIVE not in chunks


@pytest.mark.asyncio
async def test_an_answer_in_one_piece_gets_none() -> None:
    async with cluster(mock=Mock(interval_s=2 * SOON_S), sse_keepalive_s=SOON_S) as it:
        reply = await it.post(COMPLETIONS, BODY | {"stream": False})
        assert reply.json["usage"]["completion_tokens"] == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "events"), [(COMPLETIONS, EVENTS), (MESSAGES, MESSAGE_EVENTS)])
async def test_a_comment_does_not_keep_a_stream_from_another_instance(path: str, events: list[bytes]) -> None:
    """The client has nothing of the answer yet."""
    mock = Slow(parts=events, is_lost_after=[0])
    async with cluster(mock=mock, sse_keepalive_s=SOON_S) as it:
        chunks, rest = await _stream(it, path)
        assert chunks[0] == KEEP_ALIVE
        assert (mock.num_streams, rest) == (2, b"".join(events))
        counted = (await it.get("/metrics")).content
        assert b'request_retry_total{model="mock",status_code="200"} 1.0' in counted
        assert b"request_continuation_total{" not in counted


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_after_a_comment_a_stream_that_cannot_begin_ends_with_an_error(path: str) -> None:
    async with cluster(mock=Slow(is_lost_after=[0] * 9), sse_keepalive_s=SOON_S, retry_max_count=1) as it:
        chunks, rest = await _stream(it, path)
        assert chunks[0] == KEEP_ALIVE
        error = json.loads(rest.partition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert "No instance answered" in error["message"]
        assert rest.endswith(DONE if path == COMPLETIONS else b"\n\n")
        assert b'request_total{model="mock",status_code="502"} 1.0' in (await it.get("/metrics")).content
        assert b"request_continuation_total{" not in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_a_client_that_leaves_meanwhile_ends_its_request() -> None:
    mock = Slow(pauses_s=[DEADLINE_S])
    async with cluster(mock=mock, sse_keepalive_s=SOON_S) as it:
        async with it.client.post(it.url + COMPLETIONS, json=BODY) as answer:
            assert await answer.content.readany() == KEEP_ALIVE
        await it.until_idle()
        await until(lambda: not it.gateway.upstream.calls)


@pytest.mark.asyncio
async def test_openais_own_client_leaves_comments_out() -> None:
    async with cluster(mock=Slow(), sse_keepalive_s=SOON_S) as it:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"{it.url}/v1")
        stream = await client.completions.create(model="mock", prompt="one", stream=True)
        assert "".join([one.choices[0].text async for one in stream]) == "ab"
        await client.close()


@pytest.mark.asyncio
async def test_refused_stream_gets_no_comment_after_its_answer() -> None:
    """The round of comments goes through a list in which requests stand that have ended meanwhile."""

    known = []

    class All(set[Any]):
        def add(self, one: Any) -> None:
            known.append(one)
            super().add(one)

    async with cluster(num_engines=1, mock=Mock(status=400)) as it, asyncio.timeout(DEADLINE_S):
        it.gateway.services.streamed = All()
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        content = json.dumps(BODY).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")
        await it.until_idle()
        (attempts,) = known
        await attempts.keep_alive(time.monotonic(), time.monotonic())
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == 1
        writer.close()
        await writer.wait_closed()
