# SPDX-License-Identifier: Apache-2.0
"""What is copied of the states of a request that arrives: behind accepted drafts parts of some blocks, of rings all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from llumlet.protocol.effects import Pull
from llumlet.protocol.errors import Refused
from tests.engine.rig import Rig, full, ring, states
from vllm_llumnix.engine.blocks.reblocking import Pairing
from vllm_llumnix.engine.engine_port import Reserved
from vllm_llumnix.engine.moves.destination_blocks import DestinationBlocks
from vllm_llumnix.kv.memory.layout import WHOLE, Cuts, StatePart, cuts_behind

NUM_DRAFTS = 3
GROUPS: list[KVCacheSpec] = [full(), states("align", 32, NUM_DRAFTS), ring(16), states("align", 32, NUM_DRAFTS)]
HERE = [101, 102, 103]
PARTS = (StatePart(0, 64), StatePart(64, 32, step_bytes=8))

Copied = dict[Cuts, list[tuple[int, int]]]


class Arrival:
    """`copied`: what the movers were told, once all is known."""

    def __init__(self, model_dir: Path) -> None:
        rows = Rig(model_dir, groups=GROUPS).port.rows
        self.copied: Copied = {}
        movers = SimpleNamespace(pull=self._pull, next_job=lambda: 1)
        context: Any = SimpleNamespace(loop=SimpleNamespace(port=SimpleNamespace(rows=rows)), movers=movers)
        self.blocks = DestinationBlocks(context, rows)
        self.blocks.here = Reserved(state_ids=HERE)
        self.blocks._pairing = Pairing(rows, rows, 0)
        memory: Any = SimpleNamespace(ranks=[SimpleNamespace(layout=SimpleNamespace(states=PARTS))])
        self.blocks._memory = memory

    async def _pull(self, copies: Sequence[Any], _memory: object) -> int:
        self.copied = {it.cuts: list(zip(it.src_blocks, it.dst_blocks, strict=True)) for it in copies}
        return 0

    async def of(self, block_ids: Sequence[int], num_accepted: int, accepted_ids: Sequence[int]) -> Copied:
        self.blocks.find_states_at_source(block_ids, num_accepted, accepted_ids)
        await self.blocks.pull(Pull(1, 0, 0), final=True, deadline_s=1.0)
        return self.copied


@pytest.fixture
def arrival(model_dir: Path) -> Arrival:
    return Arrival(model_dir)


@pytest.mark.asyncio
async def test_without_drafts_whole_blocks(arrival: Arrival) -> None:
    assert await arrival.of([1, 2, 3], 0, []) == {WHOLE: [(1, 101), (2, 102), (3, 103)]}


@pytest.mark.asyncio
async def test_behind_drafts_parts_of_states_and_the_ring(arrival: Arrival) -> None:
    assert await arrival.of([1, 2, 3], 2, [11, 2, 13]) == {
        WHOLE: [(2, 102)],
        cuts_behind(2, "inputs"): [(1, 101), (3, 103)],
        cuts_behind(2, "recurrent"): [(11, 101), (13, 103)],
    }


@pytest.mark.parametrize(
    ("block_ids", "num_accepted", "accepted_ids"),
    [([1, 2], 0, []), ([1, 2, 3], 0, [1, 2, 3]), ([1, 2, 3], 1, []), ([1, 2, 3], NUM_DRAFTS + 1, [1, 2, 3])],
)
def test_incomplete_description_of_states_is_refused(
    arrival: Arrival, block_ids: list[int], num_accepted: int, accepted_ids: list[int]
) -> None:
    with pytest.raises(Refused, match=r"states and|drafts accepted"):
        arrival.blocks.find_states_at_source(block_ids, num_accepted, accepted_ids)
