# SPDX-License-Identifier: Apache-2.0
"""vLLM's own step functions over the rig's scheduler; fake are the worker, which computes when it is waited for, and
the memory that it writes.

A step in flight writes the blocks that its requests had when it was scheduled, whoever has them by the time. That is
what a GPU does with them, and what no scheduler can see.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore

from tests.engine.rig import BLOCK_SIZE, Rig, private_record
from vllm_llumnix.engine.load.model_watch import watch_model
from vllm_llumnix.engine.loop import EngineLoop, Llumlet
from vllm_llumnix.engine.recovery.claims import Claims
from vllm_llumnix.steps.step_record import StepRecord

T = TypeVar("T")


class Late(Future[T]):
    """As the futures of vLLM's multiprocessing executor: what was asked for happens, in order, for who waits."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self.set_result(self._compute())
        return super().result(timeout)


class Worker:
    """The model executor. `memory[block][slot]` is who wrote the slot last; `before` runs when a step is computed."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.memory: dict[int, dict[int, str]] = {}
        self.before: Callable[[SchedulerOutput], object] = lambda output: None

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        self._output, self._writes = output, [*self._slots(output)]
        requests = self._rig.scheduler.requests
        self._chunks = frozenset(name for name in output.num_scheduled_tokens if requests[name].is_prefill_chunk)
        if output.total_num_scheduled_tokens:
            return Late(lambda: None)
        return Late(lambda: self._rig.runner.run(output, frozenset()))

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output, writes, chunks = self._output, self._writes, self._chunks

        def compute() -> Any:
            self.before(output)
            for block, slot, name in writes:
                self.memory.setdefault(block, {})[slot] = name
            return self._rig.runner.run(output, chunks)

        return Late(compute) if non_block else compute()

    def _slots(self, output: SchedulerOutput) -> Any:
        for name, count in output.num_scheduled_tokens.items():
            request = self._rig.scheduler.requests[name]
            blocks = self._rig.block_ids(request)
            for position in range(request.num_computed_tokens - count, request.num_computed_tokens):
                yield blocks[position // BLOCK_SIZE], position % BLOCK_SIZE, name


class Loop(EngineCore):
    """An engine without the parts that take a model. `depth` batches may be in flight: 2 as under asynchronous
    scheduling, more as with a pipeline."""

    def __init__(self, rig: Rig, depth: int = 2, *, llumlet: bool = True, record: StepRecord | None = None) -> None:
        self.rig = rig
        self.scheduler = rig.scheduler
        self.worker = Worker(rig)
        self.model_executor = SimpleNamespace(
            execute_model=self.worker.execute_model, sample_tokens=self.worker.sample_tokens
        )
        self.vllm_config: Any = SimpleNamespace(
            observability_config=SimpleNamespace(enable_logging_iteration_details=False)
        )
        self.log_stats = False
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = self.engines_running = False
        self._weight_version = "0"
        self.batch_queue_size = depth
        self.batch_queue = deque(maxlen=depth) if depth > 1 else None
        self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue
        self.aborts_queue = queue.Queue()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.kvconn: EngineLoop | None = None
        if llumlet:
            self.kvconn = new_engine_loop(self, rig, record)
            self.claims = Claims(self.kvconn)
            watch_model(self.kvconn, self.claims)

    def is_running(self) -> bool:
        return True

    def turn(self) -> list[EngineCoreOutput]:
        """One turn of vLLM's loop, as the series patches it."""
        if self.kvconn is not None:
            for output in self.kvconn.step():
                self.output_queue.put_nowait(output)
        outputs, _ = self.step_fn()
        while not self.output_queue.empty():
            self.kvconn.divert(*self.output_queue.get_nowait())
        return [one for each in (outputs or {}).values() for one in each.outputs]

    def turns(self, count: int) -> list[EngineCoreOutput]:
        return [output for _ in range(count) for output in self.turn()]

    async def until_answered(self, asked: Awaitable[T]) -> tuple[T, int]:
        """The answer to what was asked of the loop, and the turns that it took."""
        waiting, turns = asyncio.ensure_future(asked), 0
        while not waiting.done():
            assert turns < 20
            self.turn()
            turns += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return waiting.result(), turns


def new_engine_loop(engine: Any, rig: Rig, record: StepRecord | None = None) -> EngineLoop:
    """What the llumlet has of `engine`'s loop, with nobody on its thread: what is said to it is dropped."""
    thread: Any = SimpleNamespace(post=lambda *_: None)
    loop = EngineLoop(engine, rig.port, thread, record or private_record())
    loop.llumlet = mock.create_autospec(Llumlet)
    return loop


def new_loop(
    model: Path, depth: int = 2, *, llumlet: bool = True, record: StepRecord | None = None, **rig: Any
) -> Loop:
    return Loop(Rig(model, asynchronous=True, **rig), depth, llumlet=llumlet, record=record)
