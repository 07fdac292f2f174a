# SPDX-License-Identifier: Apache-2.0
"""Every message of the protocol dropped, delayed, doubled, overtaken: the production shells over fake engines.

The client has every token once and in order, at most one engine goes on with the request, and nobody holds anything in
the end. What becomes of the move is in the table of cells.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.shells.cells import CELLS, PLAY, Cell, company, play
from tests.shells.cluster import cluster_of, side_by_side
from tests.shells.marks import MARKS, both

pytestmark = MARKS


@pytest.mark.parametrize("message", dict.fromkeys(cell.message.removesuffix(" answer") for cell in CELLS))
async def test_message(message: str, model_dir: Path) -> None:
    async def problems(cell: Cell) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            played = await play(cluster, cell)
        found = list(played.faults)
        if played.hits != cell.times:
            found.append(f"{played.hits} messages were hit of {dict(cluster.network.seen)}")
        if (played.outcome, played.replayed) != (cell.outcome, cell.replayed):
            found.append(f"{played.outcome}, replayed: {played.replayed}; {cluster.last_report}")
        return [f"{cell.id}: {problem}" for problem in found]

    cells = [cell for cell in CELLS if cell.message.removesuffix(" answer") == message]
    assert not await side_by_side(partial(problems, cell) for cell in cells)


@both
@pytest.mark.parametrize(("scenario", "outcome"), [("moves", "moved"), ("given_up", "stayed"), ("preempted", "moved")])
async def test_without_faults(scenario: str, outcome: str, asynchronous: bool, model_dir: Path) -> None:
    async def problems() -> list[str]:
        async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
            for instance in cluster.instances.values():
                assert (instance.engine.batch_queue is not None) is asynchronous
                assert not instance.engine.scheduler.defer_block_free, "each preemption would drain the pipeline"
            stream = await company(cluster, num_others=3)
            found = [] if await PLAY[scenario](cluster, stream) == outcome else [str(cluster.last_report)]
            found += await cluster.verdict(stream)
            return found + ["replayed"] * stream.at.client.origin.core.num_replayed

    assert not await side_by_side([problems])
