# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV cache cannot be carried: their requests go on with their tokens alone."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from llumlet.contract.types import Mode, MovePhase, Reason, RequestInfo
from llumlet.protocol import errors
from tests.shells.cells import PLAY, company, goes_on
from tests.shells.circumstances import hanging, outputs_held
from tests.shells.cluster import Cluster, Stream, cluster_of, retold, until
from tests.shells.marks import MARKS, both

pytestmark = MARKS

OF_ANOTHER_KIND = "a KV cache of another kind than attention, windows, states and rings"


async def listed(cluster: Cluster, stream: Stream, at: str = "A") -> RequestInfo:
    answer = await cluster.llumlet(at).list_requests()
    return next(info for info in answer.requests if info.request_id == stream.request_id)


async def queued(cluster: Cluster, at: str = "A") -> tuple[list[Stream], Stream]:
    """Streams that fill the batch of `at`, and one that waits behind them."""
    hogs = [await cluster.stream(at, num_prompt=20) for _ in range(8)]
    for hog in hogs:
        await hog.reaches(1)
    stream = await cluster.stream(at)
    scheduler = cluster[at].engine.scheduler
    await until(lambda: stream.request_id in scheduler.requests, lambda: "it does not arrive")
    return hogs, stream


@both
@retold
async def test_a_request_moves_without_its_cache(asynchronous: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous, cache_stays=True) as cluster:
        stream = await company(cluster)
        info = await listed(cluster, stream)
        assert (info.movable, info.moves_as, info.detail) == (True, Mode.RECOMPUTE, OF_ANOTHER_KIND)
        for source, destination in ("AB", "BC", "CA"):
            move = await cluster.migrate(stream, source, destination)
            assert (move.phase, move.mode, move.tokens_alone) == (MovePhase.MOVED, Mode.RECOMPUTE, OF_ANOTHER_KIND)
            assert (move.copied_bytes, move.transport) == (0, "")
            assert move.recomputed_tokens == move.context_tokens - 1 > 100
            await stream.reaches(len(stream.tokens) + 10)
        assert not cluster.network.seen["CopyRound"]
        assert not stream.at.client.origin.core.num_replayed
        return await cluster.verdict(stream)


