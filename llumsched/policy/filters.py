# SPDX-License-Identifier: Apache-2.0
"""Who may be chosen, and why the others may not. Values: pure functions of loads and a context.

A `Filter` looks at one instance; a `GroupFilter` looks at all of them and at those that failed. `apply` runs both over
a list of loads, and is the reference for the arrays of `table`. Filters of other packages come through the entry point
group `llumnix.filters`: the entry point loads a callable that is given the YAML's settings as keyword arguments and
returns a `Filter` or a `GroupFilter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol, runtime_checkable

from llumlet.types import NOT_WELL, Health, word
from llumsched.cms.view import Instance
from llumsched.scheduling.load import Context, InferType, Load
from llumsched.scheduling.metrics import Metric


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

    def refuse(self, load: Load, context: Context) -> str | None:
        """Why not, for people; None lets the instance pass."""
        ...


@runtime_checkable
class GroupFilter(Protocol):
    @property
    def name(self) -> str: ...

    def refuse_among(self, instances: Sequence[Instance], failed: AbstractSet[str]) -> Mapping[str, str]:
        """Why not, by instance id, for those that are refused. `failed` are ids that a filter with `marks_failed`
        refused."""
        ...


def filter_fault(value: object) -> str | None:
    """Why it is no `Filter` and no `GroupFilter` either; None if it is one."""
    if isinstance(value, Filter | GroupFilter):
        return None
    group = hasattr(value, "refuse_among")
    wanted = ("name", "refuse_among") if group else ("name", "skip_in_fallback", "marks_failed", "refuse")
    return f"is no filter, as it lacks {', '.join(name for name in wanted if not hasattr(value, name))}"


def serves(instance: Instance, model: str) -> bool:
    """By the names of its API server; by the engine's model if there is none."""
    metadata = instance.metadata
    return not model or model in (metadata.served_models or (metadata.model,))


def capacity_tokens(load: Load) -> int | None:
    """The longest prompt that leaves room for one token of output; None when nothing is known of it."""
    metadata, status = load.instance.metadata, load.status
    limits = (metadata.max_model_len, status.num_total_gpu_tokens)
    return min((limit - 1 for limit in limits if limit > 0), default=None)


def infer_type(instance: Instance) -> str:
    return instance.metadata.instance_type or InferType.NEUTRAL


@dataclass(frozen=True, slots=True)
class ModelFilter:
    """Refuses who does not serve the request's model."""

    name: ClassVar[str] = "modelFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        model = context.request.model
        return None if serves(load.instance, model) else f"does not serve {model!r}"


@dataclass(frozen=True, slots=True)
class InferTypeFilter:
    """Refuses who is there for something else."""

    infer_type: InferType
    name: ClassVar[str] = "inferTypeFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        found = infer_type(load.instance)
        return None if found == self.infer_type else f"is {found}, not {self.infer_type}"


@dataclass(frozen=True, slots=True)
class CapacityFilter:
    """Refuses who could not hold the prompt if it were empty."""

    name: ClassVar[str] = "capacityFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        tokens, capacity = context.request.prompt_num_tokens, capacity_tokens(load)
        if capacity is None or tokens <= capacity:
            return None
        return f"a prompt of {tokens} tokens does not fit: {capacity} at most"


@dataclass(frozen=True, slots=True)
class RetryFilter:
    """Refuses who had this request and failed it, unless nobody else is left."""

    name: ClassVar[str] = "retryFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        return "had this request before" if load.instance.id in context.request.avoid else None


@dataclass(frozen=True, slots=True)
class BreakerFilter:
    """Refuses whom gateways complain of (`complaints`), unless nobody else is left."""

    name: ClassVar[str] = "breakerFilter"
    skip_in_fallback: ClassVar[bool] = True
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        return context.complaints.get(load.instance.id)


@dataclass(frozen=True, slots=True)
class SchedulabilityFilter:
    """Refuses who says that it takes nothing, hangs, or has not said anything yet."""

    name: ClassVar[str] = "schedulabilityFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = True

    def refuse(self, load: Load, context: Context) -> str | None:
        return unschedulable(load.instance)


def unschedulable(instance: Instance) -> str | None:
    """Why nothing may be sent to an instance, of what it says itself."""
    status = instance.status
    if status is None:
        return "has not reported its status yet"
    if status.health in NOT_WELL:
        doing = f"has been busy with {status.busy_with}" if status.busy_with else "has not moved"
        return f"{word(Health, status.health)}: its loop {doing} for {status.loop_age_ms / 1e3:.1f} s"
    return None if status.schedulable else "takes no new requests"


@dataclass(frozen=True, slots=True)
class StalenessFilter:
    """Refuses who has not reported for longer than this."""

    seconds: float
    name: ClassVar[str] = "stalenessFilter"
    skip_in_fallback: ClassVar[bool] = False
    marks_failed: ClassVar[bool] = True

    def refuse(self, load: Load, context: Context) -> str | None:
        age_s = load.instance.age_s(context.now_s)
        return f"last status {age_s:.1f} s ago" if age_s > self.seconds else None


