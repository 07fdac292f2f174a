# SPDX-License-Identifier: Apache-2.0
"""The cluster at one moment, for a pass of the rescheduler or a scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llumsched.cluster.columns import IdOrder, Mask, Matrix, UnknownColumn, Values, serves
from llumsched.cluster.instance import Instance


class Snapshot:
    """A `Cluster` that does not change. Rows are in the order of ids, so that a stable sort breaks ties by id."""

    def __init__(self, names: Mapping[str, int], instances: Sequence[Instance], numbers: Matrix) -> None:
        """`numbers` by column and row; `names` gives the index of each column."""
        self.instances = instances
        self.ids = [instance.id for instance in instances]
        self.index = {instance_id: row for row, instance_id in enumerate(self.ids)}
        self._names, self._numbers = names, numbers

    def copy(self) -> Snapshot:
        return Snapshot(self._names, self.instances, self._numbers.copy())

    def with_lost(self, lost: Snapshot) -> Snapshot:
        """A snapshot that also has recently lost instances in their last state."""
        lost["lost"][:] = 1
        instances = [*self.instances, *lost.instances]
        rows = sorted(range(len(instances)), key=lambda row: instances[row].id)
        numbers = np.hstack([self._numbers, lost._numbers])[:, rows]
        return Snapshot(self._names, [instances[row] for row in rows], numbers)

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, name: str) -> Values:
        position = self._names.get(name)
        if position is None:
            raise UnknownColumn(name)
        column: Values = self._numbers[position]
        return column

    def consecutive(self, first: str, number: int) -> Matrix:
        position = self._names.get(first)
        if position is None:
            raise UnknownColumn(first)
        return self._numbers[position : position + number]

    @property
    def order(self) -> IdOrder:
        return IdOrder(self.ids, np.arange(len(self)))

    def serving(self, model: str) -> Mask:
        return np.array([serves(instance, model) for instance in self.instances], np.bool_)

    def add(self, row: int, weight: Mapping[str, float]) -> None:
        """Adds `weight`, by column, to an instance, not below 0."""
        for name, number in weight.items():
            column = self[name]
            column[row] = max(column[row] + number, 0.0)
