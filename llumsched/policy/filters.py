# SPDX-License-Identifier: Apache-2.0
"""Filters: pure functions of candidates that refuse instances and give the reasons.

A `Filter` judges each row by itself; a `GroupFilter` also sees the failed rows. Both return a mask, and a row's reason
on demand. Installed packages add filters through the entry point group `llumnix.filters`: a callable that takes the
YAML's settings as keyword arguments and returns a filter. A policy's file may define filters by a condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from llumlet.contract.types import NOT_WELL, Health, word
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.columns import Mask, Values
from llumsched.cluster.domains import FailoverDomain, failing_with
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.metadata import type_code, type_of
from llumsched.policy.candidates import Candidates
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import Metric


@runtime_checkable
class Filter(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def skip_in_fallback(self) -> bool:
        """True if a second pass, after one that left no instance, skips it."""
        ...

    @property
    def marks_failed(self) -> bool:
        """True if the instances that it refuses count as failed, so that group filters refuse their neighbours.
        Instances that have not reported yet do not count: they are starting."""
        ...

    def refuse(self, candidates: Candidates) -> Mask:
        """True for each row that is refused."""
        ...

    def reason(self, candidates: Candidates, row: int) -> str:
        """The reason why a row is refused, for people."""
        ...


@runtime_checkable
class GroupFilter(Protocol):
    @property
    def name(self) -> str: ...

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        """True for each row that is refused. `failed`: rows that a filter with `marks_failed` refused."""
        ...

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str: ...


def filter_fault(value: object) -> str | None:
    """The reason why a value is neither a `Filter` nor a `GroupFilter`; None if it is one."""
    if isinstance(value, Filter | GroupFilter):
        return None
    group = hasattr(value, "refuse_among")
    wanted = (
        ("name", "refuse_among", "reason_among")
        if group
        else ("name", "skip_in_fallback", "marks_failed", "refuse", "reason")
    )
    return f"is no filter, as it lacks {', '.join(name for name in wanted if not hasattr(value, name))}"


@dataclass(frozen=True, slots=True)
class ModelFilter:
    """Rejects instances that do not serve the request's model."""

    name: ClassVar[str] = "modelFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return ~candidates.cluster.serving(candidates.context.request.model)

    def reason(self, candidates: Candidates, row: int) -> str:
        return f"does not serve {candidates.context.request.model!r}"


@dataclass(frozen=True, slots=True)
class InferTypeFilter:
    """Rejects instances of another infer type."""

    infer_type: InferType
    name: ClassVar[str] = "inferTypeFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        refused: Mask = candidates["infer_type"] != type_code(self.infer_type)
        return refused

    def reason(self, candidates: Candidates, row: int) -> str:
        return f"is {type_of(candidates.cluster.instances[row])}, not {self.infer_type}"


@dataclass(frozen=True, slots=True)
class CapacityFilter:
    """Rejects instances that could not hold the prompt and one output token even if they were empty. Unknown sizes are
    no limit."""

    name: ClassVar[str] = "capacityFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return candidates.context.request.prompt_num_tokens > self._capacity(candidates)

    def reason(self, candidates: Candidates, row: int) -> str:
        tokens, capacity = candidates.context.request.prompt_num_tokens, self._capacity(candidates)[row]
        return f"a prompt of {tokens} tokens does not fit: {capacity:.0f} at most"

    def _capacity(self, candidates: Candidates) -> Values:
        limits = candidates["max_model_len"], candidates["num_total_gpu_tokens"]
        length, size = (np.where(limit > 0, limit, np.inf) for limit in limits)
        capacity: Values = np.minimum(length, size) - 1
        return capacity


@dataclass(frozen=True, slots=True)
class RetryFilter:
    """Rejects instances that failed this request, unless there is no other."""

    name: ClassVar[str] = "retryFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return candidates.among(candidates.context.avoid)

    def reason(self, candidates: Candidates, row: int) -> str:
        return "had this request before"


