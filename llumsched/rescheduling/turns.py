# SPDX-License-Identifier: Apache-2.0
"""Which of several reschedulers gives orders where they share no Redis: the one with the highest term.

Each begins with the time as its term, in microseconds. A llumlet refuses orders of a lower term than it has seen, so of
two that order at the same instances, as during a rolling update of the scheduler, the one that began earlier is refused
once. It then stands by for `STAND_BY_S`, and begins anew with a higher term: if the other one still gives orders by
then, that one stands by. Engines accept orders from one rescheduler at a time; a gap lasts at most `STAND_BY_S`.

A clock that was ahead leaves a term behind that is higher than the time. Refusals in a row, each
less than `STAND_BY_S` after its term began, therefore add 2, 4, 8 minutes and so on to the time.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)
STAND_BY_S: Final = 60.0
_MOST_DOUBLINGS: Final = 20
_MOST_DRAWN: Final = 1000
"""Limit of what is drawn for a term, in microseconds, so that no two that begin together have the same one."""


class Turns:
    """In the place of a `leadership.Lease`. `clock` is monotonic, `wall_clock` tells the time; both in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._term = 0
        self._until_s = -math.inf
        self._began_s = -math.inf
        """The time at which the term began."""
        self._num_in_a_row = 0
        """Refusals of which each came soon after its term began."""

    @property
    def term(self) -> int:
        """The term of this one; 0 while it stands by."""
        if self._clock() < self._until_s:
            return 0
        if not self._term:
            ahead_s = 60.0 * 2 ** min(self._num_in_a_row, _MOST_DOUBLINGS) if self._num_in_a_row else 0.0
            self._term = int((self._wall_clock() + ahead_s) * 1e6) + random.randrange(_MOST_DRAWN)
            self._began_s = self._clock()
        return self._term

    @property
    def reason(self) -> str:
        """Why this one gives no orders, when it stands by; for people."""
        left_s = max(self._until_s - self._clock(), 0.0)
        return f"it stands by for {left_s:.0f} s: engines have seen orders of a higher term"

    def refused(self, term: int) -> None:
        """Notes that a llumlet refused orders of this term, as it has seen a higher one."""
        if term == self._term:
            now_s = self._clock()
            self._num_in_a_row = self._num_in_a_row + 1 if now_s - self._began_s < STAND_BY_S else 0
            self._term, self._until_s = 0, now_s + STAND_BY_S
            _log.warning(
                "this rescheduler stands by for %.0f s: engines have seen orders of a higher term, of another "
                "rescheduler or of one whose clock was ahead",
                STAND_BY_S,
            )

    async def start(self) -> None:
        """Needs no connection."""

    async def close(self) -> None:
        """Has nothing to give back."""
