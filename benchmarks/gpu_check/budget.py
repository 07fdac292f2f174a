# SPDX-License-Identifier: Apache-2.0
"""The time that a check may take, and whether one more pair of engines fits into it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

FIRST_GUESS_S = 60.0
"""How long a pair of engines is expected to take before any has run."""


class Budget:
    """`seconds` from now on, or for ever. The longest pair of engines so far says how long the next one takes."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds
        self._longest = FIRST_GUESS_S

    @property
    def left(self) -> float:
        """Seconds until the end, 0 after it."""
        return max(0.0, self._ends_at - self._clock())

    def why_no_more(self) -> str | None:
        """The reason to begin no pair of engines; None if there is time for one."""
        if self.left >= self._longest:
            return None
        return f"no time: {self.left:.0f} s are left, a pair of engines has taken up to {self._longest:.0f} s"

    @contextlib.contextmanager
    def pair(self) -> Iterator[None]:
        """The time that one pair of engines takes, its start included."""
        began = self._clock()
        try:
            yield
        finally:
            self._longest = max(self._longest, self._clock() - began)
