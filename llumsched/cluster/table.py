# SPDX-License-Identifier: Apache-2.0
"""Candidates in arrays, kept current: what changes is one row, what a decision reads are columns.

A metric that depends only on an instance's load is computed when that load changes, by the pure function itself; so is
what the built-in filters compare. A decision then is a dozen operations on arrays, whatever the number of instances.
Metrics of the request, and filters of other packages, are asked for every instance at every decision.

It observes a view, after what keeps `in_flight`: an instance's counters are settled before its row is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from llumsched.cms.view import Instance
from llumsched.scheduling import filters as f
from llumsched.scheduling.in_flight import InFlight
from llumsched.scheduling.load import Context, Load
from llumsched.scheduling.metrics import Metric
from llumsched.scheduling.pipeline import Mask
from llumsched.scheduling.selectors import Order, Values

_FIRST_SIZE = 16


class Table:
    """Rows are dense: the last one takes the place of one that leaves."""

    def __init__(self, in_flight: InFlight, metrics: Collection[Metric]) -> None:
        self._in_flight = in_flight
        self._rows: dict[str, int] = {}
        self._instances: list[Instance] = []
        self._metrics = {metric.name: metric for metric in metrics if metric.of_request is None}
        self._columns: dict[str, Values] = {name: np.empty(_FIRST_SIZE) for name in self._metrics}
        self._received_s = np.empty(_FIRST_SIZE)
        self._capacity = np.empty(_FIRST_SIZE)
        self._unschedulable = np.empty(_FIRST_SIZE, np.bool_)
        self._reported = np.empty(_FIRST_SIZE, np.bool_)
        self._by_place: dict[object, tuple[Mask, Callable[[Instance], bool]]] = {}
        """Masks that change only with members and metadata, by what they are of, and what they say of an instance."""
        self._models: Counter[str] = Counter()
        """How many serve it."""
        self._order: Order | None = None
        self._groups: dict[f.GroupFilter, tuple[tuple[bytes, tuple[Instance, ...]], Mask]] = {}
        in_flight.on_change(self._account_changed)

    # From the view and the account

    def appeared(self, instance: Instance) -> None:
        row = len(self._instances)
        self._rows[instance.id] = row
        self._instances.append(instance)
        if row == len(self._received_s):
            self._resize(2 * row)
        self._models.update(_models_of(instance))
        self._members_changed()
        self._write(row)

    def changed(self, instance: Instance) -> None:
        row = self._rows[instance.id]
        known, self._instances[row] = self._instances[row], instance
        if known.metadata is not instance.metadata:
            self._metadata_changed(row, known)
        self._write(row)

    def left(self, instance: Instance) -> None:
        row = self._rows.pop(instance.id)
        self._serve_no_more(self._instances[row])
        last = self._instances.pop()
        self._members_changed()
        if row < len(self._instances):
            self._instances[row] = last
            self._rows[last.id] = row
            self._write(row)

    def _account_changed(self, instance_id: str) -> None:
        row = self._rows.get(instance_id)
        if row is not None:
            self._measure(row)

    # Candidates

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def order(self) -> Order:
        if self._order is None:
            ids = sorted(self._rows)
            rank = np.empty(len(ids), np.intp)
            rank[[self._rows[instance_id] for instance_id in ids]] = np.arange(len(ids))
            self._order = Order(ids, rank)
        return self._order

    @property
    def reported(self) -> Mask:
        return self._reported[: len(self)]

    def load(self, row: int) -> Load:
        instance = self._instances[row]
        return Load(instance, self._in_flight.of(instance.id))

    def values(self, metric: Metric, context: Context) -> Values:
        if self._metrics.get(metric.name) is metric:
            return self._columns[metric.name][: len(self)]
        return np.array([metric.value(self.load(row), context) for row in range(len(self))], np.float64)

    def refused(self, one: f.Filter, context: Context) -> Mask:
        size = len(self)
        match one:
            case f.SchedulabilityFilter():
                return self._unschedulable[:size]
            case f.StalenessFilter():
                return context.now_s - self._received_s[:size] > one.seconds
            case f.MetricBasedFilter():
                values = self.values(one.metric, context)
                return values >= one.threshold if one.metric.less_is_better else values <= one.threshold
            case f.CapacityFilter():
                return context.request.prompt_num_tokens > self._capacity[:size]
            case f.InferTypeFilter():
                return self._place(one.infer_type, lambda instance: f.infer_type(instance) != one.infer_type)
            case f.ModelFilter():
                return self._not_serving(context.request.model)
            case f.RetryFilter():
                return self._among(context.request.avoid)
            case f.BreakerFilter():
                return self._among(context.complaints)
        return np.array([one.refuse(self.load(row), context) is not None for row in range(size)], np.bool_)

    def refused_among(self, group: f.GroupFilter, failed: Mask, context: Context) -> Mask:
        lost = context.lost
        if isinstance(group, f.FailoverFilter) and not lost and not failed.any():
            return failed
        key = failed.tobytes(), lost
        known = self._groups.get(group)
        if known is not None and known[0] == key:
            return known[1]
        failed_ids = {self._instances[row].id for row in np.flatnonzero(failed)}
        mask = self._among(f.refused_among(group, self._instances, failed_ids, lost))
        if isinstance(group, f.FailoverFilter | f.FailoverMigrationSrcFilter):
            self._groups[group] = key, mask
        return mask

    # Rows

    def _write(self, row: int) -> None:
        instance = self._instances[row]
        self._received_s[row] = instance.received_s
        self._unschedulable[row] = f.unschedulable(instance) is not None
        self._reported[row] = instance.status is not None
        capacity = f.capacity_tokens(Load(instance))
        self._capacity[row] = np.inf if capacity is None else capacity
        self._measure(row)

    def _measure(self, row: int) -> None:
        load = self.load(row)
        for name, metric in self._metrics.items():
            self._columns[name][row] = metric.value(load)

    def _resize(self, size: int) -> None:
        flags = (self._unschedulable, self._reported)
        for column in (*self._columns.values(), self._received_s, self._capacity, *flags):
            column.resize(size, refcheck=False)

    # Masks of members and metadata

    def _members_changed(self) -> None:
        self._order = None
        self._by_place.clear()
        self._groups.clear()

    def _metadata_changed(self, row: int, before: Instance) -> None:
        instance = self._instances[row]
        self._models.update(_models_of(instance))
        self._serve_no_more(before)
        for key, (mask, refused) in self._by_place.items():
            # A decision may still hold the old one.
            mask = mask.copy()
            mask[row] = refused(instance)
            self._by_place[key] = mask, refused
        self._groups.clear()

    def _serve_no_more(self, instance: Instance) -> None:
        for model in _models_of(instance):
            self._models[model] -= 1
            if not self._models[model]:
                del self._models[model]
                self._by_place.pop(("model", model), None)

    def _place(self, key: object, refused: Callable[[Instance], bool]) -> Mask:
        if key not in self._by_place:
            self._by_place[key] = np.array([refused(instance) for instance in self._instances], np.bool_), refused
        return self._by_place[key][0]

    def _not_serving(self, model: str) -> Mask:
        if model and model not in self._models:  # and is not kept: clients make up names
            return np.ones(len(self), np.bool_)
        return self._place(("model", model), lambda instance: not f.serves(instance, model))

    def _among(self, ids: Collection[str]) -> Mask:
        mask = np.zeros(len(self), np.bool_)
        if not ids:
            return mask
        rows = [self._rows[instance_id] for instance_id in ids if instance_id in self._rows]
        mask[rows] = True
        return mask


def _models_of(instance: Instance) -> set[str]:
    metadata = instance.metadata
    return set(metadata.served_models) or {metadata.model}
