# SPDX-License-Identifier: Apache-2.0
"""An engine whose model runs in its own process (`uni`, vLLM's choice for one GPU) and one whose model has a process of
its own (`mp`) take requests from each other, live."""

from __future__ import annotations

import pytest

from tests.exactness.cells import Cell
from tests.exactness.test_matrix import outcome, run
from tests.runner_v2.cells import PACE
from tests.runner_v2.conftest import Cast
from tests.support.conservation import wait_idle

pytestmark = pytest.mark.rest


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", ["greedy", pytest.param("seed", marks=pytest.mark.full)])
async def test_there_and_back(cast: Cast, sampling: str) -> None:
    uni, mp = cast.a, cast.small
    with pytest.raises(LookupError, match="0 processes called 'Worker'"):
        uni.process("Worker")
    assert mp.process("Worker")
    cell: Cell = {
        "sampling": sampling,
        "logprobs": "output",
        "endpoint": "completions",
        "delivery": "streaming",
        "route": "aba",
        "company": "alone",
        "prefix": "cold",
        "extras": "none",
    }
    for here, there in ((uni, mp), (mp, uni)):
        unmoved, _ = await run([here], cell, PACE)
        moved, moves = await run([here, there, here], cell, PACE)
        assert [move.live for move in moves] == [True, True], moves
        assert outcome(moved) == outcome(unmoved)
    for server in (uni, mp):
        await wait_idle(server)
