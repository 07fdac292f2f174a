# SPDX-License-Identifier: Apache-2.0
"""Requests that are taken away with their KV cache during a model step: vLLM's schedulers, a fake model."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from llumlet.protocol.wire import Health
from tests.engine.loop import new_engine_loop, new_loop
from tests.engine.rig import BLOCK_SIZE, Rig
from vllm_llumnix.engine.load.model_watch import watch_model
from vllm_llumnix.engine.recovery import claims as claims_module
from vllm_llumnix.engine.recovery.claims import Claims

pytestmark = pytest.mark.asyncio

TAKEN = Epoch(1, 0)
"""Under which the request goes on elsewhere."""


class Engine:
    """The part of vLLM's EngineCore that `watch_model` sees: one turn is schedule, model, aborts, update.

    `meanwhile` runs while the model computes, in the place of another thread that gets on while the loop is stuck.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.meanwhile: Callable[[], object] = lambda: None
        self.aborts: list[str] = []
        self.batch_queue: deque[SchedulerOutput] = deque()
        self.engines_running = False
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.model_executor = SimpleNamespace(execute_model=self._execute)
        self.step_fn = self._step
        self.kvconn = new_engine_loop(self, rig)
        self.claims = Claims(self.kvconn)
        watch_model(self.kvconn, self.claims)

    def is_running(self) -> bool:
        return True

    def turn(self) -> list[EngineCoreOutput]:
        self.kvconn.step()
        return self.step_fn()

    def turns(self, count: int) -> list[EngineCoreOutput]:
        return [output for _ in range(count) for output in self.turn()]

    def _execute(self, output: SchedulerOutput) -> SchedulerOutput:
        self.meanwhile()
        self.meanwhile = lambda: None
        return output

    def _step(self) -> list[EngineCoreOutput]:
        self.batch_queue.append(self.model_executor.execute_model(self.rig.scheduler.schedule()))
        if len(self.batch_queue) < self.rig.depth:
            return []
        output = self.batch_queue.popleft()
        self._process_aborts_queue()
        emitted = self.rig.scheduler.update_from_output(output, self.rig.runner.run(output, frozenset()))
        return [one for outputs in emitted.values() for one in outputs.outputs]

    def _process_aborts_queue(self) -> None:
        self.rig.scheduler.finish_requests(self.aborts, RequestStatus.FINISHED_ABORTED)
        self.aborts.clear()


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(model_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(Rig(model_dir, asynchronous=request.param))


def refused(engine: Engine, request_id: str, epoch: Epoch = TAKEN) -> Reason:
    with pytest.raises(Refused) as refusal:
        engine.claims.take(request_id, epoch)
    return refusal.value.reason


async def test_the_loop_keeps_the_blocks_and_says_nothing(engine: Engine) -> None:
    free = engine.rig.free_blocks
    request, other = engine.rig.add("a"), engine.rig.add("b")
    emitted = engine.turns(8)
    taken = []
    engine.meanwhile = lambda: taken.append(engine.claims.take("a", TAKEN))
    emitted += engine.turn()
    (claimed,) = taken
    assert claimed.output_token_ids == [token for o in emitted if o.request_id == "a" for token in o.new_token_ids]
    assert claimed.computed_tokens == request.num_prompt_tokens + len(claimed.output_token_ids) - 1
    assert len(claimed.block_ids) == -(-claimed.computed_tokens // BLOCK_SIZE)
    later = engine.turns(3)
    assert {output.request_id for output in later} == {"b"}
    assert "a" not in engine.rig.scheduler.requests
    engine.aborts.append("b")
    engine.turns(3)
    pool = engine.rig.port.block_pool
    assert engine.rig.free_blocks == free - len(claimed.block_ids)
    assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in claimed.block_ids)
    assert engine.claims.end(claimed.claim_id)
    assert not engine.claims.end(claimed.claim_id)
    engine.kvconn.step()
    assert engine.rig.free_blocks == free
    assert other.is_finished()


async def test_an_abort_meanwhile_does_not_free_what_is_read(engine: Engine) -> None:
    free = engine.rig.free_blocks
    engine.rig.add("a")
    engine.turns(8)
    taken = []
    engine.meanwhile = lambda: (taken.append(engine.claims.take("a", TAKEN)), engine.aborts.append("a"))
    assert engine.turn() == []
    engine.turns(2)
    assert engine.rig.free_blocks == free - len(taken[0].block_ids)
    assert engine.claims.end(taken[0].claim_id)
    engine.kvconn.step()
    assert engine.rig.free_blocks == free


async def test_read_before_the_loop_wakes_up(engine: Engine) -> None:
    """Nothing is pinned then, and still nothing is published."""
    free = engine.rig.free_blocks
    engine.rig.add("a")
    engine.turns(8)
    ends = []
    engine.meanwhile = lambda: ends.append(engine.claims.end(engine.claims.take("a", TAKEN).claim_id))
    assert engine.turns(4) == []
    assert ends == [True]
    assert engine.rig.free_blocks == free


async def test_a_claim_that_nobody_ends_runs_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "LEASE_SECONDS", 0.01)
    free = engine.rig.free_blocks
    engine.rig.add("a")
    engine.turns(8)
    taken = []
    engine.meanwhile = lambda: taken.append(engine.claims.take("a", TAKEN))
    engine.turns(3)
    assert engine.rig.free_blocks < free
    await asyncio.sleep(0.05)
    engine.kvconn.step()
    assert engine.rig.free_blocks == free
    assert not engine.claims.end(taken[0].claim_id), "what was read after the lease is not to be trusted"


