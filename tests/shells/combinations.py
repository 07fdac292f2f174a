# SPDX-License-Identifier: Apache-2.0
"""Several faults at once, drawn from a seed: messages of all kinds, cut ways, engines that hang, moves in a row.

The seed decides what is armed and what is done; how it interleaves is up to the machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from pathlib import Path

from llumlet.contract.types import Mode
from tests.shells.cells import CELLS, company
from tests.shells.circumstances import hanging
from tests.shells.cluster import Cluster, Instance, Stream, cluster_of
from tests.shells.network import ORIGIN, Fault, Kind

MESSAGES = sorted({(cell.message, cell.kind) for cell in CELLS})
WAYS = [f"{one}>{other}" for one in ("A", "B", "C", ORIGIN) for other in ("A", "B", "C", ORIGIN) if one != other]
METHODS = [Mode.LIVE, Mode.LIVE, Mode.BLOCKING, Mode.RECOMPUTE]


@dataclasses.dataclass(frozen=True)
class Hop:
    """One move, wherever the request is, and what happens to the network and to an engine meanwhile."""

    destination: str
    method: int
    cut: tuple[str, ...]
    cut_at: str
    """The message from which on; empty: from the beginning."""
    cut_seconds: float
    pause_seconds: float
    hangs: str
    """Whose loop is stuck in a model step meanwhile."""
    hang_seconds: float


@dataclasses.dataclass(frozen=True)
class Combination:
    """What a seed stands for."""

    seed: int
    asynchronous: bool
    faults: tuple[tuple[str, Kind, int], ...]
    hops: tuple[Hop, ...]
    leaves: bool

    @classmethod
    def of(cls, seed: int) -> Combination:
        draw = random.Random(seed)
        faults = tuple((*draw.choice(MESSAGES), draw.choice((1, 1, 2, 5))) for _ in range(draw.randrange(5)))
        return cls(
            seed,
            asynchronous=draw.random() < 0.3,
            faults=faults,
            hops=tuple(_hop(draw) for _ in range(draw.randrange(1, 4))),
            leaves=draw.random() < 0.15,
        )


def _hop(draw: random.Random) -> Hop:
    way = draw.choice(WAYS)
    there, back = way.split(">")
    both = draw.random() < 0.5
    return Hop(
        destination=draw.choice("ABC"),
        method=draw.choice(METHODS),
        cut=((way, f"{back}>{there}") if both else (way,)) if draw.random() < 0.4 else (),
        cut_at=draw.choice(("", "Reserve", "CopyRound", "Commit", "Commit answer", "HandedOver", "Withdraw")),
        cut_seconds=draw.choice((0.1, 0.4, 1.0)),
        pause_seconds=draw.choice((0.0, 0.05, 0.2)),
        hangs=draw.choice("ABC") if draw.random() < 0.3 else "",
        hang_seconds=draw.choice((0.4, 1.2, 1.6)),
    )


async def play(seed: int, model: Path, reached: Counter[str] | None = None) -> list[str]:
    """What is wrong after the seed's combination. Counts in `reached` what became of moves and requests."""
    combination = Combination.of(seed)
    async with cluster_of(model, seed=seed, asynchronous=combination.asynchronous) as cluster:
        cluster.network.faults = [Fault(message, kind, times) for message, kind, times in combination.faults]
        cluster["A"].engine.agent.departures.deadline_s = 0.3
        stream = await company(cluster)
        for hop in combination.hops:
            await _take(cluster, stream, hop)
        if combination.leaves and not stream.finish:
            await cluster.leave(stream)
        faults = await cluster.verdict(stream)
        if reached is not None:
            reached.update(cluster.outcomes)
            reached["replayed"] += stream.at.client.origin.core.num_replayed
            reached["rescued"] += sum(one.engine.agent.adoptions.num_rescued for one in cluster.instances.values())
            reached["fenced"] += cluster.network.seen["FenceQuestion"]
        return [f"seed {seed}: {fault}" for fault in faults]


async def _take(cluster: Cluster, stream: Stream, hop: Hop) -> None:
    network = cluster.network
    if hop.cut:
        network.cut(*hop.cut, at=hop.cut_at)
    healing = cluster.begin(asyncio.sleep(hop.cut_seconds))
    healing.add_done_callback(lambda _: network.heal())
    hang = cluster.begin(_hang(cluster[hop.hangs], hop.hang_seconds)) if hop.hangs else None
    owner = next(iter(sorted(cluster.owners(stream))), None)
    if owner not in (None, hop.destination):
        await cluster.try_call(cluster.migrate(stream, owner, hop.destination, method=hop.method))
    await asyncio.sleep(hop.pause_seconds)
    if hop.cut:
        await healing
    if hang is not None:
        await hang


async def _hang(instance: Instance, seconds: float) -> None:
    with hanging(instance):
        await asyncio.sleep(seconds)
