# SPDX-License-Identifier: Apache-2.0
"""An engine dies: from some message on nothing comes from it or gets there, and it never comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.shells.cells import company, moves
from tests.shells.cluster import Cluster, Stream, cluster_of, side_by_side, until
from tests.shells.marks import MARKS
from tests.shells.network import ORIGIN
from tests.support.failures import failure

pytestmark = MARKS


async def dies(cluster: Cluster, stream: Stream, name: str, at: str) -> None:
    """Move the request from A to B; instance `name` is dead from the message `at` on."""
    network = cluster.network
    others = [party for party in (*cluster.instances, ORIGIN) if party != name]
    network.cut(*(way for other in others for way in (f"{name}>{other}", f"{other}>{name}")), at=at)
    moving = cluster.begin(cluster.try_call(moves(cluster, stream)))
    await until(lambda: network.cut_off[at] > 0, lambda: f"no {at}")
    await cluster[name].die()
    network.heal()
    await moving


def replays(stream: Stream) -> Callable[[], bool]:
    """Whether the request was started again by now."""
    known = stream.at.client.origin.core.streams.get(stream.request_id)
    assert known is not None
    return lambda: bool(known.replays)


@failure("the source's engine dies", "Reserve, a round or Commit on its way", "replayed on a peer")
@failure(
    "the source's engine dies",
    "Committed or HandedOver on its way",
    "the destination owns the request; if the origin has not heard of it, it is replayed",
)
async def test_the_source(model_dir: Path) -> None:
    async def die(at: str) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            stream = await company(cluster)
            replayed = replays(stream)
            await dies(cluster, stream, "A", at)
            faults = await cluster.verdict(stream)
            assert replayed() or at in ("Commit answer", "HandedOver")
            return faults

    cases = ("Reserve", "CopyRound", "Commit", "Commit answer", "HandedOver")
    assert not await side_by_side(partial(die, at) for at in cases)


@failure("the destination's engine dies", "Reserve or a round on its way", "goes on at the source")
@failure(
    "the destination's engine dies",
    "Commit or its answer on its way",
    "the origin's fence: goes on at the source; replayed if the origin has heard of the destination",
)
@failure("the destination's engine dies", "committed, tokens on their way", "replayed")
async def test_the_destination(model_dir: Path) -> None:
    async def die(at: str, replayed: set[bool]) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            cluster["A"].engine.agent.departures.deadline_s = 0.3
            stream = await company(cluster)
            was_replayed = replays(stream)
            await dies(cluster, stream, "B", at)
            faults = await cluster.verdict(stream)
            assert was_replayed() in replayed
            return faults

    cases = {
        "Reserve": {False},
        "CopyRound": {False},
        "Commit": {False},
        "Commit answer": {False, True},
        "TokenBatch": {True},
    }
    assert not await side_by_side(partial(die, *case) for case in cases.items())
