# SPDX-License-Identifier: Apache-2.0
"""Progress of the engine's loop, judged from another thread.

The loop says when a step begins, which batch the model is given and which it has returned, and when it goes to sleep; a
few attribute writes each. A hang is told from a long step by what the step was expected to take:

    limit  = max(1.5 s, 8 x (usual step + tokens x usual seconds per token)), of the largest batch in flight
    OK       less than `limit` since the loop last moved, or asleep
    SUSPECT  more than that
    HUNG     3 s more

What a call of the engine's utilities takes (loading an adapter, writing a profile, new weights) nobody can expect.
While one runs, the engine is busy with it, and it does not hang before `utility_seconds` are over. So it is while a
worker compiles a kernel within a step: no hang before it has stood still for `utility_seconds`, and when nothing is
compiled any more, the step has its limit once again.

Of the same notes is how long each step took as its requests see it (`returned`): to the end of a step from that of the
one before, what the scheduler and the loop did between them included; whether or not the two overlapped, as they do
under asynchronous scheduling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

from llumlet.protocol.wire import Health
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput

PATIENCE_SECONDS = 1.5
PATIENCE_FACTOR = 8.0
RESCUE_SECONDS = 3.0
FIRST_SECONDS_PER_TOKEN = 1e-3
"""Assumed until a prefill has been measured: slow for any machine that serves."""
PREFILL_TOKENS = 64
"""A step of fewer tokens says nothing of the time per token."""
COMPILING = "compiling a kernel"
MEMORY = 0.8
"""Weight of the past in the running means."""
SLOWER = 2.0
"""A step counts as at most so many times what was expected. One that stood still for a minute says nothing of the next;
a machine that has become slower says so with every step, and the limit follows by a fifth each time."""


@dataclasses.dataclass(eq=False, slots=True)
class _Batch:
    scheduled: SchedulerOutput
    """The batch, of which the address is the key: it must live as long."""
    tokens: int
    began: float
    disturbed: bool = False
    """The loop did something else meanwhile: how long the batch took is not known."""


class Progress:
    """Written by the loop thread, read by any other."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        utility_seconds: float = 300.0,
        compiled_at: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`compiled_at`: when a worker last compiled anything, by `clock`. Asked if a step takes too long."""
        self._clock = clock
        self._utility_seconds = utility_seconds
        self._compiled_at = compiled_at
        self._moved_at = clock()
        self._asleep = False
        self._busy_with = ""
        self._in_flight: dict[int, _Batch] = {}
        self._returned_at = 0.0
        """The time at which the model had done its last batch, and could begin the next."""
        self._in_a_row = False
        """Since then the loop has done nothing but prepare the next step."""
        self._turn_is_empty = False
        """The turn under way has given the model nothing, and waits for nothing of it."""
        self._tokens = 0
        """Tokens of the largest batch in flight."""
        self._step_seconds = 0.0
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN

    # Loop thread

    def step(self) -> None:
        """The loop begins a turn: whatever it was doing is done."""
        self._moved_at = self._clock()
        self._asleep = False
        if self._turn_is_empty:
            self._in_a_row = False
        self._turn_is_empty = not self._in_flight

    def execute(self, scheduled: SchedulerOutput, num_tokens: int) -> None:
        """The model is given a batch of `num_tokens` tokens: `scheduled`, as in `returned`.
        Others may be in flight; it gets to this one when they have returned."""
        now = self._moved_at = self._clock()
        self._turn_is_empty = False
        self._in_flight[id(scheduled)] = _Batch(scheduled, num_tokens, now)
        self._tokens = max(self._tokens, num_tokens)

    def returned(self, scheduled: SchedulerOutput) -> float | None:
        """The model has returned what it made of the batch. Seconds since it returned the batch before, if the loop
        went straight on; else since it was given this one. None if that says nothing of how long such a step takes."""
        now = self._moved_at = self._clock()
        batch = self._in_flight.pop(id(scheduled), None)
        if batch is None:
            return None
        step_seconds = None
        if batch.tokens and not batch.disturbed:
            seconds = now - max(batch.began, self._returned_at)
            self._learn(batch.tokens, min(seconds, self._longest_believed(batch.tokens)))
            step_seconds = now - self._returned_at if self._in_a_row else seconds
        self._returned_at = now
        self._in_a_row = batch.tokens > 0
        self._tokens = max((other.tokens for other in self._in_flight.values()), default=0)
        return step_seconds

    def sleep(self) -> None:
        """There is no work; the next step comes when there is."""
        self._asleep = True
        self._in_a_row = False

    @contextlib.contextmanager
    def busy(self, method: str) -> Iterator[None]:
        """The loop runs `method` of the engine, in no step and for as long as it takes."""
        self._moved_at = self._clock()
        self._asleep = False
        self._busy_with = method
        try:
            yield
        finally:
            self._busy_with = ""
            self._moved_at = self._clock()
            self._in_a_row = False
            for batch in self._in_flight.values():
                batch.disturbed = True

    def _learn(self, tokens: int, seconds: float) -> None:
        if tokens < PREFILL_TOKENS:
            self._step_seconds += (1 - MEMORY) * (seconds - self._step_seconds)
        else:
            self._seconds_per_token += (1 - MEMORY) * (seconds / tokens - self._seconds_per_token)

    def _longest_believed(self, tokens: int) -> float:
        """Longest duration that a step counts with. Up to the second of these the limit is `PATIENCE_SECONDS` in any
        case."""
        return max(SLOWER * self._expected_seconds(tokens), PATIENCE_SECONDS / PATIENCE_FACTOR)

    # Any thread

    def _expected_seconds(self, tokens: int) -> float:
        return self._step_seconds + tokens * self._seconds_per_token

    @property
    def limit_seconds(self) -> float:
        """Seconds that the loop may take before it is suspect."""
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * self._expected_seconds(self._tokens))

    @property
    def stalled_seconds(self) -> float:
        """Since the loop last moved; 0 while it sleeps."""
        return 0.0 if self._asleep else self._clock() - self._moved_at

    @property
    def busy_with(self) -> str:
        """The method of the engine that the loop runs, or that the model waits for a compiler; empty if neither."""
        if self._busy_with or self.stalled_seconds <= self.limit_seconds:
            return self._busy_with
        return COMPILING if self._clock() - self._compiled_at() <= self.limit_seconds else ""

    @property
    def health(self) -> Health:
        busy, stalled, limit = self._busy_with, self.stalled_seconds, self.limit_seconds
        if stalled <= limit:
            return Health.OK
        if not busy:
            # A compilation has no expected duration. When it ends, the step gets its full limit again.
            quiet, longest = self._clock() - self._compiled_at(), limit + RESCUE_SECONDS
            hung = min(stalled, quiet) > longest or (quiet < stalled and stalled > max(longest, self._utility_seconds))
        else:
            hung = stalled > self._utility_seconds
        return Health.HUNG if hung else Health.SUSPECT
