# SPDX-License-Identifier: Apache-2.0
"""An engine is paused, put to sleep, reset or given other weights while a request moves out of it, or into it."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import AsyncMPClient

from llumlet.contract.types import MovePhase, Reason
from tests.shells.cells import company
from tests.shells.circumstances import copying, hanging, replays_only_at
from tests.shells.cluster import SECONDS, cluster_of, retold, side_by_side, until
from tests.shells.marks import MARKS, both
from tests.support.failures import failure
from vllm_llumnix.engine import pauses
from vllm_llumnix.engine.service import agent

pytestmark = MARKS

Call = Callable[[AsyncMPClient], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "pause-abort": lambda client: client.pause_scheduler_async("abort"),
    "pause-wait": lambda client: client.pause_scheduler_async("wait"),
    "pause-keep": lambda client: client.pause_scheduler_async("keep"),
    "sleep": lambda client: client.sleep_async(1, "abort"),
    "sleep-keep": lambda client: client.sleep_async(1, "keep"),
    "reset": lambda client: client.reset_prefix_cache_async(True, True),
    "weights": lambda client: client.collective_rpc_async("update"),
}
ABORTS = ("pause-abort", "sleep")
ENDLESS = 10_000.0


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Pauses wait for moves as long as it takes."""
    with mock.patch.object(pauses, "QUIET_SECONDS", ENDLESS), mock.patch.object(agent, "QUIET_SECONDS", ENDLESS):
        yield


async def interrupted(model_dir: Path, call: str, at: str, *, final: bool, asynchronous: bool) -> list[str]:
    """The call comes to `at` while a copy from A to B is under way, and succeeds; everybody goes on afterwards."""
    async with cluster_of(model_dir, "AB", asynchronous=asynchronous) as cluster:
        engine, client = cluster[at].engine, cluster[at].client
        port = engine.kvconn.port
        stream, own = await cluster.stream("A", num_prompt=300), await cluster.stream("B")
        await stream.reaches(5)
        await own.reaches(5)
        with copying(cluster["B"], final=final) as begun:
            moving = cluster.begin(cluster.migrate(stream))
            await until(begun.is_set, lambda: "no copy")
            for one in (stream, own):
                one.left = call in ABORTS and one.at is cluster[at]
            called = cluster.begin(CALLS[call](client))  # type: ignore[arg-type]
            if call in ("reset", "weights"):
                answer = await called
                assert answer is True or call == "weights"
            else:
                await until(lambda: port.paused, lambda: "not paused")
                if at == "B":
                    await until(lambda: not cluster["B"].engine.agent.arrivals.pending(), lambda: "not called off")
                    assert not called.done(), "its mover may still write"
        if call == "pause-wait":
            cluster.hurry()
        await called
        if port.paused:
            assert not port.has_frozen
            assert not port.holds_blocks
            assert call == "pause-wait" or not engine.scheduler.running
            cached = port.block_pool.cached_block_hash_to_block
            assert not len(cached), "the prefix cache is not empty"
            await (client.wake_up_async() if "sleep" in call else client.resume_scheduler_async())
        move = await moving
        found = await cluster.verdict(stream)
        if MovePhase.Name(move.phase) not in ("STAYED", "GONE"):
            found.append(f"{MovePhase.Name(move.phase)}, {Reason.Name(move.reason)}")
        return [f"{call} at {at}, final {final}, async {asynchronous}: {fault}" for fault in found]


@failure("the source or the destination is paused, sleeps, resets its caches or gets other weights", "any", "stayed")
@pytest.mark.parametrize("at", "AB")
async def test_call_ends_moves_and_succeeds(model_dir: Path, at: str) -> None:
    told = functools.partial(interrupted, model_dir, at=at)
    stories = [functools.partial(told, call, final=False, asynchronous=True) for call in CALLS]
    stories.append(functools.partial(told, "pause-wait", final=True, asynchronous=False))
    found = await side_by_side(stories)
    assert not found, "\n".join(found)


@pytest.mark.full
async def test_call_ends_moves_in_every_state(model_dir: Path) -> None:
    cells = itertools.product(CALLS, "AB", (False, True), (False, True))
    stories = [
        functools.partial(interrupted, model_dir, call, at, final=final, asynchronous=asynchronous)
        for call, at, final, asynchronous in cells
    ]
    found = await side_by_side(stories)
    assert not found, "\n".join(found)


