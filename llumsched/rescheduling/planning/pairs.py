# SPDX-License-Identifier: Apache-2.0
"""Selectors of rescheduling: which sources give to which destinations, and what.

Those of other packages come through the entry point group `llumnix.pair_selectors`: the entry point loads a callable
that is given the YAML's settings as keyword arguments (a `metric` as a `Metric`) and returns a `PairSelector`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from llumsched.cluster.columns import Mask, Rows, Values
from llumsched.policy.metrics import Metric
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import Purpose


@dataclass(frozen=True, slots=True)
class Ends:
    """Instances that a policy's filters let give and take, by row of the snapshot."""

    sources: Mask
    destinations: Mask

    def without(self, unfit: Unfit) -> Ends:
        return Ends(
            self.sources & ~_any_of(unfit.sources, self.sources),
            self.destinations & ~_any_of(unfit.destinations, self.destinations),
        )


Reasons = Sequence[tuple[str, Mask]]
"""What is said of instances, and of which."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Instances that cannot give or take whatever the filters say."""

    sources: Reasons
    destinations: Reasons


def _any_of(reasons: Reasons, like: Mask) -> Mask:
    found = np.zeros_like(like)
    for _, mask in reasons:
        found |= mask
    return found


def sorted_rows(keys: Values, among: Mask) -> Rows:
    """The rows among these, the least key first; those alike by id."""
    rows = np.flatnonzero(among)
    return rows[np.argsort(keys[rows], kind="stable")]


@runtime_checkable
class PairSelector(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def purpose(self) -> Purpose: ...

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        """Adds moves of `policy` to the draft, by `Draft.choose`, and says in `Draft.refused` what it did not choose
        and why. Returns how many instances could have been sources and destinations."""
        ...


@runtime_checkable
class ExplainedSelector(PairSelector, Protocol):
    """A selector that says what it goes by, for people who ask."""

    @property
    def metric(self) -> Metric | None:
        """What it calls the load of an instance; None if it heeds none."""
        ...

    def unfit(self, draft: Draft) -> Unfit:
        """Those that it would not pair as things are in the draft, beside those that are left alone for a while."""
        ...


def pair_selector_fault(value: object) -> str | None:
    """Why a value is no `PairSelector`; None if it is one."""
    return None if isinstance(value, PairSelector) else "is no selector of pairs, as it lacks a name, a purpose or pair"
