# SPDX-License-Identifier: Apache-2.0
"""Metrics: formulas over columns that compare instances, by name.

Names and formulas are Llumnix's. Where two of its formulas count a request twice or not at all, this one counts it once
(docs/reference/policies.md). Installed packages add metrics through the entry point group `llumnix.metrics`, whose
entry points have the metrics' names. A policy's file may define more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from llumsched.cluster.columns import Columns, UnknownColumn, Values
from llumsched.cluster.providers import HIT_COLUMN
from llumsched.extensions import load_values
from llumsched.policy import raised
from llumsched.policy.expression import Expression, numbers
from llumsched.policy.predictions import PREDICTIONS
from llumsched.request import REQUEST_COLUMNS

ENTRY_POINTS = "llumnix.metrics"
BUILT_IN_CONSTANTS: Final[Mapping[str, float]] = {"priority_headroom": 0.5}
"""Numbers that every formula may name, with their defaults. The headroom is the share of a KV cache to keep free beside
an urgent request (`--priority-headroom`). The paper keeps all but 1,600 of 13,616 tokens; with one urgent request in
ten that costs the others too much (benchmarks/experiments.md)."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    of: Expression | Callable[[Columns], Values]
    """The formula, for all rows together; a function may return a single number. Infinity is allowed; NaN and
    exceptions count as the worst value. Before an instance's first status its columns are zero."""
    less_is_better: bool = True
    is_share: bool = False
    """True if 1 is a full instance. Other metrics are scaled by the greatest present value."""
    lite: bool = False
    """True if it needs no status, only the requests that the scheduler sent."""
    full: bool = True
    """True if it makes sense with statuses."""

    def values(self, columns: Columns) -> Values:
        """Values by row for comparisons, never NaN. A metric that raises is ignored."""
        try:
            values = self.computed(columns)
        except Exception as error:  # noqa: BLE001 - whatever a foreign metric raises
            raised.note(f"Metric {self.name}", "ranks all instances last", error)
            return np.full(len(columns), self.worst)
        unknown = np.isnan(values)
        return np.where(unknown, self.worst, values) if unknown.any() else values

    def computed(self, columns: Columns) -> Values:
        """Values by row, which may be NaN. Raises what the metric raises."""
        if isinstance(self.of, Expression):
            raw = self.of.of(functools.partial(_column, columns))
        else:
            with np.errstate(all="ignore"):
                raw = self.of(columns)
        values = np.asarray(raw, np.float64)
        return values if values.shape == (len(columns),) else np.broadcast_to(values, len(columns))

    def at(self, columns: Columns, row: int, weight: Mapping[str, float] | None = None) -> float:
        """The value of one instance, optionally with `weight` added to its columns."""
        if not isinstance(self.of, Expression):
            return float(self.values(_OneRow(columns, row, weight or {}))[0])
        value = float(self.of.of(lambda name: _number(columns, row, weight or {}, name)))
        return self.worst if math.isnan(value) else value

    def with_constants(self, values: Mapping[str, float]) -> Metric:
        """The metric with constants replaced by numbers."""
        return replace(self, of=self.of.with_names(numbers(values))) if isinstance(self.of, Expression) else self

    @property
    def of_request(self) -> bool:
        """True if it has no meaning without a request. The request's other columns are then 0."""
        return isinstance(self.of, Expression) and HIT_COLUMN in self.of.names

    @property
    def worst(self) -> float:
        return math.inf if self.less_is_better else -math.inf

    def better(self, one: float, other: float) -> bool:
        """True if one value is strictly better."""
        return one < other if self.less_is_better else one > other


@dataclass(frozen=True, slots=True)
class _OneRow:
    """`Columns` of one instance, with additions."""

    columns: Columns
    row: int
    weight: Mapping[str, float]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> Values:
        return np.array([_number(self.columns, self.row, self.weight, name)])


def _column(columns: Columns, name: str) -> Values:
    """A column. Those of the request are 0 in rescheduling."""
    try:
        return columns[name]
    except UnknownColumn:
        if name not in REQUEST_COLUMNS:
            raise
        return np.zeros(len(columns))


def _number(columns: Columns, row: int, weight: Mapping[str, float], name: str) -> float:
    number = float(_column(columns, name)[row])
    return max(number + weight[name], 0.0) if name in weight else number


