# SPDX-License-Identifier: Apache-2.0
"""What can be read of a cluster in columns, and the types of what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llumsched.cluster.instance import Instance

Values = NDArray[np.float64]
"""A number for each row."""
Matrix = NDArray[np.float64]
"""Columns, one below the other."""
Mask = NDArray[np.bool_]
"""A truth for each row."""
Rows = NDArray[np.intp]
"""Numbers of rows."""


class UnknownColumn(KeyError):
    """There is no column of this name."""

    def __str__(self) -> str:
        return f"no column is called {self.args[0]!r}"


@dataclass(frozen=True, slots=True)
class IdOrder:
    """The order of the instances by id: ties break by it."""

    sorted_ids: Sequence[str]
    rank: Rows
    """Positions in `sorted_ids`, by row."""


class Columns(Protocol):
    """Numbers by name: arrays of one length, or single numbers that hold for all rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str) -> Values:
        """A column, not to be written to, and void when the instances change. Raises UnknownColumn."""
        ...


class Cluster(Columns, Protocol):
    """All instances, in rows."""

    @property
    def instances(self) -> Sequence[Instance]:
        """The instances by row."""
        ...

    @property
    def index(self) -> Mapping[str, int]:
        """Rows by the id of the instance."""
        ...

    @property
    def order(self) -> IdOrder: ...

    def consecutive(self, first: str, number: int) -> Matrix:
        """So many columns of one provider, from the `first` on, without a copy. Raises UnknownColumn."""
        ...

    def serving(self, model: str) -> Mask:
        """Rows of the instances that serve a model; all of them for an empty name."""
        ...


def base_model(instance: Instance) -> str:
    metadata = instance.metadata
    return (*metadata.served_models, metadata.model)[0]


def serves(instance: Instance, model: str) -> bool:
    """Whether an instance serves a model, by the names of its API server; by the engine's model if there are none."""
    metadata = instance.metadata
    return not model or model in (metadata.served_models or (metadata.model,))