@failure(
    "the engine that goes on with a lost request is paused", "rescue, while it copies", "called off, and tried again"
)
@retold
async def test_engine_is_paused_while_it_rescues_a_request(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        client, port = cluster["B"].client, cluster["B"].engine.kvconn.port
        stream = await company(cluster)
        with replays_only_at(cluster, stream, "B"), hanging(cluster["A"]):
            with copying(cluster["B"]) as begun:
                await until(begun.is_set, lambda: "no copy")
                called = cluster.begin(client.pause_scheduler_async("keep"))
                await until(lambda: port.paused, lambda: "not paused")
            await called
            assert not port.holds_blocks
            await client.resume_scheduler_async()
            await until(lambda: "B" in cluster.owners(stream), lambda: "B does not go on with it")
        return await cluster.verdict(stream)


async def test_pause_ends_although_a_part_of_the_llumlet_fails(model_dir: Path) -> None:
    """The parts behind it let go of what they hold, and the pause waits for no more than `QUIET_SECONDS`."""
    async with cluster_of(model_dir, "AB") as cluster:
        parts, client = cluster["B"].engine.agent, cluster["B"].client
        stream = await cluster.stream("A", num_prompt=300)
        await stream.reaches(5)
        with (
            mock.patch.object(pauses, "QUIET_SECONDS", 0.2),
            mock.patch.object(agent, "QUIET_SECONDS", 0.2),
            mock.patch.object(parts.departures, "call_off", side_effect=RuntimeError("broken")),
            mock.patch.object(parts.claims, "call_off") as end_claims,
            copying(cluster["B"]) as begun,
        ):
            moving = cluster.begin(cluster.migrate(stream))
            await until(begun.is_set, lambda: "no copy")
            called = cluster.begin(client.pause_scheduler_async("keep"))
            await until(called.done, lambda: "the pause does not end")
            assert end_claims.called
            assert not parts.arrivals.pending()
        await client.resume_scheduler_async()
        await moving
        assert not await cluster.verdict(stream)


async def paused_again_and_again(model_dir: Path, cycles: int, *, asynchronous: bool) -> list[str]:
    """Calls of all kinds, at both engines in turn, while every stream moves from one to the other without a break."""
    async with cluster_of(model_dir, "AB", asynchronous=asynchronous) as cluster:
        streams = [await cluster.stream("AB"[number % 2], max_tokens=150) for number in range(4)]
        is_over = False

        async def move(place: int) -> None:
            while not is_over:
                stream = streams[place]
                for source, destination in ("AB", "BA"):
                    await cluster.migrate(stream, source, destination)
                if stream.finish is FinishReason.ABORT:
                    stream.left = True
                if stream.finish is not None:
                    streams[place] = await cluster.stream(stream.at.name, max_tokens=150)

        moving = [cluster.begin(move(place)) for place in range(len(streams))]
        for cycle, (call, at) in zip(range(cycles), itertools.cycle(itertools.product(CALLS, "AB")), strict=False):
            client, port = cluster[at].client, cluster[at].engine.kvconn.port
            before = cluster.outcomes["moved"]
            await until(lambda: cluster.outcomes["moved"] > before, lambda: f"nothing moves: {cluster.outcomes}")  # noqa: B023
            await asyncio.wait_for(CALLS[call](client), SECONDS)
            if port.paused:
                assert not port.holds_blocks, f"cycle {cycle}"
                await (client.wake_up_async() if "sleep" in call else client.resume_scheduler_async())
        is_over = True
        await asyncio.gather(*moving)
        for stream in cluster.streams:
            stream.left = stream.left or stream.finish is FinishReason.ABORT
        return await cluster.verdict(streams[0])


@both
@retold
async def test_calls_succeed_under_continuous_moves(model_dir: Path, asynchronous: bool) -> list[str]:
    return await paused_again_and_again(model_dir, 28, asynchronous=asynchronous)


@pytest.mark.full
@both
@retold
async def test_hundreds_of_calls_succeed_under_continuous_moves(model_dir: Path, asynchronous: bool) -> list[str]:
    return await paused_again_and_again(model_dir, 280, asynchronous=asynchronous)
