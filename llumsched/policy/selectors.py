# SPDX-License-Identifier: Apache-2.0
"""Which of those who may be chosen is chosen. Values: what they draw from is handed in, and they keep nothing."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """What a choice may depend on beside the metrics."""

    random: random.Random
    last: str | None = None
    """Id of the instance chosen last time, for the same model and infer type."""


@dataclass(frozen=True, slots=True)
class Order:
    """Of all instances, by id: ties break by it."""

    sorted_ids: Sequence[str]
    rank: Rows
    """By row, the position in `sorted_ids`."""


class Selector(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, rows: Rows, costs: Sequence[Values], order: Order, draw: Draw) -> int:
        """One of `rows`, which are not empty. `costs` are the policy's metrics by row, turned so that less is
        better."""
        ...


@dataclass(frozen=True, slots=True)
class MetricBasedSelector:
    """The best by the metrics, compared one after the other; any of the best `top_k` if that is more than one."""

    top_k: int = 1
    name: ClassVar[str] = "metricBasedSelector"

    def choose(self, rows: Rows, costs: Sequence[Values], order: Order, draw: Draw) -> int:
        if self.top_k > 1:
            keys = (order.rank[rows], *(cost[rows] for cost in reversed(costs)))
            best = rows[np.lexsort(keys)[: self.top_k]]
            return int(draw.random.choice(best))
        for cost in costs:
            values = cost[rows]
            rows = rows[values == values.min()]
        return int(rows[order.rank[rows].argmin()])


@dataclass(frozen=True, slots=True)
class RoundRobinSelector:
    """The next by id after the one chosen last, which may be gone."""

    name: ClassVar[str] = "roundRobinSelector"

    def choose(self, rows: Rows, costs: Sequence[Values], order: Order, draw: Draw) -> int:
        ranks = order.rank[rows]
        if draw.last is not None:
            after = ranks >= bisect_right(order.sorted_ids, draw.last)
            if after.any():
                rows, ranks = rows[after], ranks[after]
        return int(rows[ranks.argmin()])
