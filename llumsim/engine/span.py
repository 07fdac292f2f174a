# SPDX-License-Identifier: Apache-2.0
"""Steps of one engine that follow each other and are alike: each lasts longer than the one before by a constant."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    began_ps: int
    first_ps: int
    """Time that its first step lasts."""
    growth_ps: int
    length: int
    """Steps; fewer, once something comes from outside."""
    num_settled: int = 0
    """Steps that are accounted for."""
    num_supplied: int = 1
    """Steps whose blocks have been taken."""

    def end_of(self, num_steps: int) -> int:
        """The time at which so many of its steps have ended."""
        return self.began_ps + num_steps * self.first_ps + self.growth_ps * (num_steps * (num_steps - 1) // 2)

    def lasting(self, number: int) -> int:
        """How long the step after so many others lasts."""
        return self.first_ps + self.growth_ps * number

    def age(self, now_ps: int) -> int:
        """Time since the step under way began."""
        return now_ps - self.end_of(min(self.num_ended(now_ps), self.length - 1))

    def num_ended(self, now_ps: int) -> int:
        """The greatest number, however long the span is, with `end_of(number) <= now_ps`."""
        passed, growth = now_ps - self.began_ps, self.growth_ps
        if not growth:
            return passed // self.first_ps
        # growth · n² + (2 · first - growth) · n <= 2 · passed
        linear = 2 * self.first_ps - growth
        return max((math.isqrt(linear * linear + 8 * growth * passed) - linear) // (2 * growth), 0)
