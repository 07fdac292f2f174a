# SPDX-License-Identifier: Apache-2.0
"""Requests whose instances died, or hung, while they had them: any of them may be why.

What was sent to an instance that died is sent to others, but with care, as one of these requests may be a poison that
would end them all, one after the other. Each is on trial where it goes next, and no instance has two on trial: when
that instance dies as well, it is clear of whom, and the request ends. Who got some of an answer, or has lived for a
while, is not on trial any more. A request that waits in vain for an instance with nobody on trial goes on beside
another one; it takes one more death then until it is known.

Engines with a llumlet do the same with more knowledge (who was in the step that ended the engine). They are told of
deaths by a header (`llumlet.contract.attempt_header`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

TRIAL_PARTS: Final = 4
"""Parts of an answer after which a request is not on trial any more."""
TRIAL_S: Final = 10.0
"""Time after which it is not on trial any more either; a request waits as long for its turn."""
_DEATHS_ALONE: Final = 2
_DEATHS: Final = 3


@dataclass(eq=False, slots=True)
class Case(Generic[Key]):
    """What speaks against one request."""

    deaths: list[Key] = field(default_factory=list)
    """Instances that died with it."""
    is_guilty: bool = False
    at: Key | None = None
    """The instance at which it is on trial."""
    num_parts: int = 0
    timer: asyncio.TimerHandle | None = None


class Trials(Generic[Key]):
    """Who is on trial where. `num_instances`: how many there are to be tried at."""

    def __init__(self, num_instances: Callable[[], int]) -> None:
        self._num_instances = num_instances
        self._at: Counter[Key] = Counter()
        self._coming: set[Case[Key]] = set()
        """Cases whose turn has come, and that are not anywhere yet."""
        self._waiting: dict[Case[Key], asyncio.Future[None]] = {}

    @property
    def instances(self) -> frozenset[Key]:
        """Instances that have a request on trial."""
        return frozenset(self._at)

    def lost(self, case: Case[Key], instance: Key) -> None:
        """Notes that `instance` died with the request."""
        was_alone = case.at == instance and self._at[instance] == 1
        case.deaths.append(instance)
        case.is_guilty = len(case.deaths) >= (_DEATHS_ALONE if was_alone else _DEATHS)
        self.end(case)

    async def turn(self, case: Case[Key]) -> None:
        """Waits for an instance with nobody on trial, but not for ever. `end` comes after it, whatever happens."""
        turn = self._waiting[case] = asyncio.get_running_loop().create_future()
        self._advance()
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIAL_S):
                await turn
        self._waiting.pop(case, None)
        self._coming.add(case)

    def begin(self, case: Case[Key], instance: Key) -> None:
        self._coming.discard(case)
        case.at, case.num_parts = instance, 0
        case.timer = asyncio.get_running_loop().call_later(TRIAL_S, self.end, case)
        self._at[instance] += 1

    def got_part(self, case: Case[Key]) -> None:
        """Notes that a part of its answer has come."""
        case.num_parts += 1
        if case.num_parts >= TRIAL_PARTS:
            self.end(case)

    def end(self, case: Case[Key]) -> None:
        """Ends the trial of a request, or its wait for one, if there is any. As often as one likes."""
        if case.at is not None:
            self._at[case.at] -= 1
            if not self._at[case.at]:
                del self._at[case.at]
        if case.timer is not None:
            case.timer.cancel()
        case.at = case.timer = None
        self._coming.discard(case)
        self._waiting.pop(case, None)
        self._advance()

    def _advance(self) -> None:
        """Gives their turn to those that came first."""
        while self._waiting and len(self._at) + len(self._coming) < max(1, self._num_instances()):
            case = next(iter(self._waiting))
            turn = self._waiting.pop(case)
            if not turn.done():
                self._coming.add(case)
                turn.set_result(None)
