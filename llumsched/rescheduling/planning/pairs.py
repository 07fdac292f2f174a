# SPDX-License-Identifier: Apache-2.0
"""Selectors of rescheduling, which pair sources with destinations.

Installed packages add some through the entry point group `llumnix.pair_selectors`: a callable that takes the YAML's
settings as keyword arguments (a `metric` as a `Metric`) and returns a `PairSelector`.
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
    """Possible sources and destinations after a policy's filters, by row of the snapshot."""

    sources: Mask
    destinations: Mask

    def without(self, unfit: Unfit) -> Ends:
        return Ends(
            self.sources & ~_any_of(unfit.sources, self.sources),
            self.destinations & ~_any_of(unfit.destinations, self.destinations),
        )


Reasons = Sequence[tuple[str, Mask]]
"""Reasons, and the instances to which they apply."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Instances that cannot give or take, whatever the filters say."""

    sources: Reasons
    destinations: Reasons


def _any_of(reasons: Reasons, like: Mask) -> Mask:
    found = np.zeros_like(like)
    for _, mask in reasons:
        found |= mask
    return found


def sorted_rows(keys: Values, among: Mask) -> Rows:
    """The masked rows by ascending key, then id."""
    rows = np.flatnonzero(among)
    return rows[np.argsort(keys[rows], kind="stable")]


@runtime_checkable
class PairSelector(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def purpose(self) -> Purpose: ...

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        """Adds moves of `policy` to the draft by `Draft.choose`, and counts refused pairs by reason in `Draft.refused`.
        Returns the numbers of possible sources and destinations."""
        ...


@runtime_checkable
class ExplainedSelector(PairSelector, Protocol):
    """A selector that explains itself."""

    @property
    def metric(self) -> Metric | None:
        """Its metric of load; None if it has none."""
        ...

    def unfit(self, draft: Draft) -> Unfit:
        """Instances that it would not pair in this draft, beside those that are avoided for a while."""
        ...


def pair_selector_fault(value: object) -> str | None:
    """The reason why a value is not a `PairSelector`; None if it is one."""
    return None if isinstance(value, PairSelector) else "is no selector of pairs, as it lacks a name, a purpose or pair"
