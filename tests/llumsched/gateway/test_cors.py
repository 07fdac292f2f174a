# SPDX-License-Identifier: Apache-2.0
"""Pages in browsers: preflights, and the headers of answers, by `--allowed-origins`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.llumsched.gateway.support import DEADLINE_S, Cluster, Reply, cluster
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}
FRIEND, STRANGER = "https://app.example", "https://elsewhere.example"
KEY = "sk-0123456789abcdef"


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
async def test_preflight_is_answered_without_a_key(keys: str, path: str) -> None:
    async with cluster(mock=Mock(seen=[]), api_key_file=keys, allowed_origins=(FRIEND,)) as it:
        wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
        reply = await _options(it, path + "?a=b", Authorization="Bearer nonsense", **wanted)
        assert (reply.status, reply.content, _allowed(reply)) == (200, b"OK", FRIEND)
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert ("POST" in reply.headers["Access-Control-Allow-Methods"]) == (not path.startswith(("/v1/r", "/v1/m")))
        assert reply.headers["Access-Control-Max-Age"] == "600"
        refused = await _options(it, path, STRANGER)
        assert (refused.status, _allowed(refused), refused.headers["Vary"]) == (400, None, "Origin")
        assert not [one for one in it.engines.seen or [] if one["path"] == path], "no engine is asked"


@pytest.mark.asyncio
async def test_other_options_are_not_answered(keys: str) -> None:
    async with cluster(api_key_file=keys) as it:
        assert (await _options(it, "/sleep")).status == 401
        assert (await _options(it, "/nowhere")).status == 401
        assert (await _options(it, COMPLETIONS, None)).status == 401
        assert (await _options(it, COMPLETIONS, None, Authorization=f"Bearer {KEY}")).status == 405


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("origins", "origin", "expected"),
    [((FRIEND,), FRIEND, FRIEND), ((FRIEND,), STRANGER, None), (("*",), STRANGER, "*"), ((), FRIEND, None)],
)
async def test_every_answer_says_whether_a_page_may_read_it(
    keys: str, stream: bool, origins: tuple[str, ...], origin: str, expected: str | None
) -> None:
    async with cluster(api_key_file=keys, max_body_bytes=1000, allowed_origins=origins) as it:
        key = {"Authorization": f"Bearer {KEY}"}
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
            assert (reply.headers.get("Vary") == "Origin") == (origins == (FRIEND,)), path
        assert _allowed(await it.get("/health")) is None


@pytest.mark.asyncio
async def test_engine_does_not_learn_the_origin() -> None:
    mock = Mock(seen=[])
    async with cluster(mock=mock) as it:
        await _ask(it, COMPLETIONS, FRIEND, BODY)
    assert mock.seen
    assert all("Origin" not in one["headers"] for one in mock.seen)
