# SPDX-License-Identifier: Apache-2.0
"""An engine whose model runs in its own process (`uni`, vLLM's choice for one GPU) takes and gives requests live."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.exactness.cells import Cell
from tests.exactness.test_matrix import outcome, run
from tests.runner_v2.cells import PACE
from tests.runner_v2.conftest import FLAGS, Cast
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server

# vLLM's platform for CPUs makes every `uni` an `mp`, except where this says that all is one process; `vllm serve` asks
# it for nothing else.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def uni(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*FLAGS, "--distributed-executor-backend", "uni")
    spec = dataclasses.replace(cast.a.spec, name="uni", instance_id="uni", flags=flags, env=ONE_PROCESS, core=None)
    with Fleet(tmp_path_factory.mktemp("uni")) as fleet:
        yield fleet.start(spec)[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", ["greedy", pytest.param("seed", marks=pytest.mark.full)])
async def test_there_and_back(cast: Cast, uni: Server, sampling: str) -> None:
    with pytest.raises(LookupError, match="0 processes called 'Worker'"):
        uni.process("Worker")
    assert "CPUModelRunner behind AsyncScheduler, steps in flight: 2" in uni.log_text()
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
    for here, there in ((uni, cast.a), (cast.a, uni)):
        unmoved, _ = await run([here], cell, PACE)
        moved, moves = await run([here, there, here], cell, PACE)
        assert [move.live for move in moves] == [True, True], moves
        assert outcome(moved) == outcome(unmoved)
    for server in (uni, cast.a):
        await wait_idle(server)