@dataclass(frozen=True, slots=True)
class MetricBasedFilter:
    """Refuses whose value is not better than the threshold: one that is equal to it is refused."""

    metric: Metric
    threshold: float
    skip_in_fallback: bool = True
    name: ClassVar[str] = "metricBasedFilter"
    marks_failed: ClassVar[bool] = False

    def refuse(self, load: Load, context: Context) -> str | None:
        value = self.metric.value(load, context)
        if self.metric.better(value, self.threshold):
            return None
        side = "below" if self.metric.less_is_better else "above"
        return f"{self.metric.name} is {value:g}, not {side} {self.threshold:g}"


class FailoverDomain(StrEnum):
    """What fails together."""

    INSTANCE = "instance"
    NODE = "node"
    INSTANCE_UNIT = "instance-unit"
    NODE_UNIT = "node-unit"


def failover_set(instances: Sequence[Instance], failed: AbstractSet[str], domain: FailoverDomain) -> set[str]:
    """The ids of those that fail together with `failed`, itself included: what cannot be told apart from a neighbour
    (no node, no unit) is its own domain. A unit has more than one member only with data parallelism, so that engines
    without it never fail each other, whatever their `unit_id`."""
    together = {instance.id for instance in instances if instance.id in failed}
    if domain in (FailoverDomain.NODE, FailoverDomain.NODE_UNIT):
        together = _with_neighbours(instances, together, lambda instance: instance.metadata.node_id)
    if domain in (FailoverDomain.INSTANCE_UNIT, FailoverDomain.NODE_UNIT):
        together = _with_neighbours(instances, together, unit)
    return together


def unit(instance: Instance) -> str:
    """Of the ranks of one engine; empty without data parallelism."""
    return instance.metadata.unit_id if instance.metadata.data_parallel_size > 1 else ""


def _with_neighbours(
    instances: Sequence[Instance], ids: AbstractSet[str], place: Callable[[Instance], str]
) -> set[str]:
    places = {place(instance) for instance in instances if instance.id in ids} - {""}
    return {*ids, *(instance.id for instance in instances if place(instance) in places)}


def refused_among(
    group: GroupFilter, instances: Sequence[Instance], failed: AbstractSet[str], lost: Sequence[Instance]
) -> Mapping[str, str]:
    """By the group filter, for which an instance that is lost has failed."""
    if lost:
        instances, failed = [*instances, *lost], failed | {instance.id for instance in lost}
    return group.refuse_among(instances, failed)


@dataclass(frozen=True, slots=True)
class FailoverFilter:
    """Refuses who shares its domain with a failed instance."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverFilter"

    def refuse_among(self, instances: Sequence[Instance], failed: AbstractSet[str]) -> Mapping[str, str]:
        reason = f"shares its {self.domain} with a failed instance"
        together = failover_set(instances, failed, self.domain)
        return {id: "failed itself" if id in failed else reason for id in together}


@dataclass(frozen=True, slots=True)
class FailoverMigrationSrcFilter:
    """Refuses who does not share its domain with a failed instance."""

    domain: FailoverDomain
    name: ClassVar[str] = "failoverMigrationSrcFilter"

    def refuse_among(self, instances: Sequence[Instance], failed: AbstractSet[str]) -> Mapping[str, str]:
        together = failover_set(instances, failed, self.domain)
        return {i.id: f"shares its {self.domain} with no failed instance" for i in instances if i.id not in together}


@dataclass(frozen=True, slots=True)
class Refusal:
    filter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Filtered:
    survivors: tuple[Load, ...]
    refusals: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)
    """By instance id, in the order of the filters."""
    failed: frozenset[str] = frozenset()


def apply(
    filters: Iterable[Filter | GroupFilter], loads: Sequence[Load], context: Context, *, fallback: bool = False
) -> Filtered:
    """All filters on all instances, none cut short: a refused instance may be refused for several reasons, and one
    that failed counts as failed even if another filter refused it first. Group filters come after all others."""
    singles, groups = split(filters, fallback=fallback)
    refusals: dict[str, list[Refusal]] = {}
    failed: set[str] = set()
    for load in loads:
        for single in singles:
            reason = single.refuse(load, context)
            if reason is not None:
                refusals.setdefault(load.instance.id, []).append(Refusal(single.name, reason))
                if single.marks_failed and load.instance.status is not None:
                    failed.add(load.instance.id)
    instances = [load.instance for load in loads]
    for group in groups:
        for instance_id, reason in group.refuse_among(instances, failed).items():
            refusals.setdefault(instance_id, []).append(Refusal(group.name, reason))
    survivors = tuple(load for load in loads if load.instance.id not in refusals)
    return Filtered(survivors, {key: tuple(value) for key, value in refusals.items()}, frozenset(failed))


def split(filters: Iterable[Filter | GroupFilter], *, fallback: bool = False) -> tuple[list[Filter], list[GroupFilter]]:
    """Filters of one instance that count in this pass, and those of groups."""
    every = list(filters)
    singles = [one for one in every if isinstance(one, Filter) and not (fallback and one.skip_in_fallback)]
    return singles, [one for one in every if isinstance(one, GroupFilter)]
