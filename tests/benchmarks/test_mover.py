# SPDX-License-Identifier: Apache-2.0
"""Moves asked for over a real connection, of a llumlet that has no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

import pytest
import pytest_asyncio

from benchmarks.mover import MoveFailed, Mover
from llumlet.contract.errors import LlumletError
from llumlet.contract.server import serve
from llumlet.contract.types import MovePhase, Reason, RequestInfo
from tests.llumlet.fake_agent import FakeAgent, until
from tests.support.client import Stream
from tests.support.harness import LlumletAddress, Server
from tests.support.moves import Move, describe, engine_id, first_index, migrate, move_stream

pytestmark = pytest.mark.asyncio
ENGINE_ID = "cmpl-r1-0-abcdefgh"


class StandIn(NamedTuple):
    """As much of a Server as moves look at."""

    name: str
    llumlet: LlumletAddress


class Pair(NamedTuple):
    source: Server
    destination: Server
    agent: FakeAgent


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    held = RequestInfo(request_id=ENGINE_ID, external_request_id="cmpl-r1-0", phase=RequestInfo.DECODE, output_tokens=7)
    agent = FakeAgent("fake-a", [held])
    running = await serve(agent)
    source = StandIn("a", LlumletAddress("fake-a", "127.0.0.1", running.port))
    destination = StandIn("b", LlumletAddress("fake-b", "127.0.0.1", 4000))
    yield Pair(cast(Server, source), cast(Server, destination), agent)
    await running.stop(grace_s=0)


def stream() -> Stream:
    return Stream(request_id="r1", kind="cmpl")


async def test_a_move_is_asked_for_as_a_scheduler_does(pair: Pair) -> None:
    moved = stream()
    move = await move_stream(pair.source, pair.destination, moved, method="blocking", force=True, stall_budget_ms=5)
    (request,) = pair.agent.asked("migrate")
    assert request.src_engine_id == "fake-a"
    assert (request.dst_engine_id, request.dst_engine_ip, request.dst_engine_port) == ("fake-b", "127.0.0.1", 4000)
    assert list(request.request_ids) == [ENGINE_ID]
    assert (request.force, request.stall_budget_ms) == (True, 5)
    assert moved.engine_id == ENGINE_ID
    assert move.moved
    assert not move.live, "it was asked to block"
    assert (move.mode, move.rounds, move.copied_bytes, move.epoch) == ("blocking", 3, 5 << 32, (0, 1))
    assert [phase for phase, _ in move.phases] == ["selected", "copying", "moved"]
    assert move.asked_at <= move.phases[0][1] <= move.settled_at
    assert first_index(move, 200) == 56


async def test_a_rule_is_passed_on(pair: Pair) -> None:
    (move,) = await migrate(pair.source, pair.destination, rule=("NUM_REQ", "SR", 1))
    (request,) = pair.agent.asked("migrate")
    assert request.num_reqs == 1
    assert move.live


async def test_a_refused_request_is_an_outcome_with_its_reason(pair: Pair) -> None:
    pair.agent.outcomes[ENGINE_ID] = (MovePhase.STAYED, Reason.DESTINATION_FULL, "9 blocks are free")
    move = await move_stream(pair.source, pair.destination, stream())
    assert not move.moved
    assert (move.phase, move.reason, move.detail) == ("stayed", "destination_full", "9 blocks are free")


async def test_a_refused_call_is_an_error(pair: Pair) -> None:
    pair.agent.failures["migrate"] = LlumletError(Reason.SHUTTING_DOWN, "bye")
    with pytest.raises(LlumletError, match="bye"):
        await migrate(pair.source, pair.destination, request_ids=[ENGINE_ID])


async def test_a_stream_that_no_engine_holds(pair: Pair) -> None:
    with pytest.raises(LookupError):
        await engine_id(pair.source, Stream(request_id="other", kind="cmpl"), timeout_s=0.1)


async def test_description_shows_what_the_engines_hold(pair: Pair) -> None:
    text = await describe([pair.source, pair.destination])
    assert f"a: {ENGINE_ID} decode epoch 0.0, 7 output tokens" in text
    assert "b: " in text, "nobody listens there, and that is said"


async def test_the_process_that_moves(pair: Pair) -> None:
    """The same outcome through the child; failures come back as MoveFailed and it goes on."""
    moved: Any = stream()
    async with Mover([pair.source]) as mover:
        move = await mover.move(pair.source, pair.destination, moved)
        assert move.live
        assert move.epoch == (0, 1)
        assert moved.engine_id == ENGINE_ID
        pair.agent.outcomes[ENGINE_ID] = (MovePhase.STAYED, Reason.DESTINATION_FULL, "full")
        with pytest.raises(MoveFailed, match="stayed: destination_full full") as refused:
            await mover.move(pair.source, pair.destination, moved)
        assert refused.value.reason == "destination_full"
        pair.agent.failures["migrate"] = LlumletError(Reason.SHUTTING_DOWN, "bye")
        with pytest.raises(MoveFailed, match="bye"):
            await mover.move(pair.source, pair.destination, moved)
        with pytest.raises(MoveFailed, match="holds 0 requests"):
            await mover.move(pair.source, pair.destination, Stream(request_id="other", kind="cmpl"))


async def test_moves_at_the_same_time(pair: Pair) -> None:
    """Neither waits for the other, and each gets its own answer."""
    second = RequestInfo(request_id="cmpl-r2-0-abcdefgh", external_request_id="cmpl-r2-0")
    pair.agent.requests.append(second)
    pair.agent.outcomes[second.request_id] = (MovePhase.STAYED, Reason.DESTINATION_FULL, "full")
    pair.agent.go.clear()
    streams = [stream(), Stream(request_id="r2", kind="cmpl")]
    async with Mover([pair.source]) as mover:
        moves = [asyncio.create_task(mover.move(pair.source, pair.destination, one)) for one in streams]
        await until(lambda: len(pair.agent.asked("migrate")) == 2, seconds=30)
        pair.agent.go.set()
        moved, refused = await asyncio.gather(*moves, return_exceptions=True)
    assert isinstance(moved, Move)
    assert moved.request_id == ENGINE_ID
    assert isinstance(refused, MoveFailed)


async def test_a_mover_that_died_is_noticed(pair: Pair) -> None:
    async with Mover([pair.source]) as mover:
        assert mover._process is not None
        pair.agent.go.clear()
        under_way = asyncio.create_task(mover.move(pair.source, pair.destination, stream()))
        await asyncio.wait_for(pair.agent.copying.wait(), 30)
        mover._process.kill()
        with pytest.raises(MoveFailed, match="has ended"):
            await under_way
        with pytest.raises(MoveFailed, match="has ended"):
            await mover.move(pair.source, pair.destination, stream())
        pair.agent.go.set()
    assert mover._process.returncode is not None
