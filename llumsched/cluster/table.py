# SPDX-License-Identifier: Apache-2.0
"""The cluster in columns: a change updates one row, and a decision reads arrays.

It observes a view after its providers, which must know an instance before its row is written.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llumsched.cluster.columns import IdOrder, Mask, Matrix, UnknownColumn, Values, base_model, serves
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers import Provider
from llumsched.cluster.providers.metadata import MetadataColumns
from llumsched.cluster.providers.status import StatusColumns
from llumsched.cluster.snapshot import Snapshot

_FIRST_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Owner:
    provider: Provider
    columns: slice


class Table:
    """A `Cluster` with dense rows: the last one replaces one that leaves."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        """Raises ValueError if two own columns of one name."""
        self.instances: list[Instance] = []
        self.index: dict[str, int] = {}
        self._owners = list(_owners(providers))
        self._names = _positions(providers)
        self._numbers = np.zeros((len(self._names), _FIRST_SIZE))
        """Numbers by column, then row, so that a column is contiguous."""
        self._models: Counter[str] = Counter()
        """Number of instances that serve each model."""
        self._serving: dict[str, Mask] = {}
        self._reported: dict[int, Instance] = {}
        """Rows with a newer status than they show, and the shown one. They are updated when a column is read, as
        statuses come more often than decisions."""
        self._order: IdOrder | None = None
        self._base_models: frozenset[str] | None = None
        self.on_unserved: Callable[[str], None] = lambda model: None
        """Called for each model that no instance serves any more."""
        self.after = tuple(providers)
        """Providers, which hear of a change before the row is written."""
        for owner in self._owners:
            owner.provider.on_change(functools.partial(self._rewrite, owner))

    # From the view

    def appeared(self, instance: Instance) -> None:
        self._catch_up()
        row = len(self.instances)
        self.index[instance.id] = row
        self.instances.append(instance)
        if row == self._numbers.shape[1]:
            self._numbers = np.pad(self._numbers, ((0, 0), (0, row)))
        self._models.update(_models_of(instance))
        self._members_changed()
        self._write(row, None)

    def changed(self, instance: Instance) -> None:
        row = self.index[instance.id]
        before, self.instances[row] = self.instances[row], instance
        if before.metadata is instance.metadata:
            self._reported.setdefault(row, before)
            return
        self._catch_up()
        self._models_changed(row, before)
        self._write(row, before)

    def left(self, instance: Instance) -> None:
        self._catch_up()
        row = self.index.pop(instance.id)
        self._serves_no_more(self.instances[row])
        last = self.instances.pop()
        if row < len(self.instances):
            self.instances[row] = last
            self.index[last.id] = row
            self._numbers[:, row] = self._numbers[:, len(self.instances)]
        self._members_changed()

    # As a `Cluster`

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, name: str) -> Values:
        position = self._names.get(name)
        if position is None:
            raise UnknownColumn(name)
        if self._reported:
            self._catch_up()
        return self._numbers[position, : len(self.instances)]

    def consecutive(self, first: str, number: int) -> Matrix:
        position = self._names.get(first)
        if position is None:
            raise UnknownColumn(first)
        self._catch_up()
        return self._numbers[position : position + number, : len(self.instances)]

    @property
    def columns(self) -> Sequence[str]:
        return list(self._names)

    @property
    def order(self) -> IdOrder:
        if self._order is None:
            ids = sorted(self.index)
            rank = np.empty(len(ids), np.intp)
            rank[[self.index[instance_id] for instance_id in ids]] = np.arange(len(ids))
            self._order = IdOrder(ids, rank)
        return self._order

    @property
    def base_models(self) -> frozenset[str]:
        """The first name that each instance serves: its model's. Adapters come after it."""
        if self._base_models is None:
            self._base_models = frozenset(map(base_model, self.instances))
        return self._base_models

    def serving(self, model: str) -> Mask:
        if model and model not in self._models:  # and is not kept: clients make up names
            return np.zeros(len(self), np.bool_)
        if model not in self._serving:
            self._serving[model] = np.array([serves(instance, model) for instance in self.instances], np.bool_)
        return self._serving[model]

    def snapshot(self, lost: Sequence[Instance] = ()) -> Snapshot:
        """A copy, by id, of the instances that have reported and of the `lost` ones in their last state."""
        by_id = np.argsort(self.order.rank)
        rows = by_id[self["reported"][by_id] > 0]
        known = Snapshot(self._names, [self.instances[row] for row in rows], self._numbers[:, rows])
        gone = [instance for instance in lost if instance.status is not None and instance.id not in self.index]
        return known.with_lost(self.measured(gone)) if gone else known

    def measured(self, instances: Sequence[Instance]) -> Snapshot:
        """Columns of instances that are not in the table."""
        numbers = np.zeros((len(self._names), len(instances)))
        for row, instance in enumerate(instances):
            for owner in self._owners:
                numbers[owner.columns, row] = owner.provider.row(instance, None)
        return Snapshot(self._names, instances, numbers)

    # Rows

    def _catch_up(self) -> None:
        """Writes the numbers of all newer statuses."""
        if not self._reported:
            return
        shown, self._reported = self._reported, {}
        for owner in self._owners:
            provider = owner.provider
            numbers = {
                row: found
                for row, before in shown.items()
                if (found := provider.row(self.instances[row], before)) is not None
            }
            if numbers:
                self._numbers[owner.columns, list(numbers)] = np.array(list(numbers.values()), np.float64).T

    def _write(self, row: int, before: Instance | None) -> None:
        for owner in self._owners:
            numbers = owner.provider.row(self.instances[row], before)
            if numbers is not None:
                self._numbers[owner.columns, row] = numbers

    def _rewrite(self, owner: _Owner, instance_id: str) -> None:
        row = self.index.get(instance_id)
        if row is not None:
            self._numbers[owner.columns, row] = owner.provider.row(self.instances[row], None)

    # Masks of members and metadata

    def _members_changed(self) -> None:
        self._order = self._base_models = None
        self._serving.clear()

    def _models_changed(self, row: int, before: Instance) -> None:
        instance = self.instances[row]
        self._base_models = None
        self._models.update(_models_of(instance))
        self._serves_no_more(before)
        for model, mask in self._serving.items():
            # A decision may still hold the old one.
            mask = mask.copy()
            mask[row] = serves(instance, model)
            self._serving[model] = mask

    def _serves_no_more(self, instance: Instance) -> None:
        for model in _models_of(instance):
            self._models[model] -= 1
            if not self._models[model]:
                del self._models[model]
                self._serving.pop(model, None)
                self.on_unserved(model)


def standard_table(in_flight: Provider, *others: Provider) -> Table:
    """A table of statuses, metadata, sent requests and the columns of `others`."""
    return Table([StatusColumns(), MetadataColumns(), in_flight, *others])


def _owners(providers: Sequence[Provider]) -> Iterator[_Owner]:
    begin = 0
    for provider in providers:
        end = begin + len(provider.columns)
        yield _Owner(provider, slice(begin, end))
        begin = end


def _positions(providers: Sequence[Provider]) -> dict[str, int]:
    names = [name for provider in providers for name in provider.columns]
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise ValueError(f"columns of two providers: {', '.join(twice)}")
    return {name: position for position, name in enumerate(names)}


def _models_of(instance: Instance) -> set[str]:
    metadata = instance.metadata
    return set(metadata.served_models) or {metadata.model}
