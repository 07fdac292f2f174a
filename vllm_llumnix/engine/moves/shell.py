# SPDX-License-Identifier: Apache-2.0
"""The base of the shells around state machines: events one at a time, tasks, timers, and callers that wait for answers.
Llumlet thread only."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from llumlet.contract.bridge import HANDOVERS, reason_number
from llumlet.contract.types import SettleResponse
from llumlet.process.tasks import Tasks
from llumlet.protocol.effects import ClearTimer, Effect, SetTimer
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Event, Settlement, TimerFired
from llumlet.protocol.machine import Machine

M = TypeVar("M", bound=Machine[Any, Any, Any])


class Shell(abc.ABC, Generic[M]):
    """Carries out what one machine says; subclasses all but timers in `_perform`, and what follows in `_advanced`.

    The machine gets its events one at a time: one that an effect brings about on the spot waits until all effects of
    the event before have been carried out.
    """

    def __init__(self, machine: M) -> None:
        self.machine = machine
        self._events: deque[Event] = deque()
        self._tasks = Tasks()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def feed(self, event: Event) -> None:
        """Give the machine an event and do what it says. Raises LocalProtocolError, and nothing has changed, for one
        that is illegal now."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # whoever feeds it at this moment, further up the stack, comes to it
        try:
            while self._events:
                for effect in self.machine.on(self._events[0]):
                    match effect:
                        case SetTimer(name=name, seconds=seconds):
                            self._set_timer(name, seconds)
                        case ClearTimer(name=name):
                            self._clear_timer(name)
                        case _:
                            self._perform(effect)
                self._advanced()
                self._events.popleft()
        finally:
            self._events.clear()

    @abc.abstractmethod
    def _perform(self, effect: Effect) -> None: ...

    @abc.abstractmethod
    def _advanced(self) -> None:
        """The machine has had an event, and its effects have been carried out."""

    def _set_timer(self, name: str, seconds: float) -> None:
        self._clear_timer(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, lambda: self.feed(TimerFired(name)))

    def _clear_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


class Callers:
    """Callers who wait, by what they have asked for: the same call twice gets one answer."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, asked: Hashable) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asked, []).append(answer)
        return answer

    def give_up(self, asked: Hashable, answer: asyncio.Future[Any]) -> None:
        """Whoever waited for `answer` does not any more."""
        self._waiting[asked].remove(answer)

    def answer(self, asked: Hashable, answer: Any) -> None:
        """An exception is raised where they wait."""
        for waiting in self._waiting.pop(asked, ()):
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def settle_response(state: Settlement, reason: Reason | None, incarnation: str) -> SettleResponse:
    """Answer about a hand-over, by the machine or by what is known without one."""
    return SettleResponse(state=HANDOVERS[state], reason=reason_number(reason), dst_incarnation=incarnation)
