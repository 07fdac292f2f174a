# SPDX-License-Identifier: Apache-2.0
"""What takes long, and is no failure."""

from __future__ import annotations

from pathlib import Path

from llumlet.contract.types import Mode
from tests.shells.cells import company
from tests.shells.circumstances import slow_copies
from tests.shells.cluster import Cluster, Stream, cluster_of, side_by_side
from tests.shells.marks import MARKS
from tests.support.failures import failure

pytestmark = MARKS

CALL_SECONDS = 0.1
"""Deadline of a call in which no bytes move."""
COPY_SECONDS = 0.3
"""Longer than that; shorter than a lease."""


async def move_slowly(cluster: Cluster, method: int) -> tuple[Stream, list[str]]:
    cluster["A"].engine.agent.departures.deadline_s = CALL_SECONDS
    stream = await company(cluster)
    with slow_copies(cluster["B"], COPY_SECONDS):
        last = await cluster.migrate(stream, method=method, force=True)
    return stream, [] if cluster.outcomes["moved"] else [str(last)]


@failure("a copy takes longer than other calls may", "copying", "waited for while the lease lasts")
async def test_a_long_round(model_dir: Path) -> None:
    async def problems() -> list[str]:
        async with cluster_of(model_dir) as cluster:
            stream, found = await move_slowly(cluster, Mode.LIVE)
            return found + await cluster.verdict(stream)

    assert not await side_by_side([problems])


@failure("the copy of a blocking move takes long", "Commit on its way", "waited for while the destination answers")
async def test_a_long_last_copy(model_dir: Path) -> None:
    async def problems() -> list[str]:
        async with cluster_of(model_dir) as cluster:
            cluster.deadlines |= {"commit_s": 0.1, "withdraw_s": 0.1}
            stream, found = await move_slowly(cluster, Mode.BLOCKING)
            if not cluster.network.seen["Query"]:
                found.append("the destination is not asked whether it is still at it")
            return found + await cluster.verdict(stream)

    assert not await side_by_side([problems])
