# SPDX-License-Identifier: Apache-2.0
"""A move that is refused or fails leaves the request running at its source, with the same tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from typing import Any

import aiohttp
import pytest

from benchmarks.client import Client
from benchmarks.harness import Server
from benchmarks.model import PRESETS, build
from benchmarks.moves import Move, migrate, move_stream
from llumlet.client import LlumletClient
from llumlet.errors import LlumletError
from llumlet.types import AbortRequest, AbortResponse, MigrateRequest, Reason
from tests.integration.conftest import Engines
from tests.support.conservation import wait_idle
from tests.support.failures import failure

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
GREEDY: dict[str, Any] = {"ignore_eos": True}


async def stays_and_goes_on(
    source: Server, destination: Server, prompt: list[int] = PROMPT, length: int = 1500
) -> Move:
    """Try the move and check that the stream is what it would have been without."""
    async with Client(source.base_url) as client:
        expected = await (await client.complete(prompt, length, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(prompt, length, **GREEDY, cache_salt="moved")
        await stream.wait_for(30)
        move = await move_stream(source, destination, stream)
        result = await stream.result()
    assert move.phase == "stayed", f"{move.phase} {move.reason}"
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    await wait_idle(source)
    return move


async def test_destination_too_short(engines: Engines, conserved: object, start_server: Any) -> None:
    short = start_server(name="short", max_model_len=512)
    move = await stays_and_goes_on(engines.a, short)
    assert move.reason == "incompatible_engine"
    await wait_idle(short)


@failure(
    "the destination has no blocks left",
    "reserving",
    "refused, destination_full: the request goes on at the source",
)
async def test_destination_without_blocks(engines: Engines, conserved: object, start_server: Any) -> None:
    """57 blocks are needed; 65 exist, and a request there holds ten of them and more."""
    small = start_server(name="small", num_kv_blocks=66, max_model_len=2048)
    prompt = [100 + index * 7 % 900 for index in range(1800)]
    async with Client(small.base_url) as client:
        hog = await client.complete(list(range(300, 600)), 1700, **GREEDY)
        await hog.wait_for(2)
        move = await stays_and_goes_on(engines.a, small, prompt, length=200)
        assert not hog.done, "the destination was free again before the move"
        await hog.disconnect()
    assert move.reason == "destination_full"
    await wait_idle(small)


@failure(
    "the destination's engine is dead",
    "reserving",
    "peer_unreachable: goes on at the source",
)
async def test_destination_gone(engines: Engines, conserved: object, start_server: Any) -> None:
    doomed = start_server(name="doomed")
    os.kill(doomed.process("EngineCore"), signal.SIGKILL)
    move = await stays_and_goes_on(engines.a, doomed)
    assert move.reason == "peer_unreachable"


@failure(
    "the destination has another model",
    "reserving",
    "incompatible_engine: goes on at the source",
)
async def test_different_weights(engines: Engines, conserved: object, start_server: Any) -> None:
    other = start_server(name="other", model=build(dataclasses.replace(PRESETS["tiny"], seed=99)))
    move = await stays_and_goes_on(engines.a, other)
    assert move.reason == "incompatible_engine"
    await wait_idle(other)


async def test_different_block_size(engines: Engines, conserved: object, start_server: Any) -> None:
    other = start_server(name="blocks64", block_size=64)
    move = await stays_and_goes_on(engines.a, other)
    assert move.reason == "incompatible_engine"
    await wait_idle(other)


async def test_unknown_request(engines: Engines, conserved: object) -> None:
    (move,) = await migrate(engines.a, engines.b, request_ids=["no-such-request"])
    assert (move.phase, move.reason) == ("stayed", "unknown_request")


async def test_same_instance(engines: Engines) -> None:
    with pytest.raises(LlumletError) as refusal:
        await migrate(engines.a, engines.a, rule=("NUM_REQ", "SR", 1))
    assert refusal.value.reason == Reason.SAME_INSTANCE


async def test_wrong_instance_id(engines: Engines) -> None:
    assert engines.a.llumlet is not None
    assert engines.b.llumlet is not None
    request = MigrateRequest(
        src_engine_id="somebody-else",
        dst_engine_id=engines.b.llumlet.instance_id,
        dst_engine_ip=engines.b.llumlet.host,
        dst_engine_port=engines.b.llumlet.port,
        request_ids=["x"],
    )
    async with LlumletClient(str(engines.a.llumlet)) as client:
        with pytest.raises(LlumletError) as refusal:
            async for _ in client.migrate(request):
                pass
    assert refusal.value.reason == Reason.WRONG_INSTANCE


async def test_request_still_in_prefill_or_finished(engines: Engines, conserved: object) -> None:
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 3, **GREEDY)
        await stream.result()
    assert await migrate(engines.a, engines.b, rule=("NUM_REQ", "SR", 1)) == []


@failure(
    "the request ends by itself",
    "copying",
    "gone; the destination frees what it holds",
)
async def test_request_finishes_while_it_is_copied(engines: Engines, conserved: object, start_server: Any) -> None:
    """The copy is slowed down so that the request ends before it: gone, and nothing is left behind."""
    slow = start_server(name="slow", bandwidth_limit=200_000)
    async with Client(engines.a.base_url) as client:
        stream = await client.complete([100 + n * 7 % 900 for n in range(1500)], 300, **GREEDY)
        await stream.wait_for(5)
        move = await move_stream(engines.a, slow, stream, force=True)
        result = await stream.result()
    assert (move.phase, move.reason) == ("gone", "request_finished")
    assert len(result.token_ids) == 300
    await wait_idle(slow)


@failure(
    "the client disconnects",
    "before, during, after a move",
    "the request ends wherever it is, and everything is freed",
)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_client_leaves(engines: Engines, conserved: object, start_server: Any, moment: str) -> None:
    """The client disconnects before, during or after a move: both engines end up with nothing."""
    destination = start_server(name="paced", bandwidth_limit=2_000_000) if moment == "during" else engines.b
    async with Client(engines.a.base_url) as client:
        stream = await client.complete([100 + n * 7 % 900 for n in range(2000)], 3000, **GREEDY)
        await stream.wait_for(10)
        if moment == "before":
            await stream.disconnect()
        else:
            moving = asyncio.create_task(move_stream(engines.a, destination, stream, force=True))
            if moment == "after":
                assert (await moving).moved
                tokens = len(stream.token_ids)
                await stream.wait_for(tokens + 5)
            else:
                await asyncio.sleep(0.2)
            await stream.disconnect()
            if moment == "during":
                move = await moving
                assert (move.phase, move.reason) == ("gone", "request_aborted")
    await wait_idle(engines.a)
    await wait_idle(destination)


@failure(
    "an operator aborts the request",
    "moved on",
    "followed to its owner",
)
async def test_abort_by_an_operator_follows_the_request(engines: Engines, conserved: object) -> None:
    """An abort sent to the former owner reaches the present one."""
    assert engines.a.llumlet is not None
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 5000, **GREEDY)
        await stream.wait_for(20)
        move = await move_stream(engines.a, engines.b, stream)
        assert move.moved
        async with LlumletClient(str(engines.a.llumlet)) as llumlet:
            answer = await llumlet.abort(AbortRequest(request_ids=[move.request_id]))
        assert answer.results[0].outcome == AbortResponse.FORWARDED
        await wait_idle(engines.b)
        await stream.disconnect()


@failure(
    "more tokens are on their way than may be",
    "reserving",
    "refused, destination_busy: the request goes on at the source; a longer one goes alone",
)
async def test_limits_at_the_destination(engines: Engines, conserved: object, start_server: Any) -> None:
    """Two requests of 200 tokens are sent to where 300 tokens may be on their way, and both arrive, one by one."""
    narrow = start_server(name="narrow", bandwidth_limit=2_000_000, flags=("--llumlet-max-migration-tokens-in", "300"))
    async with Client(engines.a.base_url) as client:
        streams = [await client.complete(list(range(start, start + 200)), 1500, **GREEDY) for start in (100, 400)]
        for stream in streams:
            await stream.wait_for(5)
        moves = await migrate(engines.a, narrow, rule=("NUM_REQ", "SR", 2), stall_budget_ms=5000)
        assert sorted(move.phase for move in moves) == ["moved", "stayed"]
        assert {move.reason for move in moves if not move.moved} == {"destination_busy"}
        late = [stream for stream in streams if not any(m.moved and stream.is_engine_id(m.request_id) for m in moves)]
        assert (await move_stream(engines.a, narrow, late[0], stall_budget_ms=5000)).moved
        for stream in streams:
            await stream.disconnect()
    await wait_idle(narrow)


@failure(
    "the destination has no free batch slot",
    "reserving",
    "refused, destination_full: the request goes on at the source",
)
@failure(
    "the destination is paused",
    "reserving",
    "refused, destination_paused: the request goes on at the source",
)
async def test_destination_without_a_slot_and_paused(engines: Engines, conserved: object, start_server: Any) -> None:
    single = start_server(name="single", flags=("--max-num-seqs", "1"), env={"VLLM_SERVER_DEV_MODE": "1"})
    async with Client(single.base_url) as client:
        hog = await client.complete(list(range(300, 400)), 1700, **GREEDY)
        await hog.wait_for(2)
        move = await stays_and_goes_on(engines.a, single, length=200)
        assert not hog.done, "the slot was free again before the move"
        await hog.disconnect()
    assert (move.reason, "batch slot" in move.detail) == ("destination_full", True)
    await wait_idle(single)
    async with aiohttp.ClientSession(single.base_url) as operator:
        (await operator.post("/pause", params={"mode": "keep"})).raise_for_status()
        move = await stays_and_goes_on(engines.a, single, length=200)
        assert move.reason == "destination_paused"
        (await operator.post("/resume")).raise_for_status()
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 1000, **GREEDY)
        await stream.wait_for(20)
        assert (await move_stream(engines.a, single, stream)).moved
        await stream.disconnect()
    await wait_idle(single)
