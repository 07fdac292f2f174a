# SPDX-License-Identifier: Apache-2.0
"""The refusals of filters in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llumsched.policy.candidates import Candidates
from llumsched.policy.filters import Filter, GroupFilter
from llumsched.policy.pipeline import Screening


@dataclass(frozen=True, slots=True)
class Refusal:
    """An instance refused by a filter."""

    filter: str
    reason: str
    soft: bool
    """True if it counts only while another instance is left."""


def refusals(screening: Screening, candidates: Candidates, row: int) -> list[Refusal]:
    """Refusals of one row. The candidates must be unchanged since they were screened."""
    return [_refusal(one, screening, candidates, row) for one, mask in screening.refused if mask[row]]


def _refusal(one: Filter | GroupFilter, screening: Screening, candidates: Candidates, row: int) -> Refusal:
    if isinstance(one, GroupFilter):
        return Refusal(one.name, one.reason_among(candidates, screening.failed, row), soft=False)
    return Refusal(one.name, one.reason(candidates, row), one.skip_in_fallback)


def json_number(value: float) -> float | str:
    """A number for JSON, which has no infinity."""
    return round(float(value), 6) if math.isfinite(value) else str(float(value))
