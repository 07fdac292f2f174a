# SPDX-License-Identifier: Apache-2.0
"""Orders of a rescheduler that is not the leader any more are refused.

Each leader has a term that is higher than those before it. One that stood still in the middle of a pass, and goes on
when another leads, would move requests by a view that is gone.
"""

from __future__ import annotations

from llumlet.errors import LlumletError
from llumlet.types import Reason


class Terms:
    """The highest term that one llumlet has seen."""

    def __init__(self) -> None:
        self._highest = 0

    def check(self, term: int) -> None:
        """Takes the term of an order; 0 is a person's, and always taken. Raises LlumletError (`not_leader`)."""
        if 0 < term < self._highest:
            raise LlumletError(Reason.NOT_LEADER, f"a rescheduler of term {self._highest} gives the orders, not {term}")
        self._highest = max(self._highest, term)
