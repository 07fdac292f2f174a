# SPDX-License-Identifier: Apache-2.0
"""What the planner decides: from where to where, which requests, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llumlet.protocol.selection import Order, Unit

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


@dataclass(frozen=True, slots=True)
class Move:
    """One call to one source. `gain` and `cost` are of the same unit, load² · seconds; both 0 for a failover, which
    is not weighed."""

    policy: str
    source: str
    destination: str
    selection: Selection
    expected_tokens: float
    """Prompt and output tokens that will change place, as far as the source's status tells."""
    expected_requests: float = 1.0
    gain: float = 0.0
    cost: float = 0.0
    limit_tokens: float | None = None
    """More than this would make it worse: the requests are then chosen here, by name, from the source's list."""

    @property
    def is_failover(self) -> bool:
        return self.policy.endswith("_failover")
