# SPDX-License-Identifier: Apache-2.0
"""Selectors: the choice among the instances that filters leave. They are pure; randomness is a parameter.

Installed packages add selectors through the entry point group `llumnix.selectors`: a callable that takes the YAML's
settings as keyword arguments and returns a `Selector`.
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
    """Inputs of a choice beside the metrics."""

    random: random.Random
    last: str | None = None
    """Id of the instance chosen last for the same model and infer type."""


@runtime_checkable
class Selector(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        """Chooses one of `rows`, which are not empty. `costs`: the policy's metrics by name and row, in order, with
        less being better."""
        ...


def selector_fault(value: object) -> str | None:
    """The reason why a value is not a `Selector`; None if it is one."""
    return None if isinstance(value, Selector) else "is no selector, as it lacks a name or choose"


@dataclass(frozen=True, slots=True)
class MetricBasedSelector:
    """Chooses the best by the metrics, compared one after the other; or a random one of the best `top_k`."""

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
    """Chooses the least weighted sum of metrics, each scaled to 0 for the best and 1 for the worst candidate; a metric
    that is equal for all has no influence."""

    weights: Mapping[str, float]
    top_k: int = 1
    name: ClassVar[str] = "weightedSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        total = np.zeros(len(rows))
        for metric, weight in self.weights.items():
            total += weight * _scaled(costs[metric][rows])
        return _one_of_best(rows, [total], self.top_k, order, draw)


def _scaled(values: Values) -> Values:
    """Values scaled to [0, 1]. Infinities count as the worst or best number."""
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
    """Chooses the next by id after the last choice, which may be gone."""

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
    """Chooses at random."""

    name: ClassVar[str] = "randomSelector"

    def choose(self, rows: Rows, costs: Mapping[str, Values], order: IdOrder, draw: Draw) -> int:
        return int(rows[draw.random.randrange(len(rows))])
