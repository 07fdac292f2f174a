# SPDX-License-Identifier: Apache-2.0
"""A figure with its baseline, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Outcome:
    case: str
    figure: str
    baseline: float
    ours: float
    target: float | None = None
    """What `ours` is to be at most; None: nothing was said."""
    more: Mapping[str, float] = field(default_factory=dict)
    is_at_least: bool = False
    """Whether more is better, and the target the least."""

    @property
    def held(self) -> bool | None:
        if self.target is None:
            return None
        return self.ours >= self.target if self.is_at_least else self.ours <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": "objectives",
            "case": self.case,
            "figure": self.figure,
            "baseline": round(self.baseline, 4),
            "ours": round(self.ours, 4),
            "ratio": round(self.ours / self.baseline, 4) if self.baseline else math.nan,
            "target": None if self.target is None else round(self.target, 4),
            "held": self.held,
            **{name: round(value, 4) for name, value in self.more.items()},
        }


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("case", "figure", "baseline", "ours", "to reach", "held", "besides")
    for one in outcomes:
        besides = ", ".join(f"{name} {value:.4g}" for name, value in one.more.items())
        target = "" if one.target is None else f"{'≥' if one.is_at_least else '≤'} {one.target:.4g}"
        held = {None: "", True: "yes", False: "no"}[one.held]
        shown.add_row(one.case, one.figure, f"{one.baseline:.4g}", f"{one.ours:.4g}", target, held, besides)
    return shown