@pytest.mark.parametrize("method", [Mode.LIVE, Mode.BLOCKING], ids=["live", "blocking"])
@retold
async def test_move_that_needs_its_kv_cache_is_refused(method: Mode, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        stream = await company(cluster)
        move = await cluster.migrate(stream, method=method)
        assert (move.phase, move.reason, move.detail) == (MovePhase.STAYED, Reason.NOT_PORTABLE, OF_ANOTHER_KIND)
        assert not cluster.network.seen["Reserve"]
        return await cluster.verdict(stream)


@retold
async def test_waiting_request_moves_without_kv_cache(model_dir: Path) -> list[str]:
    """It moves, however much its KV cache is insisted on."""
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        _, stream = await queued(cluster)
        assert (await listed(cluster, stream)).moves_as == Mode.WAITING
        move = await cluster.migrate(stream, method=Mode.LIVE)
        assert (move.phase, move.mode, move.tokens_alone) == (MovePhase.MOVED, Mode.WAITING, "")
        await stream.reaches(10)
        return await cluster.verdict(stream)


@retold
async def test_it_begins_while_it_is_on_its_way(model_dir: Path) -> list[str]:
    """Then it has a KV cache, and stays with it."""
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        hogs, stream = await queued(cluster)
        with outputs_held(cluster["B"]):
            moving = cluster.begin(cluster.migrate(stream, method=Mode.LIVE))
            await until(lambda: cluster.network.seen["Reserve"] > 0, lambda: "no Reserve")
            await cluster.leave(hogs[0])
            await stream.reaches(5)
        move = await moving
        assert (move.phase, move.reason) == (MovePhase.STAYED, Reason.NOT_PORTABLE)
        assert move.detail.startswith("it began meanwhile")
        return await cluster.verdict(stream)


@pytest.mark.parametrize(
    ("play", "outcome"), [("in_doubt", "stayed"), ("unheard", "moved"), ("fenced", "stayed"), ("fenced_late", "moved")]
)
@retold
async def test_in_doubt(play: str, outcome: str, model_dir: Path) -> list[str]:
    """As with a KV cache: nobody goes on with it twice, and all blocks come back."""
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        stream = await company(cluster)
        assert await PLAY[play](cluster, stream) == outcome
        assert cluster.last_report.mode == Mode.RECOMPUTE
        return await cluster.verdict(stream)


@retold
async def test_a_destination_without_room(model_dir: Path) -> list[str]:
    """Its prefill has to fit beside what runs there. Nobody is preempted for it."""
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        others = [await cluster.stream("B", num_prompt=760, max_tokens=100) for _ in range(2)]
        stream = await cluster.stream(num_prompt=300)
        for one in (*others, stream):
            await one.reaches(5)
        move = await cluster.migrate(stream)
        assert (move.phase, move.reason) == (MovePhase.STAYED, Reason.DESTINATION_FULL), move.detail
        faults = await cluster.verdict(stream)
        assert not cluster["B"].engine.kvconn.port.load.snapshot().num_preemptions
        return faults


@retold
async def test_a_destination_that_takes_no_kv_cache(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        engine = cluster["B"].engine
        engine.kvconn.thread.post(engine.agent.context.identity.stop_carrying_kv, "its mover is lost")
        insisted = await cluster.migrate(stream, method=Mode.LIVE)
        assert (insisted.phase, insisted.reason) == (MovePhase.STAYED, Reason.NOT_PORTABLE)
        move = await cluster.migrate(stream)
        assert (move.phase, move.mode) == (MovePhase.MOVED, Mode.RECOMPUTE)
        assert insisted.detail == move.tokens_alone == "at the destination: its mover is lost"
        return await cluster.verdict(stream)


@retold
async def test_no_transport_between_two(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        unreachable = errors.Refused(errors.Reason.TRANSPORT_UNAVAILABLE, "another host")
        with mock.patch.object(cluster["B"].engine.agent.context.movers, "probe", side_effect=unreachable):
            insisted = await cluster.migrate(stream, method=Mode.LIVE)
            assert (insisted.phase, insisted.reason) == (MovePhase.STAYED, Reason.TRANSPORT_UNAVAILABLE)
            move = await cluster.migrate(stream)
        assert (move.phase, move.mode) == (MovePhase.MOVED, Mode.RECOMPUTE)
        assert move.tokens_alone == str(unreachable)
        assert not cluster.network.seen["CopyRound"]
        return await cluster.verdict(stream)


@both
@retold
async def test_a_dead_engine_whose_cache_stays(asynchronous: bool, model_dir: Path) -> list[str]:
    """Nothing of its KV cache is needed."""
    async with cluster_of(model_dir, asynchronous=asynchronous, cache_stays=True) as cluster:
        stream = await company(cluster)
        status = await cluster.llumlet("A").get_instance_status()
        assert status.kv_unsupported == OF_ANOTHER_KIND
        await cluster["A"].die()
        await until(lambda: bool(stream.at.client.origin.core.num_replayed), lambda: "not replayed")
        return await cluster.verdict(stream)


@retold
async def test_a_hanging_engine_whose_cache_stays(model_dir: Path) -> list[str]:
    """Its KV cache is not asked for, although it could be read."""
    async with cluster_of(model_dir, cache_stays=True) as cluster:
        stream = await company(cluster)
        with hanging(cluster["A"]):
            assert await goes_on(cluster, stream) == "computed again"
        assert not cluster.network.seen["Claim"]
        return await cluster.verdict(stream)


@retold
async def test_found_out_later(model_dir: Path) -> list[str]:
    """What kept its KV cache until now does so no more: a claim is refused, and the request computed again."""
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        engine = cluster["A"].engine
        before = await cluster.llumlet("A").get_instance_status()
        engine.kvconn.thread.post(engine.agent.context.identity.stop_carrying_kv, "its mover is lost")
        engine.kvconn.thread.post(engine.agent.context.identity.stop_carrying_kv, "the first reason counts")
        status = await cluster.llumlet("A").get_instance_status()
        assert (before.kv_unsupported, status.kv_unsupported) == ("", "its mover is lost")
        with hanging(cluster["A"]):
            assert await goes_on(cluster, stream) == "computed again"
        assert cluster.network.seen["Claim"]
        return await cluster.verdict(stream)
