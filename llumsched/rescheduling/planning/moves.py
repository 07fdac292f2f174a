# SPDX-License-Identifier: Apache-2.0
"""What the planner decides: from where to where, which requests, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from llumlet.protocol.move.selection import Order, Unit, value_fault

AS_NEEDED: Final = 0.0
"""Value of a balancing policy's selection: as much as evens out the two instances. Never sent to a llumlet."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests of the source. The source chooses them: only it knows its queues."""

    unit: Unit
    order: Order
    value: float

    def __str__(self) -> str:
        return f"{self.unit} {self.order} {self.value:g}"


def selection_fault(selection: Selection) -> str:
    """What is wrong with the value, as the end of a sentence that names it; empty if nothing is."""
    if selection.value != AS_NEEDED:
        return value_fault(selection.unit, selection.value)
    if selection.order is Order.FCW:
        return "0 (as needed) counts tokens that run, and FCW takes what waits: give a number"
    return ""


class Purpose(StrEnum):
    BALANCE = "balance"
    """Evens out load: it is weighed, cools down, and never costs a prefill."""
    PACK = "pack"
    """Fills some instances up, so that others are in time, or empty: it cools down, and never costs a prefill."""
    FAILOVER = "failover"
    """Leads away from what fails, whatever it costs."""


@dataclass(frozen=True, slots=True)
class Move:
    """One call to one source. `gain` and `cost` are of the same unit, load² · seconds; both 0 for a failover, which
    is not weighed."""

    policy: str
    purpose: Purpose
    source: str
    destination: str
    selection: Selection
    expected_tokens: float
    """Prompt and output tokens that will change place, as far as the source's status tells."""
    expected_requests: float = 1.0
    gain: float = 0.0
    cost: float = 0.0
    limit_tokens: float | None = None
    """Limit above which it makes things worse: requests are then chosen here, by name, from the source's list."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "policy": self.policy,
            "source": self.source,
            "destination": self.destination,
            "rule": str(self.selection.unit),
            "order": str(self.selection.order),
            "value": self.selection.value,
            "expected_tokens": round(self.expected_tokens),
            "expected_requests": round(self.expected_requests, 3),
            "gain": self.gain,
            "cost": self.cost,
        }
