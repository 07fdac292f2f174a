# SPDX-License-Identifier: Apache-2.0
"""Whether the engine's loop gets on, judged from another thread.

The loop says when a step begins, what the model is given, and when it goes to sleep; a few attribute writes each. A
hang is told from a long step by what the step was expected to take:

    limit  = max(1.5 s, 8 x (usual step + tokens x usual seconds per token))
    OK       less than `limit` since the loop last moved, or asleep
    SUSPECT  more than that
    HUNG     3 s more
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_llumnix.migration.wire import Health

PATIENCE_SECONDS = 1.5
PATIENCE_FACTOR = 8.0
RESCUE_SECONDS = 3.0
FIRST_SECONDS_PER_TOKEN = 1e-3
"""Assumed until a prefill has been measured: slow for any machine that serves."""
PREFILL_TOKENS = 64
"""A step of fewer tokens says nothing of the time per token."""
MEMORY = 0.8
"""Weight of the past in the running means."""
SLOWER = 2.0
"""A step counts as at most so many times what was expected. One that stood still for a minute says nothing of the next;
a machine that has become slower says so with every step, and the limit follows by a fifth each time."""


class Progress:
    """Written by the loop thread, read by any other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved_at = clock()
        self._asleep = False
        self._tokens = 0
        self._step_seconds = 0.0
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN

    # Loop thread

    def step(self) -> None:
        """The loop begins a turn: whatever it was doing is done."""
        now = self._clock()
        if tokens := self._tokens:
            self._learn(tokens, min(now - self._moved_at, self._longest_believed))
            self._tokens = 0
        self._moved_at = now
        self._asleep = False

    def execute(self, num_tokens: int) -> None:
        """The model is given `num_tokens` tokens."""
        self._moved_at = self._clock()
        self._tokens = num_tokens

    def sleep(self) -> None:
        """There is no work; the next step comes when there is."""
        self._asleep = True

    def _learn(self, tokens: int, seconds: float) -> None:
        if tokens < PREFILL_TOKENS:
            self._step_seconds += (1 - MEMORY) * (seconds - self._step_seconds)
        else:
            self._seconds_per_token += (1 - MEMORY) * (seconds / tokens - self._seconds_per_token)

    @property
    def _longest_believed(self) -> float:
        """What a step counts as at most. Up to the second of these the limit is `PATIENCE_SECONDS` in any case."""
        return max(SLOWER * self._expected_seconds, PATIENCE_SECONDS / PATIENCE_FACTOR)

    # Any thread

    @property
    def _expected_seconds(self) -> float:
        return self._step_seconds + self._tokens * self._seconds_per_token

    @property
    def limit_seconds(self) -> float:
        """How long the loop may take before it is suspect."""
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * self._expected_seconds)

    @property
    def stalled_seconds(self) -> float:
        """Since the loop last moved; 0 while it sleeps."""
        return 0.0 if self._asleep else self._clock() - self._moved_at

    @property
    def health(self) -> Health:
        late = self.stalled_seconds - self.limit_seconds
        if late <= 0:
            return Health.OK
        return Health.SUSPECT if late <= RESCUE_SECONDS else Health.HUNG
