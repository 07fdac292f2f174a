# SPDX-License-Identifier: Apache-2.0
"""The two clocks: virtual time, which jumps, and real time, which a test moves by hand where it can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from llumsim import PS
from llumsim.clock import Deadlock, RealClock, VirtualLoop
from llumsim.engine.instance import ModelledInstance, described
from llumsim.engine.requests import EngineRequest
from llumsim.engine.step_model import EngineConfig, Hardware, StepModel
from tests.llumsim.watchers import Noting


def run(make: Any) -> Any:
    loop = VirtualLoop()
    try:
        coroutine: Coroutine[Any, Any, Any] = make(loop)
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_a_day_passes_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        await asyncio.sleep(86_400)
        return loop.time()

    began_s = time.perf_counter()
    assert run(main) == pytest.approx(86_400)
    assert time.perf_counter() - began_s < 5


def test_timers_tasks_and_events_are_one_order() -> None:
    order: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(f"{name} {loop.time():g}")

        loop.at(2 * PS, lambda now_ps: order.append(f"event {now_ps / PS:g}"))
        loop.at(4 * PS, lambda now_ps: order.append(f"event {now_ps / PS:g}"))
        await asyncio.gather(sleeper("c", 5), sleeper("a", 1), sleeper("b", 3))

    run(main)
    assert order == ["a 1", "event 2", "b 3", "event 4", "c 5"]


def test_woken_tasks_run_before_time_advances() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        woken = asyncio.Event()
        seen: list[float] = []
        loop.at(PS, lambda _: woken.set())
        loop.at(PS + 1, lambda now_ps: seen.append(now_ps / PS))
        await woken.wait()
        seen.append(loop.time())
        await asyncio.sleep(1)
        return seen

    assert run(main) == [1.0, 1.0 + 1 / PS]


def test_timeouts_are_virtual() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return loop.time()

    assert run(main) == pytest.approx(600)


def test_waiting_for_nothing_is_an_error() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main)


def test_action_in_the_past_runs_next() -> None:
    async def main(loop: VirtualLoop) -> int:
        await asyncio.sleep(5)
        told: asyncio.Future[int] = loop.create_future()
        loop.at(0, told.set_result)
        return await told

    assert run(main) == pytest.approx(5 * PS)


MS = PS // 1000
HARDWARE = Hardware(
    name="small",
    step=StepModel(a=3 * MS, b=MS // 100, c=0, d=MS // 50, e=MS // 10_000),
    engine=EngineConfig(num_blocks=12, block_size=4),
    bytes_per_token=1,
    link_bytes_per_s=1e9,
)


@pytest.mark.asyncio
async def test_actions_come_in_order_and_with_a_time_that_has_come() -> None:
    real, seen, over = RealClock(), list[tuple[str, int]](), asyncio.Event()
    began_ps = real.now_ps
    for name, milliseconds in (("c", 30), ("a", -5), ("b", 10)):
        real.at(began_ps + milliseconds * MS, lambda now_ps, name=name: seen.append((name, now_ps)))  # type: ignore[misc]
    real.at(began_ps + 31 * MS, lambda _: over.set())
    await over.wait()
    assert [name for name, _ in seen] == ["a", "b", "c"]
    assert seen[1][1] - began_ps >= 10 * MS
    assert seen[2][1] - began_ps >= 30 * MS


@pytest.mark.asyncio
async def test_clock_stands_still_and_goes_on_from_there() -> None:
    real, rung = RealClock(), asyncio.Event()
    real.at(real.now_ps + 20 * MS, lambda _: rung.set())
    real.set_speed(0.0)
    stood_ps = real.now_ps
    await asyncio.sleep(0.05)
    assert real.now_ps == stood_ps
    assert not rung.is_set()
    real.set_speed(10.0)
    began_s = time.monotonic()
    await rung.wait()
    assert time.monotonic() - began_s >= 0.002 - 0.001
    assert real.now_ps - stood_ps >= 19 * MS
    real.at(real.now_ps, lambda _: rung.clear())
    real.close()
    await asyncio.sleep(0.01)
    assert rung.is_set()


@pytest.mark.asyncio
async def test_failing_action_holds_up_no_other() -> None:
    real, rung, failures = RealClock(), asyncio.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def fail(_: int) -> None:
        raise ZeroDivisionError

    real.at(0, fail)
    real.at(1, lambda _: rung.set())
    await rung.wait()
    assert [type(one) for one in failures] == [ZeroDivisionError]


class Late(RealClock):
    """Hears of everything long after it was due."""

    now_ps = 0

    def _wait(self) -> None:
        """By hand."""

    def run_until(self, now_ps: int) -> None:
        self.now_ps = now_ps  # type: ignore[misc]
        self._run()


def play(instance: ModelledInstance) -> None:
    """More than its blocks hold: some wait, and are preempted."""
    for number in range(5):
        instance.add(EngineRequest(f"r{number}", 5 + number, 14), instance.clock.now_ps)


def test_late_wakeups_do_not_lengthen_steps() -> None:
    """Preemptions and ends come at the same picosecond as on the virtual clock."""
    virtual, ours, theirs = VirtualLoop(), Noting(), Noting()
    play(ModelledInstance(virtual, HARDWARE, described(HARDWARE, max_moves=1), theirs))
    virtual.run_until_complete(asyncio.sleep(2.0))
    virtual.close()
    late = Late()
    instance = ModelledInstance(late, HARDWARE, described(HARDWARE, max_moves=1), ours)
    play(instance)
    for now_ms in range(0, 2000, 47):
        late.run_until(now_ms * MS)
    assert {kind for kind, *_ in ours.events} == {"preempted", "finished"}
    assert ours.events == theirs.events
    assert ours.num_gaps == theirs.num_gaps
    assert instance.engine.blocks.num_free == HARDWARE.engine.num_blocks
