# SPDX-License-Identifier: Apache-2.0
"""Leader election among reschedulers without a common Redis: the highest term leads.

Each begins with the time in microseconds as its term. A llumlet refuses orders of a lower term than it has seen, so the
earlier of two reschedulers (as in a rolling update) is refused once. It stands by for `STAND_BY_S` and returns with a
higher term; if the other one still gives orders then, that one stands by. A gap without orders lasts at most
`STAND_BY_S`.

A clock that was ahead leaves a term above the time. Refusals in a row, each within `STAND_BY_S` of its term's start,
therefore add 2, 4, 8 minutes and so on.
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
"""Largest random addition to a term, in microseconds, so that two that start together differ."""


class Turns:
    """Replaces a `leadership.Lease`. `clock` is monotonic, `wall_clock` tells the time; both in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._term = 0
        self._until_s = -math.inf
        self._began_s = -math.inf
        """The start of the term."""
        self._num_in_a_row = 0
        """Refusals that each came soon after the term's start."""

    @property
    def term(self) -> int:
        """The term of this process; 0 while it stands by."""
        if self._clock() < self._until_s:
            return 0
        if not self._term:
            ahead_s = 60.0 * 2 ** min(self._num_in_a_row, _MOST_DOUBLINGS) if self._num_in_a_row else 0.0
            self._term = int((self._wall_clock() + ahead_s) * 1e6) + random.randrange(_MOST_DRAWN)
            self._began_s = self._clock()
        return self._term

    @property
    def reason(self) -> str:
        """The reason why it stands by, for people."""
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
        """Does nothing, as no connection is needed."""

    async def close(self) -> None:
        """Does nothing."""
