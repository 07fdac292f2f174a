# SPDX-License-Identifier: Apache-2.0
"""Filters and selectors by their names in a policy's file, and the checks of their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from llumsched.cluster.domains import FailoverDomain
from llumsched.extensions import load_values
from llumsched.policy import filters as f
from llumsched.policy import selectors as s

FILTER_ENTRY_POINTS: Final = "llumnix.filters"
SELECTOR_ENTRY_POINTS: Final = "llumnix.selectors"

Maker = Callable[..., Any]
"""A part's constructor, called with the file's settings. ValueError and TypeError tell their faults."""


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    try:
        as_float = float(value)
    except OverflowError:
        raise ValueError("a number is too large") from None
    if not math.isfinite(as_float):
        raise ValueError(f"{value!r} is not a finite number")
    return as_float


def positive_seconds(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError(f"{value!r} seconds are not positive")
    return float(value)


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} {value!r} is neither true nor false")
    return value


def rank(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"top_k {value!r} is not a number from 1 on")
    return value


def _weights(value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"weights {value!r} are not a mapping of metrics to numbers")
    weights = {str(name): number(weight) for name, weight in value.items()}
    if min(weights.values()) < 0:
        raise ValueError("weights below 0 turn a metric round: define one that is better the other way")
    return weights


STRUCTURAL: Final[tuple[type[f.Filter], ...]] = (f.ModelFilter, f.CapacityFilter, f.RetryFilter, f.BreakerFilter)
"""Filters that begin every dispatch policy, after the infer type's."""
_FILTERS: Final[Mapping[str, Maker]] = {
    "schedulabilityFilter": f.SchedulabilityFilter,
    "stalenessFilter": lambda seconds: f.StalenessFilter(positive_seconds(seconds)),
    "metricBasedFilter": lambda metric, threshold, skip_in_fallback=True: f.MetricBasedFilter(
        metric, number(threshold), switch("skip_in_fallback", skip_in_fallback)
    ),
    "failoverFilter": lambda domain: f.FailoverFilter(FailoverDomain(domain)),
    "failoverMigrationSrcFilter": lambda domain: f.FailoverMigrationSrcFilter(FailoverDomain(domain)),
}
_SELECTORS: Final[Mapping[str, Maker]] = {
    "metricBasedSelector": lambda top_k=1: s.MetricBasedSelector(rank(top_k)),
    "weightedSelector": lambda weights, top_k=1: s.WeightedSelector(_weights(weights), rank(top_k)),
    "roundRobinSelector": s.RoundRobinSelector,
    "randomSelector": s.RandomSelector,
}


def all_filters() -> dict[str, Maker]:
    """Built-in filters, and those of installed packages. Raises ValueError for an invalid one."""
    return load_values(FILTER_ENTRY_POINTS, _FILTERS, callable_fault)


def all_selectors() -> dict[str, Maker]:
    """Built-in selectors, and those of installed packages. Raises ValueError for an invalid one."""
    return load_values(SELECTOR_ENTRY_POINTS, _SELECTORS, callable_fault)


def callable_fault(name: str, value: object) -> str | None:
    """The reason why an entry point's value makes no parts; None if it does."""
    return None if callable(value) else "is not callable"