@dataclass(frozen=True, slots=True)
class BreakerFilter:
    """Rejects instances that gateways complain of (`dispatch.complaints`), unless there is no other."""

    name: ClassVar[str] = "breakerFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return candidates.among(candidates.context.complaints)

    def reason(self, candidates: Candidates, row: int) -> str:
        return candidates.context.complaints[candidates.cluster.instances[row].id]


@dataclass(frozen=True, slots=True)
class SchedulabilityFilter:
    """Rejects instances that are closed, hung or lost, or have not reported yet."""

    name: ClassVar[str] = "schedulabilityFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = True

    def refuse(self, candidates: Candidates) -> Mask:
        refused: Mask = (candidates["schedulable"] == 0) | (candidates["lost"] > 0)
        health = candidates["health"]
        for state in NOT_WELL:
            refused |= health == state
        return refused

    def reason(self, candidates: Candidates, row: int) -> str:
        said = unschedulable(candidates.cluster.instances[row])
        return "has gone without a word" if candidates["lost"][row] else said


def unschedulable(instance: Instance) -> str:
    """The reason why an instance that `SchedulabilityFilter` rejects gets nothing."""
    status = instance.status
    if status is None:
        return "has not reported its status yet"
    if status.health in NOT_WELL:
        doing = f"has been busy with {status.busy_with}" if status.busy_with else "has not moved"
        return f"{word(Health, status.health)}: its loop {doing} for {status.loop_age_ms / 1e3:.1f} s"
    return "takes no new requests"


@dataclass(frozen=True, slots=True)
class StalenessFilter:
    """Rejects instances that have not reported for longer than this."""

    seconds: float
    name: ClassVar[str] = "stalenessFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = True

    def refuse(self, candidates: Candidates) -> Mask:
        refused: Mask = candidates["age_s"] > self.seconds
        return refused

    def reason(self, candidates: Candidates, row: int) -> str:
        return f"last status {candidates['age_s'][row]:.1f} s ago"


@dataclass(frozen=True, slots=True)
class MetricBasedFilter:
    """Rejects instances whose value does not beat the threshold. Equal is rejected."""

    metric: Metric
    threshold: float
    skip_in_fallback: bool = True
    name: ClassVar[str] = "metricBasedFilter"
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        values = candidates.values(self.metric)
        refused: Mask = values >= self.threshold if self.metric.less_is_better else values <= self.threshold
        return refused

    def reason(self, candidates: Candidates, row: int) -> str:
        side, value = "below" if self.metric.less_is_better else "above", candidates.values(self.metric)[row]
        return f"{self.metric.name} is {value:g}, not {side} {self.threshold:g}"


@dataclass(frozen=True, slots=True)
class ConditionFilter:
    """Rejects instances for which the condition of a policy's file holds."""

    name: str
    condition: Expression
    said: str = ""
    skip_in_fallback: bool = False
    marks_failed: bool = False

    def refuse(self, candidates: Candidates) -> Mask:
        holds = np.asarray(self.condition.of(candidates.__getitem__))
        return np.broadcast_to(holds.astype(np.bool_), len(candidates))

    def reason(self, candidates: Candidates, row: int) -> str:
        read = ", ".join(f"{name} is {candidates[name][row]:g}" for name in sorted(self.condition.names))
        return f"{self.said or self.condition.text} ({read})" if read else self.said or self.condition.text


@dataclass(frozen=True, slots=True)
class FailoverFilter:
    """Rejects instances that share a failure domain with a failed or lost one."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverFilter"

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        return failing_with(self.domain, failed, candidates, candidates.context.lost)

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str:
        return "failed itself" if failed[row] else f"shares its {self.domain} with a failed instance"


@dataclass(frozen=True, slots=True)
class FailoverMigrationSrcFilter:
    """Rejects instances that share no failure domain with a failed one: the others are to be emptied."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverMigrationSrcFilter"

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        return ~failing_with(self.domain, failed, candidates, candidates.context.lost)

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str:
        return f"shares its {self.domain} with no failed instance"
