# SPDX-License-Identifier: Apache-2.0
"""The streaming client against a server that says what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.support.client import Client, StreamFailed


def token(index: int, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": f" t{index}", "token_ids": [index], **fields}]}


@asynccontextmanager
async def server(*script: dict[str, Any] | float | str) -> AsyncIterator[tuple[str, list[Any]]]:
    """Answers every completion with `script`: objects are events, numbers pauses, text is sent raw.
    Yields the base URL and the list of received bodies.
    """
    seen: list[Any] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["X-Request-Id"], await request.json()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in script:
            match step:
                case dict():
                    await response.write(b"data: " + json.dumps(step).encode() + b"\n\n")
                case str():
                    await response.write(step.encode())
                case _:
                    await asyncio.sleep(step)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


DONE = "data: [DONE]\n\n"


@pytest.mark.asyncio
async def test_tokens_times_and_the_end_are_recorded() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    script = (
        token(5, prompt_token_ids=[1, 2]),
        0.05,
        {"choices": [{"index": 0, "text": " a b", "token_ids": [6, 7], "finish_reason": "length"}]},
        usage,
        DONE,
    )
    async with server(*script) as (url, seen), Client(url) as client:
        stream = await client.complete([1, 2], max_tokens=3, seed=7)
        result = await stream.result()
    assert result.token_ids == [5, 6, 7]
    assert result.text == " t5 a b"
    assert result.prompt_token_ids == [1, 2]
    assert result.gaps[0] >= 0.04
    assert result.gaps[1] == 0.0
    assert result.events == [0, 1, 1]
    assert (result.finish_reason, result.usage) == ("length", usage["usage"])
    request_id, body = seen[0]
    assert stream.is_engine_id(f"cmpl-{request_id}-0-abcdefgh")
    assert (body["seed"], body["temperature"], body["return_token_ids"]) == (7, 0, True)


@pytest.mark.asyncio
async def test_waiting_for_a_token_returns_while_the_stream_goes_on() -> None:
    async with server(token(1), token(2), 1.0, DONE) as (url, _), Client(url) as client:
        stream = await client.complete("x", 9)
        await stream.wait_for(2, timeout_s=2)
        assert not stream.done
        await stream.disconnect()
        assert stream.done


@pytest.mark.asyncio
async def test_a_stream_that_ends_too_early_fails_the_wait() -> None:
    async with server(token(1), DONE) as (url, _), Client(url) as client:
        stream = await client.complete("x", 9)
        with pytest.raises(StreamFailed, match="after 1 of 3"):
            await stream.wait_for(3)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ((token(1),), "without an end mark"),
        ((token(1), {"error": {"message": "engine died"}}), "engine died"),
    ],
)
async def test_a_broken_stream_is_an_error(script: tuple[Any, ...], text: str) -> None:
    async with server(*script) as (url, _), Client(url) as client:
        stream = await client.complete("x", 9)
        with pytest.raises(StreamFailed, match=text):
            await stream.result()


@pytest.mark.asyncio
async def test_a_refusal_is_an_error() -> None:
    async with server() as (url, _), Client(url) as client:
        with pytest.raises(StreamFailed, match="404"):
            await client.chat([{"role": "user", "content": "x"}], 1)
