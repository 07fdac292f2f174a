# SPDX-License-Identifier: Apache-2.0
"""Runs a policy: filters, a second pass without the soft ones if no instance is left, metrics, selector.

A `Decision` records the run; `dispatch.explain` puts it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.columns import Mask, Rows, Values
from llumsched.policy import raised
from llumsched.policy.candidates import Candidates
from llumsched.policy.filters import Filter, GroupFilter
from llumsched.policy.metrics import Metric
from llumsched.policy.selectors import Draw, RandomSelector, Selector


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of single instances and of groups, each in their order."""

    singles: tuple[Filter, ...] = ()
    groups: tuple[GroupFilter, ...] = ()

    @classmethod
    def of(cls, filters: Iterable[Filter | GroupFilter]) -> Filters:
        every = list(filters)
        groups = tuple(one for one in every if isinstance(one, GroupFilter))
        return cls(tuple(one for one in every if isinstance(one, Filter)), groups)

    def __iter__(self) -> Iterator[Filter | GroupFilter]:
        yield from self.singles
        yield from self.groups


@dataclass(frozen=True, slots=True)
class Stage:
    """A policy's choice of an instance of one infer type."""

    infer_type: InferType
    metrics: tuple[Metric, ...]
    """The selector's metrics; the first is the one that people call load."""
    filters: Filters
    selector: Selector


@dataclass(frozen=True, slots=True)
class Screening:
    """Refusals by filter. Masks have the rows of the candidates at the time."""

    refused: Sequence[tuple[Filter | GroupFilter, Mask]]
    """Refusals by all filters, those of single instances first, otherwise in order."""
    failed: Mask
    hard: Mask
    """Rows refused by a filter that always counts."""
    soft: Mask
    """Rows refused by a filter that counts only while another instance is left."""

    @property
    def passed(self) -> Mask:
        return ~(self.hard | self.soft)


def screen(filters: Filters, candidates: Candidates, failed: Mask | None = None) -> Screening:
    """Runs all filters over all candidates, so that all reasons are known and failed instances count as such whatever
    refused them first. Group filters come last. `failed`: rows that have failed in any case."""
    hard, soft = (np.zeros(len(candidates), np.bool_) for _ in range(2))
    failed = np.zeros(len(candidates), np.bool_) if failed is None else failed.copy()
    refused: list[tuple[Filter | GroupFilter, Mask]] = []
    for one in filters.singles:
        mask = _mask(one, partial(one.refuse, candidates), len(candidates))
        refused.append((one, mask))
        if one.skip_in_fallback:
            soft |= mask
        else:
            hard |= mask
        if one.marks_failed:
            failed |= mask & candidates.reported
    for group in filters.groups:
        mask = _mask(group, partial(group.refuse_among, candidates, failed), len(candidates))
        refused.append((group, mask))
        hard |= mask
    return Screening(refused, failed, hard, soft)


def checked(mask: Mask, number: int) -> Mask:
    """A filter's answer for `number` rows. Raises TypeError if it is not a mask."""
    if not number:
        return np.zeros(0, np.bool_)
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"its mask is of {mask.dtype}, not of truths")
    return mask if mask.shape == (number,) else np.broadcast_to(mask, number)


def _mask(one: Filter | GroupFilter, refuse: Callable[[], Mask], number: int) -> Mask:
    """The rows that a filter refuses. A filter that raises, or whose answer is invalid, refuses none."""
    try:
        return checked(refuse(), number)
    except Exception as error:  # noqa: BLE001 - whatever a foreign filter raises
        raised.note(f"Filter {one.name}", "refuses nobody", error)
        return np.zeros(number, np.bool_)


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one run."""

    stage: Stage
    candidates: Candidates
    screening: Screening
    row: int | None
    """The chosen row."""
    fallback: bool
    """True if the soft filters were skipped."""


def run(stage: Stage, candidates: Candidates, draw: Draw) -> Decision:
    """Chooses one instance. Changes nothing."""
    screening = screen(stage.filters, candidates)
    rows = np.flatnonzero(screening.passed)
    fallback = not rows.size
    if fallback:
        rows = np.flatnonzero(~screening.hard)
    row = None
    if rows.size:
        costs = {
            metric.name: candidates.values(metric) if metric.less_is_better else -candidates.values(metric)
            for metric in stage.metrics
        }
        row = _chosen(stage.selector, rows, costs, candidates, draw)
    return Decision(stage, candidates, screening, row, fallback)


def _chosen(selector: Selector, rows: Rows, costs: Mapping[str, Values], candidates: Candidates, draw: Draw) -> int:
    """The row that a selector chooses; any row if it raises or chooses an invalid one."""
    try:
        row = selector.choose(rows, costs, candidates.cluster.order, draw)
        if row in rows:
            return row
        raise ValueError(f"it chose row {row}, which was refused")
    except Exception as error:  # noqa: BLE001 - whatever a foreign selector raises
        raised.note(f"Selector {selector.name}", "anybody is chosen", error)
        return RandomSelector().choose(rows, costs, candidates.cluster.order, draw)
