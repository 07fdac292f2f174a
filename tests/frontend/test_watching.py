# SPDX-License-Identifier: Apache-2.0
"""A process that stands still now and then, and one that is always late."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest

from llumlet.process.tasks import end
from vllm_llumnix.frontend import liveness
from vllm_llumnix.frontend.liveness import LOOK_SECONDS, Standstills, watch


def test_a_standstill_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several things were due in it: the watch and a timer, say."""
    now = 0.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now)
    standstills = Standstills()
    now = 10.0
    assert standstills.since(10.0 - LOOK_SECONDS) == 0.0, "not long"
    assert standstills.since(2.0) == 8.0
    assert standstills.since(1.0) == 0.0
    now = 15.0
    assert standstills.since(3.0) == 5.0, "since then"


class Late:
    """It has stood still whenever it is asked."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def catch_up(self, due: float) -> bool:
        del due
        self.done.append("late")
        return True

    def look(self) -> None:
        self.done.append("look")
        if self.done.count("look") == 1:
            raise ZeroDivisionError("of the test")


@pytest.mark.asyncio
async def test_late_watcher_looks_every_second_time_and_survives_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.001)
    late = Late()
    watched = asyncio.create_task(watch(weakref.ref(late)))
    async with asyncio.timeout(60):
        while late.done.count("look") < 3:  # noqa: ASYNC110 - nobody tells it
            await asyncio.sleep(0.001)
    await end(watched)
    assert late.done[:6] == ["late", "late", "look"] * 2
    assert "of the test" in caplog.text
