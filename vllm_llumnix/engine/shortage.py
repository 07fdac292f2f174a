# SPDX-License-Identifier: Apache-2.0
"""Blocks that the coming step lacks, and whether that is worth waiting for. Loop thread only, but for the counts.

vLLM preempts when a running request finds no block: the last of the batch loses its KV cache, and computes it again
later. Where a request is about to leave with its own, blocks come free within a few steps, at no such price. So those
that find none are left out of the step, as are frozen requests, and of vLLM's own step nothing else changes:

    no move under way    the status asks for one (`num_blocks`), if anybody reads it; ASK_SECONDS for it to begin
    a move under way     HOLD_SECONDS from the beginning of the shortage until its blocks are there
    neither, or too late vLLM preempts, as it always did

Nobody waits for anything: each step asks anew. Who is left out of a step keeps its blocks, and its next token is the
same as it would have been.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from vllm_llumnix.engine.vllm_types import Request, Scheduler

ASK_SECONDS: Final = 0.1
"""A report, a decision and a call need some milliseconds, and until the loop hears of it a step must end."""
HOLD_SECONDS: Final = 0.3
"""The longest gap in a stream that a shortage makes. To compute a victim again costs all others of its batch about as
much, and the victim itself many times that."""
UNHEARD_SECONDS: Final = 10.0
"""After a question that nobody has answered in time nothing is held for another one."""


class Shortage:
    """The shortages of one engine. `num_preemptions` counts those of the scheduler since the start. `holds`: its cache
    is of one kind, so that a request's blocks follow from its tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_preemptions: Callable[[], int],
        *,
        holds: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = 0
        """Blocks that the coming step lacks."""
        self.num_averted = 0
        """Shortages that a move ended before anybody was preempted."""
        self.asks = False
        """Somebody reads statuses, who might have a request moved."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a shortage begins or ends."""
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._num_preemptions = num_preemptions
        self._holds = holds
        self._clock = clock
        self._since_s: float | None = None
        """When the shortage began; None while there is none."""
        self._preemptions_before = 0
        self._has_moved = False
        """A move was under way in the shortage."""
        self._given_up = False
        self._unheard_until_s = float("-inf")

    def before_step(self, *, moving: bool) -> None:
        """Looks at what the coming step needs, and has those wait who lack it and may expect it. `moving`: a request is
        on its way out, or a reservation about to be given back."""
        lacking = self._lacking()
        if not lacking:
            if self._since_s is not None:
                self._end()
            return
        now_s = self._clock()
        if self._since_s is None:
            self._begin(now_s)
        self._has_moved |= moving
        if self._holds and not self._given_up and self._is_worth_waiting(now_s, moving):
            for request in lacking:
                step = self._scheduler.current_step + 2
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, step)

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._preemptions_before = self._num_preemptions()
        self._has_moved = self._given_up = False
        self.on_change()

    def _end(self) -> None:
        self._since_s = None
        if self._has_moved and self._num_preemptions() == self._preemptions_before:
            self.num_averted += 1
        self.on_change()

    def _is_worth_waiting(self, now_s: float, moving: bool) -> bool:
        assert self._since_s is not None
        waited_s = now_s - self._since_s
        if moving:
            worth = waited_s < HOLD_SECONDS
        else:
            asks = self.asks and now_s >= self._unheard_until_s
            worth = asks and not self._has_moved and waited_s < ASK_SECONDS
            if asks and not self._has_moved and not worth:
                self._unheard_until_s = now_s + UNHEARD_SECONDS
        self._given_up = not worth
        return worth

    def _lacking(self) -> list[Request]:
        """Running requests for which the coming step would find no block, in vLLM's order."""
        scheduler, running = self._scheduler, self._scheduler.running
        self.num_blocks, size = 0, scheduler.block_size
        ahead, budget = int(scheduler.num_lookahead_tokens), scheduler.max_num_scheduled_tokens
        free = self._manager.block_pool.get_num_free_blocks()
        if free > len(running) * (2 + ahead // size) + budget // size:
            return []  # whatever they do
        lacking, step = [], scheduler.current_step + 1
        for request in running:
            number = min(tokens_to_schedule(request), budget)
            if number <= 0 or step < request.next_decode_eligible_step:
                continue
            budget -= number
            end = min(request.num_computed_tokens + number + ahead, self._manager.max_model_len)
            blocks = -(-end // size) - len(self._manager.get_blocks(request.request_id).blocks[0])
            if blocks > free:
                self.num_blocks += blocks - free
                lacking.append(request)
            elif blocks > 0:
                free -= blocks
        return lacking


def tokens_to_schedule(request: Request) -> int:
    """Tokens of a running request that vLLM would schedule if nothing but the request limited it."""
    if request.num_computed_tokens >= request.num_prompt_tokens + request.max_tokens - 1:
        return 0  # the step in flight computes its last
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
