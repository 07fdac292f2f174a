# SPDX-License-Identifier: Apache-2.0
"""What a cell of the matrix cannot hold: several requests at once, and ends that fall on the hand-over."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.exactness.cells import CONFIGURATIONS
from tests.exactness.test_matrix import PROMPT, held_by, outcome
from tests.support.client import Client, Stream, StreamFailed
from tests.support.conservation import wait_idle
from tests.support.harness import Server
from tests.support.moves import first_index, migrate, requests

pytestmark = [
    pytest.mark.parametrize("fleet_of", CONFIGURATIONS[:1], ids=str, indirect=True, scope="package"),
    pytest.mark.asyncio(loop_scope="function"),
]

MOST_TRIES = 60


async def start(client: Client, length: int, **parameters: Any) -> Stream:
    return await client.complete(PROMPT, length, cache_salt=uuid.uuid4().hex, **{"ignore_eos": True, **parameters})


async def test_children_move_to_different_engines(fleet_of: dict[str, Server]) -> None:
    """n = 2: one child goes to B, the other to C; the unmoved run has the two in one batch, as float32 allows."""
    a, b, c = fleet_of.values()
    parameters = {"n": 2, "seed": 5, "temperature": 1.0}
    async with Client(a.base_url) as client:
        first, second = [await (await start(client, 300, **parameters)).result() for _ in range(2)]
        assert first.choices == second.choices, "void: two unmoved runs differ"
        moved = await start(client, 300, **parameters)
        await moved.wait_for(60)
        children = sorted(info.request_id for info in await requests(a) if moved.request_id in info.request_id)
        assert len(children) == 2
        moves = [
            move
            for child, to in zip(children, (b, c), strict=True)
            for move in await migrate(a, to, request_ids=[child])
        ]
        await moved.result()
    assert all(move.live for move in moves), moves
    assert set(moved.choices) == {0, 1}
    assert moved.choices == first.choices
    assert moved.usage == first.usage


async def test_several_cross_at_once(fleet_of: dict[str, Server]) -> None:
    """Two go from A to B while two go from B to A: four unmoved runs had as many neighbours, in float32."""
    a, b, _ = fleet_of.values()
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 11}]
    async with Client(a.base_url) as at_a, Client(b.base_url) as at_b:

        async def both(length: int) -> list[Stream]:
            return [await start(client, length, **kind) for client in (at_a, at_b) for kind in kinds]

        first = [await stream.result() for stream in await both(300)]
        second = [await stream.result() for stream in await both(300)]
        assert [one.choices for one in first] == [one.choices for one in second], "void: two unmoved runs differ"
        moved = await both(300)
        ids = [
            [(await held_by(server, stream, 30)).request_id for stream in streams]
            for server, streams in ((a, moved[:2]), (b, moved[2:]))
        ]
        there, back = await asyncio.gather(migrate(a, b, request_ids=ids[0]), migrate(b, a, request_ids=ids[1]))
        results = [await stream.result() for stream in moved]
    assert len(there) == len(back) == 2
    assert all(move.live for move in there + back), there + back
    assert [one.choices for one in results] == [one.choices for one in first]


@pytest.mark.parametrize(
    "ending",
    [
        "max_tokens",
        "stop string",
        *(
            pytest.param(it, marks=pytest.mark.rest)
            for it in ("stop_token_ids", "stop string, included", "end of sequence")
        ),
    ],
)
async def test_end_on_the_hand_over(fleet_of: dict[str, Server], ending: str) -> None:
    """The destination's very first token is the last one. The move is tried earlier or later until it falls so."""
    a, b, _ = fleet_of.values()
    async with Client(a.base_url) as client:
        length, parameters = await _ending(client, ending)
        expected = await (await start(client, length, **parameters)).result()
        again = await (await start(client, length, **parameters)).result()
        assert outcome(expected) == outcome(again), "void: two unmoved runs differ"
        for word in parameters.get("stop", ()):
            assert expected.stop_reason == word
            assert expected.text.endswith(word) is (ending == "stop string, included")
        num_tokens = len(expected.token_ids)
        ahead = 10
        for _ in range(MOST_TRIES):
            stream = await start(client, length, **parameters)
            engine_id = (await held_by(a, stream, 1)).request_id
            try:
                await stream.wait_for(num_tokens - ahead)
            except StreamFailed:
                pytest.fail(f"it ended early, at {len(stream.token_ids)} of {num_tokens} tokens")
            (move,) = await migrate(a, b, request_ids=[engine_id])
            result = await stream.result()
            assert outcome(result) == outcome(expected)
            assert move.phase in ("moved", "gone", "stayed"), move
            await wait_idle(a)
            await wait_idle(b)
            if not move.moved:
                ahead += 1
                continue
            computed_there = num_tokens - first_index(move, len(stream.prompt_token_ids))
            if computed_there == 1:
                return
            ahead = max(2, ahead - computed_there + 1)
    pytest.fail(f"the end never fell on the hand-over in {MOST_TRIES} tries")


async def _ending(client: Client, ending: str) -> tuple[int, dict[str, Any]]:
    """Length limit and parameters of a request that ends after 60 tokens or so, in the way asked for."""
    if ending == "max_tokens":
        return 60, {}
    if ending == "end of sequence":
        guided = {"structured_outputs": {"regex": "[a-z]{60}"}, "temperature": 1.0, "seed": 3}
        return 100, {**guided, "ignore_eos": False}
    free = await (await start(client, 100)).result()
    index = next(at for at in range(60, 100) if free.token_ids.index(free.token_ids[at]) == at)
    if ending == "stop_token_ids":
        return 100, {"stop_token_ids": [free.token_ids[index]]}
    words = free.text.split()
    word = next(word for word in words[len(words) // 2 :] if free.text.index(word) > len(free.text) // 2)
    return 100, {"stop": [word], "include_stop_str_in_output": ending == "stop string, included"}
