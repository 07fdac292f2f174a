# SPDX-License-Identifier: Apache-2.0
"""Requests whose instances died while they had them: `llumlet.protocol.recovery.suspects`, with futures and timers.

The gateway sees no steps, so every request of an instance that dies is a suspect, unless another request was on trial
there. A suspect that waits in vain for an instance without a trial goes on beside another suspect; it then takes one
more death until it is clear which of them is to blame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from llumlet.protocol.recovery.steps import UNKNOWN
from llumlet.protocol.recovery.suspects import Judgement, Suspects

Key = TypeVar("Key", bound=Hashable)

TRIAL_S: Final = 10.0
"""Time after which a trial is over; also the longest time that a suspect waits for its turn."""


@dataclass(eq=False, slots=True)
class Case(Generic[Key]):
    """The case of a request in trials."""

    request_id: str
    was_lost: bool = False
    """True if an instance has died with it."""
    deaths: list[Key] = field(default_factory=list)
    """Instances of these that it may have crashed."""
    is_guilty: bool = False
    at: Key | None = None
    """The instance at which it is on trial."""
    num_parts: int = 0
    """Parts of its answer that came during trials."""
    timer: asyncio.TimerHandle | None = None


class Trials(Generic[Key]):
    """The trials of all requests. `num_instances`: how many instances there are to try requests at."""

    def __init__(self, num_instances: Callable[[], int]) -> None:
        self._suspects = Suspects[Key](num_instances)
        self._turns: dict[str, asyncio.Future[None]] = {}

    @property
    def instances(self) -> frozenset[Key]:
        """Instances that have a request on trial."""
        return self._suspects.engines

    def lost(self, case: Case[Key], instance: Key) -> None:
        """Notes that `instance` died with the request."""
        case.was_lost = True
        judgement = self._suspects.judge(case.request_id, instance, UNKNOWN, case.num_parts)
        case.deaths, case.is_guilty = self._suspects.deaths(case.request_id), judgement is Judgement.GUILTY
        self.end(case)

    async def turn(self, case: Case[Key]) -> None:
        """Waits for an instance without a trial, at most TRIAL_S. Call `end` after it, also if it is cancelled."""
        turn = self._turns[case.request_id] = asyncio.get_running_loop().create_future()
        self._suspects.ask_turn(case.request_id)
        self._give_turns()
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIAL_S):
                await turn
        self._suspects.take_turn(case.request_id)

    def begin(self, case: Case[Key], instance: Key) -> None:
        """Notes that the request, whose turn has come, is sent to `instance`."""
        self._suspects.sent(case.request_id, instance, case.num_parts)
        case.at = self._suspects.tried_at(case.request_id)
        if case.at is not None:
            case.timer = asyncio.get_running_loop().call_later(TRIAL_S, self._survived, case)

    def got_part(self, case: Case[Key]) -> None:
        """Notes that a part of its answer has come."""
        case.num_parts += 1
        self._suspects.heard(case.request_id, case.num_parts)
        if self._suspects.tried_at(case.request_id) is None:
            self.end(case)

    def end(self, case: Case[Key]) -> None:
        """Ends the request's trial, or its wait for one, without a result. May be called at any time."""
        if not case.was_lost:
            return
        if case.timer is not None:
            case.timer.cancel()
        case.at = case.timer = None
        self._turns.pop(case.request_id, None)
        self._suspects.step_back(case.request_id)
        self._give_turns()

    def forget(self, case: Case[Key]) -> None:
        """Drops a request that has ended."""
        if case.was_lost:
            self.end(case)
            self._suspects.forget(case.request_id)

    def _survived(self, case: Case[Key]) -> None:
        self._suspects.survived(case.request_id)
        self.end(case)

    def _give_turns(self) -> None:
        for request_id in self._suspects.come():
            turn = self._turns.pop(request_id, None)
            if turn is not None and not turn.done():
                turn.set_result(None)
