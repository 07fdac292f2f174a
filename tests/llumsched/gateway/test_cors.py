# SPDX-License-Identifier: Apache-2.0
"""Pages in browsers: preflights pass to an engine, and what it tells an origin holds for the gateway's own answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llumsched.gateway import cors
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, Reply, cluster, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}
FRIEND, STRANGER = "https://app.example", "https://elsewhere.example"
KEY = "sk-0123456789abcdef"


@dataclass
class Guarded(Mock):
    """Answers as vLLM with `--allowed-origins '["https://app.example"]'`."""

    preflights: list[web.BaseRequest] = field(default_factory=list)
    may_answer: asyncio.Event | None = None

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "OPTIONS":
            return await super().answer(request)
        self.preflights.append(request)
        if self.may_answer is not None:
            await self.may_answer.wait()
        asked = request.headers.get("Access-Control-Request-Headers", "")
        headers = self._told(request) | {"Access-Control-Allow-Headers": asked, "Access-Control-Max-Age": "600"}
        is_friend = request.headers["Origin"] == FRIEND
        text = "OK" if is_friend else "Disallowed CORS origin"
        return web.Response(status=200 if is_friend else 400, text=text, headers=headers)

    def _told(self, request: web.BaseRequest) -> dict[str, str]:
        return {"Access-Control-Allow-Origin": FRIEND} if request.headers.get("Origin") == FRIEND else {}

    async def _infer(self, request: web.BaseRequest, content: bytes) -> web.StreamResponse:
        if b'"stream": true' not in content:
            response = await super()._infer(request, content)
            response.headers.update(self._told(request))
            return response
        stream = web.StreamResponse(headers=self._told(request) | {"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        await stream.write_eof()
        return stream


async def _options(it: Cluster, path: str, origin: str | None = FRIEND, **headers: str) -> Reply:
    if origin is not None:
        headers |= {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked = it.client.request("OPTIONS", it.url + path, headers=headers, data=b"of no use")
    async with asyncio.timeout(DEADLINE_S), asked as answer:
        return Reply(answer.status, answer.headers, await answer.read())


async def _ask(it: Cluster, path: str, origin: str, body: Any = None, **headers: str) -> Reply:
    headers |= {"Origin": origin}
    asked = it.client.request("GET" if body is None else "POST", it.url + path, headers=headers, json=body)
    async with asyncio.timeout(DEADLINE_S), asked as answer:
        return Reply(answer.status, answer.headers, await answer.read())


def _allowed(reply: Reply) -> str | None:
    return reply.headers.get("Access-Control-Allow-Origin")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"a": {"keys": [KEY]}}))
    path.chmod(0o600)
    return str(path)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings", "/tokenize", "/v1/responses/resp_1", "/v1/models"])
async def test_a_preflight_passes_to_an_engine_without_a_key_or_a_body(keys: str, path: str) -> None:
    mock = Guarded()
    async with cluster(mock=mock, api_key_file=keys) as it:
        wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
        reply = await _options(it, path + "?a=b", Authorization="Bearer nonsense", **wanted)
        assert (reply.status, reply.content, _allowed(reply)) == (200, b"OK", FRIEND)
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert reply.headers["Access-Control-Max-Age"] == "600"
        (seen,) = mock.preflights
        assert (seen.path, seen.headers["Access-Control-Request-Method"]) == (path, "POST")
        assert "Authorization" not in seen.headers
        assert not seen.can_read_body
        refused = await _options(it, path, STRANGER)
        assert (refused.status, _allowed(refused)) == (400, None)


@pytest.mark.asyncio
async def test_no_other_options_pass(keys: str) -> None:
    mock = Guarded()
    async with cluster(mock=mock, api_key_file=keys) as it:
        assert (await _options(it, "/sleep")).status == 401
        assert (await _options(it, "/nowhere")).status == 401
        assert (await _options(it, COMPLETIONS, None)).status == 401
        assert (await _options(it, COMPLETIONS, None, Authorization=f"Bearer {KEY}")).status == 405
        assert not mock.preflights


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateways_own_answers_tell_an_origin_what_engines_tell_it(keys: str, stream: bool) -> None:
    async with cluster(mock=Guarded(), api_key_file=keys, max_body_bytes=1000) as it:
        key = {"Authorization": f"Bearer {KEY}"}
        for origin, expected in ((FRIEND, FRIEND), (STRANGER, None)):
            await _options(it, COMPLETIONS, origin)
            for path, body, headers, status in (
                (COMPLETIONS, BODY | {"stream": stream}, key, 200),
                (COMPLETIONS, BODY, {}, 401),
                (COMPLETIONS, BODY | {"model": "none"}, key, 404),
                (COMPLETIONS, BODY | {"prompt": "x" * 1000}, key, 413),
                ("/sleep", BODY, key, 403),
                ("/v1/models", None, key, 200),
            ):
                reply = await _ask(it, path, origin, body, **headers)
                assert (reply.status, _allowed(reply)) == (status, expected), path
                assert status == 200 or "Origin" in reply.headers["Vary"]
        assert _allowed(await it.get("/health")) is None


@pytest.mark.asyncio
async def test_a_page_may_begin_with_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cors, "_MOST_ORIGINS", 2)
    async with cluster(mock=Guarded()) as it:
        for number in range(3):
            assert _allowed(await _ask(it, "/v1/models", f"https://{number}.example")) is None
        assert _allowed(await _ask(it, "/v1/models", FRIEND)) == FRIEND
        await it.lose(0)
        await it.lose(1)
        for reply, expected in (
            (await _ask(it, COMPLETIONS, FRIEND, BODY), 503),
            (await _options(it, COMPLETIONS), 502),
        ):
            assert (reply.status, _allowed(reply)) == (expected, FRIEND)
        assert (await _ask(it, "/v1/models", STRANGER)).status == 200


@pytest.mark.asyncio
async def test_preflights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cors, "_MOST_PREFLIGHTS", 2)
    mock = Guarded(may_answer=asyncio.Event())
    assert mock.may_answer is not None
    async with cluster(mock=mock) as it:
        held = [asyncio.create_task(_options(it, COMPLETIONS)) for _ in range(2)]
        await until(lambda: len(mock.preflights) == 2)
        reply = await _options(it, COMPLETIONS)
        assert (reply.status, reply.headers["Retry-After"].isdigit()) == (429, True)
        mock.may_answer.set()
        assert [(await one).status for one in held] == [200, 200]


@pytest.mark.asyncio
async def test_one_engine_that_does_not_answer_is_not_the_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(mock=Guarded(), num_engines=2) as it:
        await it.lose(0)
        for _ in range(8):
            assert (await _options(it, COMPLETIONS)).status == 200
