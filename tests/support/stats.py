# SPDX-License-Identifier: Apache-2.0
"""The statistics of the benchmarks: quantiles, bootstrap bounds and paired comparisons.

A ratio of two noisy programs on a shared machine means nothing by itself. The pattern here: run A B
B A (drift cancels), compare B with A inside each block, take the geometric mean over the blocks,
bound it by bootstrap over blocks, and do the same with A against itself. What lies inside the A/A
spread is not distinguishable on this machine, and is reported so.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

Verdict = Literal["within", "not distinguishable", "outside"]


def quantile(values: Iterable[float], q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default. Raises ValueError without
    values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    position = (len(ordered) - 1) * q
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Iterable[float]) -> float:
    return quantile(values, 0.5)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Three figures that describe the durations of one thing; the unit is the caller's."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        held = list(values)
        return cls(quantile(held, 0.5), quantile(held, 0.99), max(held))

    def rounded(self, digits: int = 3) -> dict[str, float]:
        return {name: round(getattr(self, name), digits) for name in ("p50", "p99", "max")}


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 4) -> dict[str, float]:
        return {name: round(getattr(self, name), digits) for name in ("value", "low", "high")}

    def inverse(self) -> Bounded:
        """Of a ratio of costs, that of speeds."""
        return Bounded(1 / self.value, 1 / self.high, 1 / self.low)


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = median,
    *,
    resamples: int = 4000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Bounded:
    """Percentile bootstrap of `statistic`; the same values give the same bounds."""
    if not values:
        raise ValueError("no values")
    rng = random.Random(seed)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return Bounded(statistic(values), quantile(drawn, tail), quantile(drawn, 1 - tail))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Ours over the baseline, with the baseline over itself as the control."""

    ratio: Bounded
    control: Bounded

    def against(self, bar: float) -> Verdict:
        """Whether the ratio is at most `bar`: by its upper bound, or because the control spreads as
        far.

        "not distinguishable": the upper bound is above the bar, but the ratio itself is not, or is
        inside the A/A interval. A wide interval of ours is no excuse: it can be ours that makes it wide.
        """
        if self.ratio.high <= bar:
            return "within"
        if self.ratio.value <= max(bar, self.control.high):
            return "not distinguishable"
        return "outside"


def compare(
    blocks: Sequence[Sequence[float]],
    control_blocks: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[float]], float] = geometric_mean,
) -> Comparison:
    """Compare by ABBA blocks `(a, b, b, a)`; `control_blocks` have the same shape with the baseline
    in both roles.

    Values are positive costs (CPU seconds a token, say); the ratio is B over A, of each block, and
    `statistic` of the blocks. The median stands blocks that somebody else has disturbed, where there are many.
    """
    return Comparison(_ratio(blocks, statistic), _ratio(control_blocks, statistic))


def _ratio(blocks: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float]) -> Bounded:
    ratios = []
    for block in blocks:
        if len(block) != 4 or min(block) <= 0:
            raise ValueError(f"an ABBA block holds four positive values, not {list(block)}")
        a, b, b_again, a_again = block
        ratios.append(math.sqrt(b * b_again / (a * a_again)))
    return bootstrap(ratios, statistic)
