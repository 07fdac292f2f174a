# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from llumsim import PS
from llumsim.clock import Deadlock, VirtualLoop


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


def test_waiting_for_nothing_is_an_error_and_no_hang() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main)


def test_the_past_is_now() -> None:
    async def main(loop: VirtualLoop) -> int:
        await asyncio.sleep(5)
        told: asyncio.Future[int] = loop.create_future()
        loop.at(0, told.set_result)
        return await told

    assert run(main) == pytest.approx(5 * PS)
