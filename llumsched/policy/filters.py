# SPDX-License-Identifier: Apache-2.0
"""Who may be chosen, and why the others may not. Values: pure functions of candidates.

A `Filter` refuses rows by themselves; a `GroupFilter` looks at those that failed, too. Both answer with a mask, and say
the reason of a row when somebody asks (`explain`). Filters of other packages come through the entry point group
`llumnix.filters`: the entry point loads a callable that is given the YAML's settings as keyword arguments and
returns a `Filter` or a `GroupFilter`. A policy's file may define more, by a condition.
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
        """Whether a second pass, after one that left nobody, does without it."""
        ...

    @property
    def marks_failed(self) -> bool:
        """Whether an instance that it refuses counts as failed: group filters then refuse its neighbours too. One that
        has not reported yet does not count: it is starting."""
        ...

    def refuse(self, candidates: Candidates) -> Mask:
        """True for each row that is refused."""
        ...

    def reason(self, candidates: Candidates, row: int) -> str:
        """Why a row is refused, for people."""
        ...


@runtime_checkable
class GroupFilter(Protocol):
    @property
    def name(self) -> str: ...

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        """True for each row that is refused. `failed` are rows that a filter with `marks_failed` refused."""
        ...

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str: ...


def filter_fault(value: object) -> str | None:
    """Why a value is no `Filter` and no `GroupFilter` either; None if it is one."""
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
    """Refuses who does not serve the request's model."""

    name: ClassVar[str] = "modelFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return ~candidates.cluster.serving(candidates.context.request.model)

    def reason(self, candidates: Candidates, row: int) -> str:
        return f"does not serve {candidates.context.request.model!r}"


@dataclass(frozen=True, slots=True)
class InferTypeFilter:
    """Refuses who is there for something else."""

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
    """Refuses who could not hold the prompt and one token of output if it were empty. What an instance does not say of
    its size is no limit."""

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
    """Refuses who had this request and failed it, unless nobody else is left."""

    name: ClassVar[str] = "retryFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return candidates.among(candidates.context.avoid)

    def reason(self, candidates: Candidates, row: int) -> str:
        return "had this request before"


@dataclass(frozen=True, slots=True)
class BreakerFilter:
    """Refuses whom gateways complain of (`dispatch.complaints`), unless nobody else is left."""

    name: ClassVar[str] = "breakerFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, candidates: Candidates) -> Mask:
        return candidates.among(candidates.context.complaints)

    def reason(self, candidates: Candidates, row: int) -> str:
        return candidates.context.complaints[candidates.cluster.instances[row].id]


@dataclass(frozen=True, slots=True)
class SchedulabilityFilter:
    """Refuses who says that it takes nothing, hangs, is lost, or has not said anything yet: then it is not schedulable
    either."""

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
    """Why nothing may be sent to an instance that is refused for what it says itself."""
    status = instance.status
    if status is None:
        return "has not reported its status yet"
    if status.health in NOT_WELL:
        doing = f"has been busy with {status.busy_with}" if status.busy_with else "has not moved"
        return f"{word(Health, status.health)}: its loop {doing} for {status.loop_age_ms / 1e3:.1f} s"
    return "takes no new requests"


@dataclass(frozen=True, slots=True)
class StalenessFilter:
    """Refuses who has not reported for longer than this."""

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
    """Refuses whose value is not better than the threshold: one that is equal to it is refused."""

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
    """Refuses the instances of which the condition of a policy's file holds."""

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
    """Refuses who shares its domain with a failed instance, or with one that is lost."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverFilter"

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        return failing_with(self.domain, failed, candidates, candidates.context.lost)

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str:
        return "failed itself" if failed[row] else f"shares its {self.domain} with a failed instance"


@dataclass(frozen=True, slots=True)
class FailoverMigrationSrcFilter:
    """Refuses who does not share its domain with a failed instance: what it lets pass is to be emptied."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverMigrationSrcFilter"

    def refuse_among(self, candidates: Candidates, failed: Mask) -> Mask:
        return ~failing_with(self.domain, failed, candidates, candidates.context.lost)

    def reason_among(self, candidates: Candidates, failed: Mask, row: int) -> str:
        return f"shares its {self.domain} with no failed instance"
