# SPDX-License-Identifier: Apache-2.0
"""Which of those who may be chosen is chosen. Values: what they draw from is handed in, and they keep nothing.

Selectors of other packages come through the entry point group `llumnix.selectors`: the entry point loads a callable
that is given the YAML's settings as keyword arguments and returns a `Selector`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from llumsched.cluster.columns import IdOrder, Rows, Values


@dataclass(frozen=True, slots=True)
class Draw:
    """What a choice may depend on beside the metrics."""

    random: random.Random
    last: str | None = None
    """Id of the instance chosen last time, for the same model and infer type."""


@runtime_checkable
class Selector(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        """One of `rows`, which are not empty. `costs` are the policy's metrics by name and row, in their order, turned
        so that less is better."""
        ...


def selector_fault(value: object) -> str | None:
    """Why a value is no `Selector`; None if it is one."""
    return None if isinstance(value, Selector) else "is no selector, as it lacks a name or choose"


@dataclass(frozen=True, slots=True)
class MetricBasedSelector:
    """The best by the metrics, compared one after the other; any of the best `top_k` if that is more than one."""

    top_k: int = 1
    name: ClassVar[str] = "metricBasedSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        if self.top_k > 1:
            return _one_of_best(rows, [cost[rows] for cost in costs.values()], self.top_k, order, draw)
        for cost in costs.values():
            values = cost[rows]
            rows = rows[values == values.min()]
        return int(rows[order.rank[rows].argmin()])


@dataclass(frozen=True, slots=True)
class WeightedSelector:
    """The least weighted sum of metrics, each brought to 0 for the best and 1 for the worst of those who may be chosen:
    a metric that is equal on all of them says nothing."""

    weights: Mapping[str, float]
    top_k: int = 1
    name: ClassVar[str] = "weightedSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        total = np.zeros(len(rows))
        for metric, weight in self.weights.items():
            total += weight * _scaled(costs[metric][rows])
        return _one_of_best(rows, [total], self.top_k, order, draw)


def _scaled(values: Values) -> Values:
    """Values from 0 to 1. Infinities are as bad as the worst number, or as good as the best."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return (values > 0).astype(np.float64)
    low, high = finite.min(), finite.max()
    scaled: Values = np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0)
    return scaled


def _one_of_best(rows: Rows, keys: Sequence[Values], top_k: int, order: IdOrder, draw: Draw) -> int:
    best = rows[np.lexsort((order.rank[rows], *reversed(keys)))[:top_k]]
    return int(best[0]) if top_k == 1 else int(draw.random.choice(best))


@dataclass(frozen=True, slots=True)
class RoundRobinSelector:
    """The next by id after the one chosen last, which may be gone."""

    name: ClassVar[str] = "roundRobinSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        ranks = order.rank[rows]
        if draw.last is not None:
            after = ranks >= bisect_right(order.sorted_ids, draw.last)
            if after.any():
                rows, ranks = rows[after], ranks[after]
        return int(rows[ranks.argmin()])


@dataclass(frozen=True, slots=True)
class RandomSelector:
    """Chooses anybody."""

    name: ClassVar[str] = "randomSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        return int(rows[draw.random.randrange(len(rows))])
