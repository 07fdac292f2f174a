# SPDX-License-Identifier: Apache-2.0
"""The two clocks that models live by: one of virtual time, which jumps, and one of the world outside.

`VirtualLoop` is an asyncio event loop that jumps to its next timer, with a heap of its own for what is not a coroutine.
Production code runs on it unchanged: `asyncio.sleep`, timeouts, tasks. What the models do (the end of a step, a message
on its way) is in the heap of `at`, which costs a tenth of an asyncio timer. Both are one order of time; of events at
the same moment, the heap's come in the order in which they were asked for, and before the loop's timers. Nothing on
this loop may wait for the world outside: it has no sockets, and a task that awaits a thread waits for ever.

`RealClock` has such a heap on any asyncio loop, beside real sockets. Its actions come late, as timers do. Steps none
the less last what the model says: an engine goes by when they end, not by when it hears of that.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Protocol, TypeVarTuple, Unpack

from llumlet.process.tasks import cancel
from llumsim import PS

_Ts = TypeVarTuple("_Ts")
Action = Callable[[int], None]
"""Called with the time."""


class Clock(Protocol):
    @property
    def now_ps(self) -> int: ...

    def at(self, time_ps: int, action: Action) -> None:
        """Call `action` then; it cannot be taken back. In the past: next."""
        ...


class Deadlock(RuntimeError):
    """A task waits for an event that cannot come any more."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_ps = 0
        self._events: list[tuple[int, int, Action]] = []
        self._num_events = 0
        self._has_ready = False
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now_ps / PS

    def at(self, time_ps: int, action: Action) -> None:
        """Call `action` then; it cannot be taken back. In the past: next."""
        self._num_events += 1
        heapq.heappush(self._events, (max(time_ps, self.now_ps), self._num_events, action))

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._has_ready = True
        return super().call_soon(callback, *args, context=context)

    def abandon(self) -> None:
        """Cancel every task, drop the heap, and let the tasks end. For a run that has failed."""
        self._events.clear()
        self.run_until_complete(cancel(*asyncio.all_tasks(self)))
        self.run_until_complete(self.shutdown_asyncgens())

    def _jump(self, timeout_s: float | None) -> None:
        """Run the heap's actions until the loop's next timer, or until the loop has something to do."""
        self._has_ready = False
        if timeout_s is not None and timeout_s <= 0:
            return
        until_ps = None if timeout_s is None else self.now_ps + max(round(timeout_s * PS), 1)
        events = self._events
        while events and (until_ps is None or events[0][0] <= until_ps):
            self.now_ps, _, action = heapq.heappop(events)
            action(self.now_ps)
            if self._has_ready:
                return
        if until_ps is None:
            raise Deadlock("nothing will happen any more")
        self.now_ps = until_ps


class _Jump(selectors.BaseSelector):
    """A selector that jumps in time instead of waiting for sockets. It keeps the one socket that the loop registers
    itself, by which threads would wake it, and never looks at it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop._jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class RealClock:
    """Picoseconds of the monotonic clock, as long as its `speed` is 1. At 0 it stands still."""

    def __init__(self) -> None:
        self._speed = 1.0
        self._set_s = time.monotonic()
        self._set_ps = round(self._set_s * PS)
        """The time at `_set_s`, since when the speed has been the same."""
        self._events: list[tuple[int, int, Action]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now_ps(self) -> int:
        return self._set_ps + round((time.monotonic() - self._set_s) * self._speed * PS)

    def at(self, time_ps: int, action: Action) -> None:
        event = time_ps, next(self._numbers), action
        heapq.heappush(self._events, event)
        if self._events[0] is event:
            self._wait()

    def set_speed(self, speed: float) -> None:
        """Let time pass `speed` times as fast from now on."""
        now_s = time.monotonic()
        self._set_ps += round((now_s - self._set_s) * self._speed * PS)
        self._set_s, self._speed = now_s, speed
        self._wait()

    def close(self) -> None:
        """Drop all actions."""
        self._events.clear()
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events and self._speed:
            seconds = (self._events[0][0] - self.now_ps) / PS / self._speed
            # Rounded up: uvloop's timers count milliseconds, and it would be asked over and over within the last one.
            self._timer = asyncio.get_running_loop().call_later(math.ceil(max(seconds, 0.0) * 1e3) / 1e3, self._run)

    def _run(self) -> None:
        try:
            while self._events and self._speed and self._events[0][0] <= (now_ps := self.now_ps):
                _, _, action = heapq.heappop(self._events)
                action(now_ps)
        finally:
            self._wait()


class Timers:
    """The timers of one state machine, by name. They are set again and cleared more often than they fire."""

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
