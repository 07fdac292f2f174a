# SPDX-License-Identifier: Apache-2.0
"""Timers of one state machine, by name: they are set anew and cleared more often than they run out."""

from __future__ import annotations

from collections.abc import Callable

from llumsim import PS
from llumsim.clock import Clock


class Timers:
    def __init__(self, clock: Clock, fire: Callable[[str], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._due_ps: dict[str, int] = {}

    def set(self, name: str, seconds: float) -> None:
        due_ps = self._due_ps[name] = self._clock.now_ps + round(seconds * PS)
        self._clock.at(due_ps, lambda _: self._run_out(name, due_ps))

    def clear(self, name: str) -> None:
        self._due_ps.pop(name, None)

    def close(self) -> None:
        self._due_ps.clear()

    def _run_out(self, name: str, due_ps: int) -> None:
        if self._due_ps.get(name) == due_ps:  # else it was set anew, or cleared
            del self._due_ps[name]
            self._fire(name)