_HEADROOM = """
    (priority_headroom if num_urgent_requests + sent_urgent_requests > 0 or priority < 0 else 0)
"""
"""Headroom beside a present or coming urgent request."""
_VIRTUAL_TOKENS = """
    (num_used_gpu_tokens
     + num_unallocated_tokens_scheduler_running_prefills
     + num_unallocated_tokens_hybrid_scheduler_waiting_decodes
     + num_unallocated_tokens_first_waiting_request
     + sent_tokens)
"""
_VIRTUAL_USAGE = f"({_VIRTUAL_TOKENS} / num_total_gpu_tokens + {_HEADROOM} if schedulable else 1 / 0)"
"""Algorithm 1 of Llumnix (OSDI'24), as a share of the KV cache: use, need of the first queued request, headroom of
urgent requests; infinite where an instance is to become empty."""

_NUM_REQUESTS = "num_waiting_requests + num_loading_requests + num_running_requests + sent_requests"

_BUILT_IN = (
    Metric(
        "kv_cache_usage_ratio_projected",
        Expression("""
            (num_used_gpu_tokens
             + max(num_uncomputed_tokens_all_waiting_prefills, num_unallocated_tokens_all_waiting_requests)
             + num_unallocated_tokens_scheduler_running_prefills
             + num_unallocated_tokens_hybrid_scheduler_waiting_decodes
             + sent_tokens) / num_total_gpu_tokens
        """),
        is_share=True,
    ),
    Metric(
        "decode_batch_size",
        Expression("""
            hybrid_scheduler_waiting_to_decode_requests_num
            + num_loading_requests
            + scheduler_waiting_to_decode_requests_num
            + scheduler_running_to_decode_requests_num
            + sent_decode_requests
        """),
    ),
    Metric("num_waiting_requests", Expression("num_waiting_requests + sent_requests")),
    Metric(
        "all_prefills_tokens_num",
        Expression("""
            num_uncomputed_tokens_all_waiting_prefills
            + num_uncomputed_tokens_scheduler_running_prefills
            + sent_uncomputed_prefill_tokens
        """),
    ),
    Metric("num_requests", Expression(_NUM_REQUESTS), lite=True),
    Metric(
        "all_decodes_tokens_num",
        Expression("""
            hybrid_scheduler_waiting_to_decode_tokens_num
            + scheduler_waiting_to_decode_tokens_num
            + scheduler_running_to_decode_tokens_num
            + num_tokens_loading_requests
            + sent_decode_tokens
        """),
    ),
    Metric("kv_cache_hit_len", Expression("kv_cache_hit_len"), less_is_better=False, lite=True),
    Metric(
        "cache_aware_all_prefills_tokens_num",
        Expression("""
            prompt_num_tokens - kv_cache_hit_len
            + num_uncomputed_tokens_all_waiting_prefills
            + num_uncomputed_tokens_scheduler_running_prefills
            + sent_uncomputed_prefill_tokens
        """),
    ),
    Metric("num_tokens", Expression("sent_tokens"), lite=True, full=False),
    Metric("urgent_headroom", Expression(_HEADROOM), is_share=True),
    Metric("virtual_usage", Expression(_VIRTUAL_USAGE), is_share=True),
    Metric(
        "freeness",
        Expression(f"(1 - {_VIRTUAL_USAGE}) * num_total_gpu_tokens / max({_NUM_REQUESTS}, 1)"),
        less_is_better=False,
    ),
    *(Metric(name, of) for name, of in PREDICTIONS.items()),
)


def built_in_metrics(constants: Mapping[str, float] = BUILT_IN_CONSTANTS) -> dict[str, Metric]:
    """Built-in metrics by name. Missing constants stay names in the formulas."""
    return {metric.name: metric.with_constants(constants) for metric in _BUILT_IN}


METRICS: Mapping[str, Metric] = built_in_metrics()
"""Built-in metrics by name, with the default constants."""


def all_metrics(constants: Mapping[str, float] = BUILT_IN_CONSTANTS) -> dict[str, Metric]:
    """Built-in metrics, and those of installed packages. Raises ValueError for an invalid one or a repeated name."""
    known = load_values(ENTRY_POINTS, METRICS, _fault)
    others = {name: metric.with_constants(constants) for name, metric in known.items() if name not in METRICS}
    return built_in_metrics(constants) | others


def metric_fault(name: str) -> str:
    """The reason why a metric cannot compare the load of instances; "" if it can."""
    try:
        known = all_metrics()
    except ValueError as error:
        return str(error)
    of_status = [metric for metric in known.values() if metric.full and not metric.of_request]
    loads = [metric.name for metric in of_status if metric.less_is_better]
    if name not in known:
        return f"{name!r} is none of {', '.join(sorted(loads))}"
    return "" if name in loads else f"{name!r} is no load of a status; there are {', '.join(sorted(loads))}"


def _fault(name: str, value: object) -> str | None:
    if not isinstance(value, Metric):
        return f"is {type(value).__name__}, not a Metric"
    return None if value.name == name else f"calls itself {value.name!r}"
