# SPDX-License-Identifier: Apache-2.0
"""Moves: source, destination, the requests, and the expected effect."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from llumlet.protocol.move.selection import Order, Unit, value_fault

AS_NEEDED: Final = 0.0
"""Value of a balancing selection: as much as balances the pair. Never sent to a llumlet."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A rule by which the source chooses requests from its queues."""

    unit: Unit
    order: Order
    value: float

    def __str__(self) -> str:
        return f"{self.unit} {self.order} {self.value:g}"


def selection_fault(selection: Selection) -> str:
    """The fault of the value, to follow its name; "" if there is none."""
    if selection.value != AS_NEEDED:
        return value_fault(selection.unit, selection.value)
    if selection.order is Order.FCW:
        return "0 (as needed) counts tokens that run, and FCW takes what waits: give a number"
    return ""


class Purpose(StrEnum):
    BALANCE = "balance"
    """Balances load: weighed, with cool-down, and never at the cost of a prefill."""
    PACK = "pack"
    """Packs some instances, so that others are in time or empty: with cool-down, and never at the cost of a prefill."""
    FAILOVER = "failover"
    """Leads away from failures, at any cost."""


@dataclass(frozen=True, slots=True)
class Move:
    """A call to a source. `gain` and `cost` are in load² · seconds; both 0 for a failover, which is not weighed."""

    policy: str
    purpose: Purpose
    source: str
    destination: str
    selection: Selection
    expected_tokens: float
    """Prompt and output tokens to be moved, by the source's status."""
    expected_requests: float = 1.0
    gain: float = 0.0
    cost: float = 0.0
    limit_tokens: float | None = None
    """Tokens above which the move does harm: requests are then chosen here, by name, from the source's list."""

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
