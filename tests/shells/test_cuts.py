# SPDX-License-Identifier: Apache-2.0
"""Nothing gets through between two parties for a while, in one direction or in both."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import product
from pathlib import Path

from tests.shells.cells import company, moves
from tests.shells.cluster import cluster_of, retold, side_by_side, until
from tests.shells.marks import MARKS
from tests.shells.model import PACE_SECONDS
from tests.support.failures import failure

pytestmark = MARKS

SHORT, LONG = 0.3, 1.1
"""Seconds: shorter than an owner is waited for, and longer."""
DIRECTIONS = ["there", "back", "both"]


def ways(one: str, other: str, direction: str) -> list[str]:
    """One direction, the other, or both."""
    both = {"there": f"{one}>{other}", "back": f"{other}>{one}"}
    return list(both.values()) if direction == "both" else [both[direction]]


@failure("source and destination are cut off from each other, one way or both", "reserving", "stayed")
@failure("source and destination are cut off from each other, one way or both", "copying", "stayed")
async def test_peers_before_commit(model_dir: Path) -> None:
    async def cut(at: str, direction: str) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            stream = await company(cluster)
            cluster.network.cut(*ways("A", "B", direction), at=at)
            assert await moves(cluster, stream) == "stayed"
            cluster.network.heal()
            return await cluster.verdict(stream)

    assert not await side_by_side(partial(cut, *case) for case in product(("Reserve", "CopyRound"), DIRECTIONS))


@failure("source and destination are cut off from each other", "Commit on its way", "the origin's fence: stayed")
@failure("source hears nothing of the destination", "Commit on its way", "the origin's fence: moved")
async def test_peers_in_doubt(model_dir: Path) -> None:
    async def cut(direction: str, outcome: str) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            cluster["A"].engine.agent.departures.deadline_s = 0.3
            stream = await company(cluster)
            cluster.network.cut(*ways("A", "B", direction), at="Commit")
            assert await moves(cluster, stream) == outcome
            cluster.network.heal()
            return await cluster.verdict(stream)

    cases = (("there", "stayed"), ("both", "stayed"), ("back", "moved"))
    assert not await side_by_side(partial(cut, *case) for case in cases)


@failure("destination and origin are cut off from each other for 3 s", "committed", "tokens lost on the way: replayed")
@failure("destination and origin are cut off from each other for 11 s", "committed", "lost after 4.5 s, replayed")
async def test_owner_and_origin(model_dir: Path) -> None:
    async def cut(seconds: float, direction: str) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            stream = await company(cluster)
            assert await moves(cluster, stream) == "moved"
            await stream.reaches(len(stream.tokens) + 10)
            # Nobody can tell it to stop meanwhile: it must not come to the end.
            cluster["B"].engine.model_executor.pace = 10 * PACE_SECONDS
            cluster.network.cut(*ways("B", "O", direction))
            await asyncio.sleep(seconds)
            replay = stream.at.client.origin.core
            if direction != "back":
                await until(lambda: cluster.network.cut_off["TokenBatch"] > 0, lambda: "nothing to lose")
            if seconds == LONG and direction != "back":
                await until(lambda: bool(replay.num_replayed), lambda: "not replayed")
            cluster.network.heal()
            faults = await cluster.verdict(stream)
            assert bool(replay.num_replayed) == (direction != "back")
            return faults

    assert not await side_by_side(partial(cut, *case) for case in product((SHORT, LONG), DIRECTIONS))


@failure("the origin is cut off from everybody", "in doubt", "asked until it answers: settled by the fence")
async def test_origin_in_doubt(model_dir: Path) -> None:
    async def cut(direction: str) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            cluster["A"].engine.agent.departures.deadline_s = 0.2
            stream = await company(cluster)
            outcome = cluster.begin(moves(cluster, stream))
            origin = [way for party in "AB" for way in ways("O", party, direction)]
            cluster.network.cut("A>B", *origin, at="Commit")
            await until(lambda: cluster.network.seen["FenceQuestion"] > 1, lambda: "the origin is not asked again")
            assert not outcome.done()
            cluster.network.heal()
            assert await outcome == "stayed"
            return await cluster.verdict(stream)

    assert not await side_by_side(partial(cut, direction) for direction in DIRECTIONS)


@failure("nobody answers: neither the destination nor the origin", "in doubt", "lost: let go of, and replayed")
@retold
async def test_request_is_replayed_when_no_peer_answers(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster["A"].engine.agent.departures.deadline_s = 0.2
        cluster.deadlines["fence_s"] = 0.5
        stream = await company(cluster)
        cluster.network.cut("A>B", *ways("A", "O", "both"), at="Commit")
        assert await moves(cluster, stream) == "lost"
        replay = stream.at.client.origin.core
        await until(lambda: bool(replay.num_replayed), lambda: "not replayed")
        cluster.network.heal()
        return await cluster.verdict(stream)
