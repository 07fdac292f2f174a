# SPDX-License-Identifier: Apache-2.0
"""Decides if an engine that lacks blocks for its next step waits for a move, or preempts.

A request that is moving out frees its blocks in a moment, where preempting another one would cost a prefill. Otherwise
a status asks for a move, if there is a reader of statuses. The engine waits no longer than that is worth:

    no move under way    ASK_SECONDS for one to begin, unless the last question was recently in vain
    a move under way     HOLD_SECONDS, from the beginning of the shortage
    after that           the engine preempts, and does not wait before all requests have blocks again
"""

from __future__ import annotations

from typing import Final

ASK_SECONDS: Final = 0.1
"""A report, a decision and a call take some milliseconds; until the engine's loop hears of it, a step has to end."""
HOLD_SECONDS: Final = 0.3
"""The longest gap that a shortage makes in a stream. To compute a victim again takes all others of its batch about as
long, and the victim itself many times that."""
UNHEARD_SECONDS: Final = 10.0
"""Time after an unanswered question for which the engine does not wait again."""


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
        """Decides if requests that lack blocks are left out of the next step. `moving`: a move will free blocks;
        `asks`: statuses have a reader."""
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
        """Notes that all requests have blocks for the next step."""
        if self.is_open and self._saw_move and num_preemptions == self._preemptions_before:
            self.num_averted += 1
        self.is_open = False
