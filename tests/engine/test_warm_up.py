# SPDX-License-Identifier: Apache-2.0
"""An idle engine runs a few steps before a request arrives; a busy one does not."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.loop import new_engine_loop
from tests.engine.rig import Rig
from vllm_llumnix.engine.loop import WARM_STEPS

pytestmark = pytest.mark.asyncio


class Loop:
    """An EngineLoop on the rig's scheduler, and the turns of the loop that it waits for."""

    def __init__(self, rig: Rig) -> None:
        self.dummies = 0
        self.engine = SimpleNamespace(
            batch_queue=deque(),
            engines_running=False,
            input_queue=queue.Queue(),
            execute_dummy_batch=self._dummy,
            is_running=lambda: True,
        )
        self.kvconn = new_engine_loop(self.engine, rig)

    def _dummy(self) -> None:
        self.dummies += 1

    async def warm_up(self, between: Any = lambda: None) -> int:
        """Returns the number of steps without a request."""
        task = asyncio.create_task(self.kvconn.warm_up())
        while not task.done():
            await asyncio.sleep(0)
            self.kvconn.step()
            between()
        await task
        return self.dummies


@pytest.fixture
def rig(model_dir: Path) -> Rig:
    return Rig(model_dir)


async def test_an_idle_engine(rig: Rig) -> None:
    assert await Loop(rig).warm_up() == WARM_STEPS


async def test_adapters_stay_loaded(model_dir: Path) -> None:
    """vLLM's dummy batch ends by removing every LoRA adapter from the workers."""
    assert await Loop(Rig(model_dir, enable_lora=True)).warm_up() == 0


async def test_a_frozen_request_is_no_work(rig: Rig) -> None:
    request = rig.add("a")
    rig.turns(5)
    rig.port.freeze(request)
    assert await Loop(rig).warm_up() == WARM_STEPS


async def test_a_busy_engine(rig: Rig) -> None:
    rig.add("a")
    assert await Loop(rig).warm_up() == 0
    rig.turns(3)
    assert await Loop(rig).warm_up() == 0


async def test_a_request_ends_it(rig: Rig) -> None:
    loop = Loop(rig)

    def arrive() -> None:
        if loop.dummies == 2 and "a" not in rig.scheduler.requests:
            rig.add("a")

    assert await loop.warm_up(arrive) == 2


@pytest.mark.parametrize("change", ["paused", "steps in flight", "data-parallel peers"])
async def test_engines_that_must_not_step(rig: Rig, change: str) -> None:
    loop = Loop(rig)
    match change:
        case "paused":
            rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        case "steps in flight":
            loop.engine.batch_queue.append(object())
        case _:
            loop.engine.engines_running = True
    assert await loop.warm_up() == 0
