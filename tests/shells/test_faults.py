# SPDX-License-Identifier: Apache-2.0
"""Every message of the protocol dropped, delayed, doubled, overtaken: the production shells over fake engines.

The client has every token once and in order, at most one engine goes on with the request, and nobody holds anything in
the end. What becomes of the move is in the table of cells.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shells.cells import CELLS, PLAY, SOON, Cell
from tests.shells.cluster import Cluster, cluster_of, until
from tests.shells.network import Fault

pytestmark = [
    pytest.mark.asyncio,
    # vLLM's input and output threads leave their sockets to their contexts.
    pytest.mark.filterwarnings("ignore:Destroying context with unclosed socket:ResourceWarning"),
]


async def play(cluster: Cluster, cell: Cell) -> tuple[str, bool, Fault, list[str]]:
    """The move's outcome, whether the request was replayed, the fault, and what is wrong."""
    network = cluster.network
    fault = network.arm(cell.message, cell.kind, cell.times, sender=cell.sender)
    if cell.message.endswith(" answer"):
        cluster.deadlines |= SOON if cell.kind == "delayed" else {}
    cluster["A"].engine.agent.departures.deadline_s = 1.0
    for at in "AB":
        await cluster.stream(at, num_prompt=40, max_tokens=120)
    stream = await cluster.stream()
    await stream.reaches(20)
    outcome = await PLAY[cell.scenario](cluster, stream)
    faults = await cluster.verdict(stream)
    return outcome, bool(stream.at.client._replay.replayed), fault, faults


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
async def test_cell(cell: Cell, model_dir: Path) -> None:
    async with cluster_of(model_dir) as cluster:
        outcome, replayed, fault, faults = await play(cluster, cell)
    assert not faults
    assert fault.hits == cell.times, f"{cell.message} was sent {fault.hits} times: {dict(cluster.network.seen)}"
    assert (outcome, replayed) == (cell.outcome, cell.replayed)