async def test_claims_end_when_moves_are_called_off(engine: Engine) -> None:
    free = engine.rig.free_blocks
    engine.rig.add("a")
    engine.turns(8)
    taken = []
    engine.meanwhile = lambda: taken.append(engine.claims.take("a", TAKEN))
    engine.turns(3)
    engine.claims.call_off()
    engine.kvconn.step()
    assert engine.rig.free_blocks == free
    assert not engine.claims.end(taken[0].claim_id), "what was read is not to be trusted"


async def test_a_claim_that_comes_twice(engine: Engine) -> None:
    """It is one claim, until it is ended."""
    free = engine.rig.free_blocks
    engine.rig.add("a")
    engine.turns(8)
    taken = []

    def claim() -> None:
        taken.extend(engine.claims.take("a", TAKEN) for _ in range(2))
        assert engine.claims.end(taken[0].claim_id)
        assert not engine.claims.end(taken[1].claim_id)
        assert refused(engine, "a") is Reason.ALREADY_MIGRATING

    engine.meanwhile = claim
    engine.turns(3)
    assert taken[0] == taken[1]
    assert engine.rig.free_blocks == free


async def test_only_in_a_model_step(engine: Engine) -> None:
    engine.rig.add("a")
    engine.turns(8)
    assert refused(engine, "a") is Reason.SOURCE_BUSY


async def test_some_requests_cannot_be_claimed(engine: Engine) -> None:
    def ask() -> None:
        assert refused(engine, "nobody") is Reason.UNKNOWN_REQUEST
        assert refused(engine, "a", Epoch(0, 3)) is Reason.BARRED
        assert refused(engine, "new") is Reason.NOT_STARTED
        engine.claims.take("a", TAKEN)
        assert refused(engine, "a", Epoch(2, 0)) is Reason.ALREADY_MIGRATING
        asked.append(True)

    asked: list[bool] = []
    engine.rig.add("a")
    engine.turns(8)
    engine.rig.add("new", num_prompt=600, first=50)
    engine.meanwhile = ask
    engine.turn()
    assert asked


async def test_claims_race_with_the_loop(engine: Engine) -> None:
    """However a claim falls: either it is refused, or its blocks stay as they were until it ends."""
    free = engine.rig.free_blocks
    pool, scheduler = engine.rig.port.block_pool, engine.rig.scheduler
    stop = threading.Event()

    def loop() -> None:
        number = itertools.count()
        while not stop.is_set():
            while len(scheduler.requests) < 3:
                engine.rig.add(f"r{next(number)}", max_tokens=40)
            engine.meanwhile = lambda: time.sleep(0.0002)
            engine.turn()
        engine.aborts += list(scheduler.requests)
        while scheduler.requests or scheduler.has_requests():
            engine.turn()

    turning = asyncio.create_task(asyncio.to_thread(loop))
    reasons = Counter()
    deadline = time.monotonic() + 30
    while (reasons["kept"] < 100 or len(reasons) < 3) and time.monotonic() < deadline:
        try:
            claimed = engine.claims.take(max(list(scheduler.requests), default=""), TAKEN)
        except Refused as refusal:
            reasons[refusal.reason] += 1
            await asyncio.sleep(0)
            continue
        await asyncio.sleep(0.001)
        assert all(pool.blocks[block_id].ref_cnt > 0 for block_id in claimed.block_ids)
        assert engine.claims.end(claimed.claim_id)
        reasons["kept"] += 1
    stop.set()
    await turning
    engine.kvconn.step()
    assert reasons["kept"] >= 100
    assert reasons[Reason.SOURCE_BUSY]
    assert engine.rig.free_blocks == free


async def test_the_loop_is_timed_as_well(engine: Engine) -> None:
    engine.rig.add("a")
    seen = []
    engine.meanwhile = lambda: seen.append(engine.kvconn.progress.limit_seconds)
    engine.turn()
    assert seen[0] >= 1.5
    assert engine.kvconn.progress.health is Health.OK


@pytest.mark.parametrize("runner_v2", [False, True], ids=["v1", "v2"])
async def test_a_paused_loop_that_waits_for_the_last_batch(runner_v2: bool, model_dir: Path) -> None:
    """It gives the model nothing new; stuck it is all the same, and its requests are unfinished."""
    loop = new_loop(model_dir, runner_v2=runner_v2)
    free = loop.rig.free_blocks
    request = loop.rig.add("a")
    loop.turns(8)
    loop.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert loop.batch_queue
    assert not loop.scheduler.has_requests()
    taken = []
    loop.worker.before = lambda _: taken.append(loop.claims.take("a", TAKEN))
    assert not loop.turn(), "what it computed is somebody else's"
    assert taken[0].computed_tokens == request.num_tokens - 1
    with pytest.raises(Refused, match="not in a model step"):
        loop.claims.take("a", TAKEN)
    assert loop.claims.end(taken[0].claim_id)
    loop.turn()
    assert loop.rig.free_blocks == free
