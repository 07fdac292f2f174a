# SPDX-License-Identifier: Apache-2.0
"""The columns of a cluster, and their types."""

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
"""A truth value for each row."""
Rows = NDArray[np.intp]
"""Numbers of rows."""


class UnknownColumn(KeyError):
    """Raised for an unknown column name."""

    def __str__(self) -> str:
        return f"no column is called {self.args[0]!r}"


@dataclass(frozen=True, slots=True)
class IdOrder:
    """The order of the instances by id: ties break by it."""

    sorted_ids: Sequence[str]
    rank: Rows
    """Positions in `sorted_ids`, by row."""


class Columns(Protocol):
    """Numbers by name: arrays of one length, or single numbers for all rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str) -> Values:
        """A column, read-only and valid until the instances change. Raises UnknownColumn."""
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
        """`number` columns of one provider, from `first` on, without a copy. Raises UnknownColumn."""
        ...

    def serving(self, model: str) -> Mask:
        """Rows of the instances that serve a model; all for ""."""
        ...


def base_model(instance: Instance) -> str:
    metadata = instance.metadata
    return (*metadata.served_models, metadata.model)[0]


def serves(instance: Instance, model: str) -> bool:
    """True if an instance serves a model under a name of its API server, or of the engine if there are none."""
    metadata = instance.metadata
    return not model or model in (metadata.served_models or (metadata.model,))
