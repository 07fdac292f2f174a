# SPDX-License-Identifier: Apache-2.0
"""Numbers that compare instances. Pure functions of a `Load` (and, if they say so, of the request), by name.

Names and formulas are those of Llumnix; where two of its formulas counted a request twice or not at all, this one
counts it once (docs/policies.md). Metrics of other packages come through the entry point group `llumnix.metrics`: the
entry point is named like the `Metric` it loads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llumsched.scheduling.extensions import load_values
from llumsched.scheduling.load import Context, Load

ENTRY_POINTS = "llumnix.metrics"

_log = logging.getLogger(__name__)
_raised: set[str] = set()
"""Names of metrics of which it was said that they raise."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    less_is_better: bool
    of: Callable[[Load], float]
    """May return an infinity; not a number is as bad as can be, and so is an exception. It is also asked of an instance
    before its first status, when all of that is zero."""
    of_request: Callable[[Load, Context], float] | None = None
    """Instead of `of`, for a metric that depends on the request or on the time: called for every instance at every
    decision, where `of` is called when an instance's load changes."""
    lite: bool = False
    """Needs nothing of the instance's status: what the scheduler sent there says it."""
    full: bool = True
    """Means something beside a status."""

    def value(self, load: Load, context: Context | None = None) -> float:
        """For comparing: never NaN. A metric of another package may raise; whoever asks goes on without its value."""
        try:
            if self.of_request is not None and context is not None:
                value = float(self.of_request(load, context))
            else:
                value = float(self.of(load))
        except Exception as error:  # noqa: BLE001 - whatever a foreign metric raises
            if load.instance.status is not None:  # before it, all is zero, and a ratio of that is no fault
                self._log_once(error)
            return self.worst
        return self.worst if math.isnan(value) else value

    def _log_once(self, error: Exception) -> None:
        if self.name not in _raised:
            _raised.add(self.name)
            _log.error("Metric %s raises, and ranks an instance last when it does", self.name, exc_info=error)

    @property
    def worst(self) -> float:
        return math.inf if self.less_is_better else -math.inf

    def better(self, one: float, other: float) -> bool:
        """Strictly. The threshold of a filter is met by what is better than it."""
        return one < other if self.less_is_better else one > other


def _kv_cache_usage_ratio_projected(load: Load) -> float:
    status = load.status
    if status.num_total_gpu_tokens <= 0:
        return math.inf
    tokens = (
        status.num_used_gpu_tokens
        + status.num_uncomputed_tokens_all_waiting_prefills
        + status.num_unallocated_tokens_scheduler_running_prefills
        + status.num_unallocated_tokens_hybrid_scheduler_waiting_decodes
        + load.account.num_tokens
    )
    return tokens / status.num_total_gpu_tokens


def _decode_batch_size(load: Load) -> float:
    status = load.status
    return (
        status.hybrid_scheduler_waiting_to_decode_requests_num
        + status.num_loading_requests
        + status.scheduler_waiting_to_decode_requests_num
        + status.scheduler_running_to_decode_requests_num
        + load.account.num_decode_requests
    )


def _num_waiting_requests(load: Load) -> float:
    return load.status.num_waiting_requests + load.account.num_requests


def _all_prefills_tokens_num(load: Load) -> float:
    status = load.status
    return (
        status.num_uncomputed_tokens_all_waiting_prefills
        + status.num_uncomputed_tokens_scheduler_running_prefills
        + load.account.num_uncomputed_prefill_tokens
    )


def _num_requests(load: Load) -> float:
    status = load.status
    in_engine = status.num_waiting_requests + status.num_loading_requests + status.num_running_requests
    return in_engine + load.account.num_requests


def _all_decodes_tokens_num(load: Load) -> float:
    status = load.status
    return (
        status.hybrid_scheduler_waiting_to_decode_tokens_num
        + status.scheduler_waiting_to_decode_tokens_num
        + status.scheduler_running_to_decode_tokens_num
        + status.num_tokens_loading_requests
        + load.account.num_decode_tokens
    )


def _num_tokens(load: Load) -> float:
    return load.account.num_tokens


_BUILT_IN = (
    Metric("kv_cache_usage_ratio_projected", True, _kv_cache_usage_ratio_projected),
    Metric("decode_batch_size", True, _decode_batch_size),
    Metric("num_waiting_requests", True, _num_waiting_requests),
    Metric("all_prefills_tokens_num", True, _all_prefills_tokens_num),
    Metric("num_requests", True, _num_requests, lite=True),
    Metric("all_decodes_tokens_num", True, _all_decodes_tokens_num),
    Metric("num_tokens", True, _num_tokens, lite=True, full=False),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _BUILT_IN}
"""The built-in ones, by name."""


def all_metrics() -> dict[str, Metric]:
    """The built-in ones and those of installed packages. Raises ValueError for one that is none, or that takes a name
    that is taken."""
    return load_values(ENTRY_POINTS, METRICS, _fault)


def _fault(name: str, value: object) -> str | None:
    if not isinstance(value, Metric):
        return f"is {type(value).__name__}, not a Metric"
    return None if value.name == name else f"calls itself {value.name!r}"
