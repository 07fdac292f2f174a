# SPDX-License-Identifier: Apache-2.0
"""Engines that tell to which experts they have routed each token, as reinforcement learning wants it: requests go on
elsewhere with their tokens alone, and the answer has the experts of all its tokens, whichever engine has told them."""

from __future__ import annotations

import asyncio
import base64
import io
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.integration.test_lost_owner import engine_of
from tests.runner_v2.test_marks_and_traces import one_with
from tests.support.conservation import wait_idle
from tests.support.harness import SERVED_NAME, Fleet, Server, ServerSpec
from tests.support.moves import migrate, requests
from tests.support.other_models import OTHER, build

MODEL = OTHER["qwen3-moe"]
PROMPT = list(range(100, 160))
LENGTH = 48
FLAGS = (*MODEL.flags, "--enable-return-routed-experts")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Fleet(tmp_path_factory.mktemp("experts")) as fleet:
        specs = [
            ServerSpec(build(MODEL), name=name, instance_id=name, runner="v2", flags=FLAGS, executor="mp")
            for name in "ab"
        ]
        yield fleet.start(*specs)


class Request:
    """One to the first of two engines; `answer` is all of it."""

    def __init__(self, server: Server, **more: Any) -> None:
        body = {
            "model": SERVED_NAME,
            "prompt": PROMPT,
            "max_tokens": LENGTH,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
            **more,
        }
        self._task = asyncio.create_task(self._send(f"{server.base_url}/v1/completions", body))

    async def _send(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
            return dict(choice)

    async def answer(self) -> tuple[list[int], np.ndarray]:
        choice = await asyncio.wait_for(self._task, 120)
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        return choice["token_ids"], experts


@pytest.mark.asyncio
@pytest.mark.parametrize("start", [30, *(pytest.param(start, marks=pytest.mark.rest) for start in (0, len(PROMPT)))])
async def test_there_and_back(pair: list[Server], start: int) -> None:
    """`start`: the first token of the prompt of which somebody wants to know."""
    a, b = pair
    tokens, experts = await Request(a, routed_experts_prompt_start=start).answer()
    assert experts.shape == (len(PROMPT) - start + LENGTH - 1, 4, 2)
    assert len({row.tobytes() for row in experts}) > 10, "all go the same way"
    moving = Request(a, routed_experts_prompt_start=start)
    for source, destination, at in ((a, b, 10), (b, a, 25)):
        (move,) = await migrate(source, destination, request_ids=[await one_with(source, at)], method="auto")
        assert (move.phase, move.mode) == ("moved", "recompute"), move
    got_tokens, got = await moving.answer()
    assert got_tokens == tokens
    assert np.array_equal(got, experts)
    for server in pair:
        await wait_idle(server)


@pytest.mark.asyncio
@pytest.mark.rest
async def test_its_engine_is_lost(pair: list[Server]) -> None:
    """The last story of these two."""
    a, b = pair
    tokens, experts = await Request(a).answer()
    lost = Request(a)
    (move,) = await migrate(a, b, request_ids=[await one_with(a, 10)], method="auto")
    assert move.mode == "recompute"
    await one_with(b, 20)
    engine_of(b).kill()
    got_tokens, got = await lost.answer()
    assert got_tokens == tokens
    assert np.array_equal(got, experts)
    assert not await requests(a)
