# SPDX-License-Identifier: Apache-2.0
"""Attempts to start a lost request again that are not waited for, or that are one too many."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from llumlet.protocol.origin import replay
from llumlet.protocol.recovery.suspects import Judgement, Suspects
from tests.shells.circumstances import building_slowly, recorded, recorded_requests, replays_only_at
from tests.shells.cluster import cluster_of, retold, until
from tests.shells.marks import MARKS
from tests.shells.network import Kind
from tests.support.failures import failure
from vllm_llumnix.engine.recovery import adoptions

pytestmark = MARKS

ATTEMPT_SECONDS = 0.5


@failure("the engine that is to go on with a lost request takes too long to build it", "replay", "another one takes it")
@retold
async def test_an_attempt_that_is_given_up(model_dir: Path) -> list[str]:
    """The engine answers and lives: only the time for an attempt ends this one."""
    async with cluster_of(model_dir) as cluster:
        stream = await cluster.stream("A")
        await stream.reaches(5)
        taken = recorded_requests(cluster["B"])
        with mock.patch.object(replay, "ATTEMPT_SECONDS", ATTEMPT_SECONDS), building_slowly(cluster["B"]) as building:
            with replays_only_at(cluster, stream, "BC"):
                await cluster.lose("A")
            assert building.is_set()
        assert cluster.owners(stream) == {"C"}
        found = await cluster.verdict(stream)
        return found + [f"B has begun {requests}" for requests in [taken] if requests]


@failure("the client leaves", "replay, while an engine builds its request", "it is not begun there")
@retold
async def test_abandoned_attempt_is_ended(model_dir: Path) -> list[str]:
    """What the engine says of it in its heartbeats is answered: the origin waits for its call."""
    async with cluster_of(model_dir) as cluster:
        stream = await cluster.stream("A")
        await stream.reaches(5)
        taken = recorded_requests(cluster["B"])
        guests = cluster["B"].engine.agent.context.relay._guests
        with building_slowly(cluster["B"]) as building, replays_only_at(cluster, stream, "B"):
            await cluster["A"].die()
            await until(building.is_set, lambda: "B does not begin")
            await cluster.leave(stream)
            await until(lambda: not guests, lambda: f"B keeps {list(guests)}")
        found = await cluster.verdict(stream)
        return found + [f"B has begun {requests}" for requests in [taken] if requests]


@failure("more requests are to be started again on an engine than it admits", "replay", "destination_busy: others do")
@retold
async def test_a_limit_at_the_destination(model_dir: Path) -> list[str]:
    """All of them at once: that some may be why their engine died is another matter."""
    innocent = mock.patch.object(Suspects, "judge", return_value=Judgement.INNOCENT)
    async with cluster_of(model_dir) as cluster:
        streams = [await cluster.stream("A", num_prompt=40) for _ in range(6)]
        for stream in streams:
            await stream.reaches(2)  # its engine has said hello by then
        with innocent, mock.patch.object(adoptions, "MAX_ADOPTING", 2), building_slowly(cluster["B"]):
            await cluster["A"].die()
            replay = streams[0].at.client.origin.core
            await until(lambda: replay.num_replayed >= 4, lambda: f"only {replay.num_replayed} go on")
            assert cluster["B"].engine.agent.adoptions._num_adopting <= 2
        return await cluster.verdict(streams[-1])


@failure("several attempts are given up at the same engine, which is slow", "replay", "it begins the last one only")
@retold
async def test_attempts_one_after_the_other(model_dir: Path) -> list[str]:
    """Whatever becomes of the calls and messages that call them off: a later one takes the place of those before."""
    async with cluster_of(model_dir) as cluster:
        stream = await cluster.stream("A")
        await stream.reaches(5)
        taken, calls = recorded_requests(cluster["B"]), recorded(cluster, "Adopt")
        cluster.network.arm("Dismissal", Kind.DROPPED, times=10)
        cluster.network.arm("HeartbeatAck", Kind.DROPPED, times=10)
        with mock.patch.object(replay, "ATTEMPT_SECONDS", ATTEMPT_SECONDS), replays_only_at(cluster, stream, "B"):
            with building_slowly(cluster["B"]):
                await cluster["A"].die()
                await until(lambda: len(calls) == 3, lambda: "it is not asked again")
            await until(lambda: cluster.owners(stream) == {"B"}, lambda: "it does not go on")
        found = await cluster.verdict(stream)
        return found + [f"B has begun {requests}" for requests in [taken] if requests != [stream.request_id]]
