# SPDX-License-Identifier: Apache-2.0
"""The one runner: metrics, filters, a second pass without the soft ones if nobody is left, the selector.

It works on `Candidates`: a list of loads, for a few instances and as the reference, or `table.Table`, which answers
the same with arrays that are kept current. What it did is in the `Decision`; `explain` tells people of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llumsched.scheduling.filters import Filter, GroupFilter, refused_among, split
from llumsched.scheduling.load import Context, InferType, Load
from llumsched.scheduling.metrics import Metric
from llumsched.scheduling.selectors import Draw, Order, Selector, Values

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Stage:
    """How a policy chooses an instance of one infer type."""

    infer_type: InferType
    metrics: tuple[Metric, ...]
    """What the selector compares; the first is the one that people mean by its load."""
    filters: tuple[Filter, ...]
    group_filters: tuple[GroupFilter, ...]
    selector: Selector


class Candidates(Protocol):
    """All instances, in rows."""

    def __len__(self) -> int: ...

    @property
    def order(self) -> Order: ...

    @property
    def reported(self) -> Mask:
        """By row, whether there is a status."""
        ...

    def load(self, row: int) -> Load: ...

    def refused(self, one: Filter, context: Context) -> Mask:
        """By row, whether the filter refuses."""
        ...

    def refused_among(self, group: GroupFilter, failed: Mask, context: Context) -> Mask: ...

    def values(self, metric: Metric, context: Context) -> Values: ...


@dataclass(frozen=True)
class Decision:
    """Of one run. The masks are of the rows that the candidates had then."""

    stage: Stage
    context: Context
    row: int | None
    """The chosen one."""
    fallback: bool
    """The filters that may be skipped were."""
    refused: Sequence[tuple[Filter | GroupFilter, Mask]]
    """By all filters, the skipped ones included, in their order."""
    failed: Mask


def run(stage: Stage, candidates: Candidates, context: Context, draw: Draw) -> Decision:
    """Choose one instance. Changes nothing."""
    size = len(candidates)
    hard, soft, failed = np.zeros(size, np.bool_), np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    refused: list[tuple[Filter | GroupFilter, Mask]] = []
    for one in stage.filters:
        mask = candidates.refused(one, context)
        refused.append((one, mask))
        if one.skip_in_fallback:
            soft |= mask
        else:
            hard |= mask
        if one.marks_failed:
            failed |= mask & candidates.reported
    for group in stage.group_filters:
        mask = candidates.refused_among(group, failed, context)
        refused.append((group, mask))
        hard |= mask
    rows = np.flatnonzero(~(hard | soft))
    fallback = not rows.size
    if fallback:
        rows = np.flatnonzero(~hard)
    row = None
    if rows.size:
        costs = [_costs(metric, candidates, context) for metric in stage.metrics]
        row = stage.selector.choose(rows, costs, candidates.order, draw)
    return Decision(stage, context, row, fallback, refused, failed)


def _costs(metric: Metric, candidates: Candidates, context: Context) -> Values:
    values = candidates.values(metric, context)
    return values if metric.less_is_better else -values


def make_stage(
    infer_type: InferType,
    metrics: Sequence[Metric],
    filters: Sequence[Filter | GroupFilter],
    selector: Selector,
) -> Stage:
    singles, groups = split(filters)
    return Stage(infer_type, tuple(metrics), tuple(singles), tuple(groups), selector)


class LoadList:
    """Candidates that ask the pure functions each time."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads
        ids = [load.instance.id for load in loads]
        in_order = sorted(ids)
        rank = {instance_id: position for position, instance_id in enumerate(in_order)}
        self.order = Order(in_order, np.array([rank[instance_id] for instance_id in ids], np.intp))
        self.reported = np.array([load.instance.status is not None for load in loads], np.bool_)

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, row: int) -> Load:
        return self._loads[row]

    def refused(self, one: Filter, context: Context) -> Mask:
        return np.array([one.refuse(load, context) is not None for load in self._loads], np.bool_)

    def refused_among(self, group: GroupFilter, failed: Mask, context: Context) -> Mask:
        failed_ids = {load.instance.id for load, has_failed in zip(self._loads, failed, strict=True) if has_failed}
        among = refused_among(group, [load.instance for load in self._loads], failed_ids, context.lost)
        return np.array([load.instance.id in among for load in self._loads], np.bool_)

    def values(self, metric: Metric, context: Context) -> Values:
        return np.array([metric.value(load, context) for load in self._loads], np.float64)
