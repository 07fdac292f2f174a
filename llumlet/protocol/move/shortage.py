# SPDX-License-Identifier: Apache-2.0
"""Whether an engine that lacks blocks for its next step waits for a move, or preempts.

Where a request is on its way out, its blocks come free in a moment; to preempt another one for them would cost a
prefill. Where none is, a status asks for one, if anybody reads statuses, and somebody may answer. Neither is waited for
longer than it is worth:

    no move under way    ASK_SECONDS for one to begin, if the last question was not in vain lately
    a move under way     HOLD_SECONDS, from the beginning of the shortage
    after that           the engine preempts, and waits for nothing until there are blocks for everybody again
"""

from __future__ import annotations

from typing import Final

ASK_SECONDS: Final = 0.1
"""A report, a decision and a call take some milliseconds; until the engine's loop hears of it, a step has to end."""
HOLD_SECONDS: Final = 0.3
"""The longest gap that a shortage makes in a stream. To compute a victim again takes all others of its batch about as
long, and the victim itself many times that."""
UNHEARD_SECONDS: Final = 10.0
"""How long after a question that nobody answered none is waited for."""


class Shortages:
    """The shortages of one engine. Times in seconds, of one clock; `num_preemptions`: the engine's, since its start."""

    def __init__(self) -> None:
        self.num_averted = 0
        """Shortages that a move ended before anybody was preempted."""
        self.is_open = False
        """There is a shortage."""
        self._since_s = self._unheard_until_s = float("-inf")
        self._preemptions_before = 0
        self._saw_move = self._is_given_up = False

    def waits(self, now_s: float, num_preemptions: int, *, moving: bool, asks: bool) -> bool:
        """Blocks are lacking now, for the step to come: whether those that need them are to be left out of it.
        `moving`: blocks will be given back by a move; `asks`: somebody reads statuses."""
        if not self.is_open:
            self.is_open, self._since_s, self._preemptions_before = True, now_s, num_preemptions
            self._saw_move = self._is_given_up = False
        if self._is_given_up:
            return False
        waited_s = now_s - self._since_s
        if moving:
            self._saw_move = True
            self._is_given_up = waited_s >= HOLD_SECONDS
        elif self._saw_move or not asks or now_s < self._unheard_until_s:
            self._is_given_up = True
        elif waited_s >= ASK_SECONDS:
            self._is_given_up = True
            self._unheard_until_s = now_s + UNHEARD_SECONDS
        return not self._is_given_up

    def over(self, num_preemptions: int) -> None:
        """There are blocks for everybody in the step to come."""
        if self.is_open and self._saw_move and num_preemptions == self._preemptions_before:
            self.num_averted += 1
        self.is_open = False
