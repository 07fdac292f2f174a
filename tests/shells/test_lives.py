# SPDX-License-Identifier: Apache-2.0
"""Several lives of one request at one engine: what belongs to a former one never counts for a later one."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llumlet.contract.errors import LlumletError
from llumlet.contract.types import Reason
from llumlet.protocol.errors import Refused
from llumlet.protocol.ids import Epoch
from tests.shells.cells import SOON_SECONDS, company, loses_tokens, moves
from tests.shells.circumstances import outputs_held, recorded, replays_only_at
from tests.shells.cluster import cluster_of, retold, until
from tests.shells.marks import MARKS, both
from tests.shells.network import Kind
from vllm_llumnix.engine.engine_port import WatchedRequest
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.moves.source_request import SourceRequest
from vllm_llumnix.engine.requests.request_state import residence_of

pytestmark = MARKS

LATE_SECONDS = 0.05


@both
@pytest.mark.parametrize("dismissed", [False, True], ids=["running", "dismissed"])
@retold
async def test_outputs_that_are_still_on_their_way(dismissed: bool, asynchronous: bool, model_dir: Path) -> list[str]:
    """The former owner is to start the request again while it has not yet sent what it had produced before."""
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        stream = await company(cluster)
        assert await moves(cluster, stream) == "moved"
        if not dismissed:
            cluster.network.arm("Dismissal", Kind.DROPPED)
        with replays_only_at(cluster, stream, "B"):
            lost = cluster.network.arm("TokenBatch", Kind.DROPPED, sender="B")
            await until(lambda: lost.hits > 0, lambda: "nothing was lost")
            sent = cluster.network.seen["TokenBatch"]
            await until(lambda: cluster.network.seen["TokenBatch"] > sent, lambda: "no gap")
            with outputs_held(cluster["B"]):
                await until(lambda: cluster.network.seen["Adopt"] > 0, lambda: "not replayed")
                # Without order between calls and outputs a second attempt gets through meanwhile.
                await asyncio.sleep(0.3)
            faults = await cluster.verdict(stream)
        assert stream.at.client.origin.core.num_replayed
        return faults


@retold
async def test_a_late_call_does_not_end_a_later_life(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        calls = recorded(cluster, "Adopt")
        stream = await company(cluster)
        with replays_only_at(cluster, stream, "B"):
            assert await loses_tokens(cluster, stream) == "moved"
            replay = stream.at.client.origin.core
            cluster.network.arm("TokenBatch", Kind.DROPPED, sender="B")
            await until(lambda: replay.num_replayed == 2, lambda: "not replayed again")
            for call in list(calls):
                with pytest.raises(LlumletError) as refused:
                    await cluster.llumlet("B").adopt(call)
                assert refused.value.reason == Reason.HANDOVER_OPEN
            faults = await cluster.verdict(stream)
        assert replay.num_replayed == 2
        return faults


@retold
async def test_a_step_in_flight_is_of_the_former_life(model_dir: Path) -> list[str]:
    """It computes a token for a request that has ended meanwhile: until it is over, no other life begins."""
    async with cluster_of(model_dir, asynchronous=True) as cluster:
        stream = await company(cluster)
        assert await moves(cluster, stream) == "moved"
        engine, agent = cluster["B"].engine, cluster["B"].engine.agent
        request = engine.scheduler.requests[stream.request_id]
        residence = residence_of(request)
        assert residence is not None
        newer = dataclasses.replace(residence, epoch=Epoch(residence.epoch.term + 1, 0))

        def is_in_flight() -> bool:
            return any(stream.request_id in step.num_scheduled_tokens for _, step, _ in engine.batch_queue or ())

        def attempt(life: Callable[..., Any], *args: Any) -> str:
            try:
                life(*args)
            except Refused as refused:
                return str(refused)
            return "not refused"

        def succeed() -> list[str]:
            """On the loop. Nothing if no step of the request is in flight."""
            if not is_in_flight():
                return []
            agent.adoptions._make_way_on_loop(stream.request_id, newer)
            return [
                attempt(agent.adoptions._make_way_on_loop, stream.request_id, newer),
                attempt(engine.kvconn.reserve, request, False, True, 0),
            ]

        while not (answers := await engine.kvconn.call(succeed)):
            assert not request.is_finished()
        assert all("in flight" in answer for answer in answers), answers
        while await engine.kvconn.call(is_in_flight):
            pass
        assert await engine.kvconn.call(agent.adoptions._make_way_on_loop, stream.request_id, newer) is None
        agent.adoptions.relay.farewell(stream.request_id, residence)
        faults = await cluster.verdict(stream)
        assert stream.at.client.origin.core.num_replayed
        return faults


@retold
async def test_a_reservation_that_comes_after_its_move_was_called_off(model_dir: Path) -> list[str]:
    """The source gives up while the loop's answer is on its way: what the answer brings is given back."""
    async with cluster_of(model_dir) as cluster:
        cluster.deadlines["reserve_s"] = SOON_SECONDS
        stream = await company(cluster)
        with outputs_held(cluster["B"]):
            assert await moves(cluster, stream) == "stayed"
        return await cluster.verdict(stream)


@pytest.mark.parametrize("look", ["pin", "freeze"])
@retold
async def test_a_request_that_ends_before_it_is_looked_at_is_gone(
    look: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Its client leaves between the order to pin or freeze it and the loop's turn: nothing stays, whichever of the two
    things that the loop has to say is heard first."""
    stock, observe = getattr(SourceRequest, look), EngineLoop._observe

    def leaving_first(request: SourceRequest, *args: Any) -> Any:
        request_ids = [request.request.request_id]
        request._loop.note_aborted(request_ids)
        request._loop.engine.abort_requests(request_ids)
        return stock(request, *args)

    def observing_late(loop: EngineLoop, leaving: WatchedRequest) -> None:
        if leaving.request.is_finished():
            time.sleep(LATE_SECONDS)
        observe(loop, leaving)

    with monkeypatch.context() as patch:
        patch.setattr(SourceRequest, look, leaving_first)
        patch.setattr(EngineLoop, "_observe", observing_late)
        async with cluster_of(model_dir) as cluster:
            stream = await company(cluster)
            stream.left = True
            assert await moves(cluster, stream) == "gone"
            await cluster.leave(stream)
            return []


@retold
async def test_other_request_with_the_same_id_is_left_alone(model_dir: Path) -> list[str]:
    """A request of B's own front-end has the id that the origin at A asks for."""
    async with cluster_of(model_dir) as cluster:
        calls = recorded(cluster, "Adopt")
        stream = await company(cluster)
        with replays_only_at(cluster, stream, "B"):
            assert await loses_tokens(cluster, stream) == "moved"
            faults = await cluster.verdict(stream)
        namesake = await cluster.stream("B", request_id=stream.request_id)
        await namesake.reaches(20)
        with pytest.raises(LlumletError) as refused:
            await cluster.llumlet("B").adopt(calls[-1])
        assert refused.value.reason == Reason.HANDOVER_OPEN
        return faults + await cluster.verdict(namesake)
