# SPDX-License-Identifier: Apache-2.0
"""States that change with every step beside speculative decoding, under the V2 runner: what moves is the state behind
the last accepted draft.

Few tokens are allowed, which the model chooses by what came before, so that drafts are accepted now and then; their log
probabilities are those among all.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.runner_v2.test_speculation_and_lora import SPECULATION, accepted
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import Move, first_index, migrate
from tests.support.other_models import OTHER, build

pytestmark = pytest.mark.rest

LENGTH = 120
PROMPT = list(range(100, 130)) * 4
AT = (10, 18, 26, 34, 42, 50)
"""Tokens that have arrived before each move."""
FEW: dict[str, Any] = {
    "allowed_token_ids": [100, 200, 300, 400],
    "frequency_penalty": 1.0,
    "ignore_eos": True,
    "logprobs": 4,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    model = OTHER["qwen3-next"]
    flags = (*model.flags, "--speculative-config", json.dumps(SPECULATION))
    with Fleet(tmp_path_factory.mktemp("drafts")) as fleet:
        specs = [
            ServerSpec(build(model), name=name, instance_id=name, runner="v2", max_model_len=1024, flags=flags)
            for name in "ab"
        ]
        yield fleet.start(*specs)


async def begin(client: Client) -> Stream:
    return await client.complete(PROMPT, LENGTH, cache_salt=uuid.uuid4().hex, **FEW)


def came_together(stream: Stream, index: int) -> int:
    """Tokens of the step that brought output token `index`."""
    return stream.events.count(stream.events[index])


@pytest.mark.asyncio
async def test_there_and_back(pair: list[Server]) -> None:
    """Again and again."""
    a, b = pair
    before = [await accepted(server) for server in pair]
    async with Client(a.base_url) as client:
        unmoved, again = [await (await begin(client)).result() for _ in range(2)]
        assert outcome(unmoved) == outcome(again), "void: two unmoved runs differ"
        stream = await begin(client)
        moves: list[Move] = []
        for number, count in enumerate(AT):
            source, destination = (b, a) if number % 2 else (a, b)
            held = await held_by(source, stream, count)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        moved = await stream.result()
    assert [(it.phase, it.mode, it.recomputed_tokens) for it in moves] == [("moved", "live", 0)] * len(AT), moves
    assert outcome(moved) == outcome(unmoved)
    assert {*moved.token_ids} == {*FEW["allowed_token_ids"]}, "too little depends on what came before"
    last = [came_together(moved, first_index(move, len(PROMPT)) - 1) for move in moves]
    assert max(last) > 1, f"none moved right behind an accepted draft: {last}"
    after = [await accepted(server) for server in pair]
    assert all(late > early for early, late in zip(before, after, strict=True)), "no draft was accepted"
    for server in pair:
        await wait_idle(server)
