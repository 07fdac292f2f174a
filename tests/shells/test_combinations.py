# SPDX-License-Identifier: Apache-2.0
"""Several faults at once, cut ways, engines that hang and moves that follow each other: `combinations`, by seed.

A seed that fails is played again with `python -m tests.shells SEED`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.shells.cluster import side_by_side
from tests.shells.combinations import play
from tests.shells.marks import MARKS
from tests.support.failures import failure

pytestmark = MARKS

NUM_COMBINATIONS = 16
NUM_FULL = 600


@failure(
    "up to four faults of messages at once, cut ways, loops that hang, the next move at once",
    "drawn by seed",
    "every token once and in order, one owner, nothing held",
)
async def test_combinations(model_dir: Path) -> None:
    assert not await side_by_side(partial(play, seed, model_dir) for seed in range(NUM_COMBINATIONS))


@pytest.mark.full
async def test_more_combinations(model_dir: Path) -> None:
    seeds = range(NUM_COMBINATIONS, NUM_COMBINATIONS + NUM_FULL)
    assert not await side_by_side(partial(play, seed, model_dir) for seed in seeds)
