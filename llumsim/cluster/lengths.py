# SPDX-License-Identifier: Apache-2.0
"""The lengths of prompts and outputs: distributions with a known mean and some percentiles.

Between two percentiles the logarithm of the length is linear. Below the median it bends such that the mean is met, or
is as near as any bend brings it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

_SHARES: Final = (0.0, 0.5, 0.8, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens. `knots`: the shortest, P50, P80, P95, P99, and the longest."""

    mean: float
    knots: tuple[int, int, int, int, int, int]
    _bend: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bend", self._bend_for_mean())

    def draw(self, random_: random.Random) -> int:
        return max(round(self.at(random_.random())), 1)

    def at(self, share: float) -> float:
        """The length that this share of all does not exceed."""
        number = min(bisect_right(_SHARES, share) - 1, len(_SHARES) - 2)
        within = (share - _SHARES[number]) / (_SHARES[number + 1] - _SHARES[number])
        if not number:
            within **= self._bend
        low, high = self.knots[number], self.knots[number + 1]
        return low * math.exp(within * math.log(high / low))

    def _bend_for_mean(self) -> float:
        """Larger bends make the shortest ones more."""
        low, high = 0.02, 50.0
        for _ in range(60):
            bend = math.sqrt(low * high)
            if self._mean_with(bend) > self.mean:
                low = bend
            else:
                high = bend
        return math.sqrt(low * high)

    def _mean_with(self, bend: float) -> float:
        total = 0.0
        for number in range(len(_SHARES) - 1):
            low, high = self.knots[number], self.knots[number + 1]
            steps, power = 200, 1.0 if number else bend
            values = (low * math.exp(((step + 0.5) / steps) ** power * math.log(high / low)) for step in range(steps))
            total += (_SHARES[number + 1] - _SHARES[number]) * sum(values) / steps
        return total


LONGEST: Final = 6144
"""The longest prompt, and the longest output, in Llumnix's evaluation: 6k."""

LENGTHS: Final[dict[str, Lengths]] = {
    "sharegpt-in": Lengths(306, (4, 74, 348, 1484, 3388, LONGEST)),
    "sharegpt-out": Lengths(500, (4, 487, 781, 988, 1234, LONGEST)),
    "burstgpt-in": Lengths(830, (4, 582, 1427, 2345, 3549, LONGEST)),
    "burstgpt-out": Lengths(271, (4, 243, 434, 669, 964, LONGEST)),
    "short": Lengths(128, (8, 38, 113, 413, 1464, LONGEST)),
    "medium": Lengths(256, (8, 32, 173, 1288, 4208, LONGEST)),
    "long": Lengths(512, (8, 55, 582, 3113, 5166, LONGEST)),
}
"""Table 1 of Llumnix (OSDI'24): stand-ins for its data sets, rebuilt from the percentiles that it prints."""

PAIRS: Final[dict[str, tuple[str, str]]] = {
    "sharegpt": ("sharegpt-in", "sharegpt-out"),
    "burstgpt": ("burstgpt-in", "burstgpt-out"),
    "s-s": ("short", "short"),
    "m-m": ("medium", "medium"),
    "l-l": ("long", "long"),
    "s-l": ("short", "long"),
    "l-s": ("long", "short"),
}
"""Prompts and outputs."""
