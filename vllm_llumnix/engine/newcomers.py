# SPDX-License-Identifier: Apache-2.0
"""Requests that have arrived with their KV cache, until they run: they wait for nobody. Loop thread only."""

from __future__ import annotations

from vllm.v1.request import RequestStatus

from vllm_llumnix.engine.turns import protect
from vllm_llumnix.engine.vllm_types import Request, Scheduler


class Newcomers:
    """The newcomers of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}
        self._stock_threshold: tuple[int, bool] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Takes one that is the scheduler's now, at the head of its queue."""
        self._waiting[request.request_id] = request

    def before_step(self) -> None:
        """Make room for them in the coming step, and keep them from being its first victims."""
        self._restore_threshold()
        for request_id, request in list(self._waiting.items()):
            if request.status == RequestStatus.RUNNING or request.is_finished():
                del self._waiting[request_id]
                if request.status == RequestStatus.RUNNING:
                    protect(self._scheduler, request)
        if self._waiting:
            self._limit_prefills(len(self._waiting))

    def _limit_prefills(self, num_newcomers: int) -> None:
        """Chunked prefills that run already take the whole token budget first: leave the newcomers' share for one step.

        The threshold is the scheduler's own knob for this, read at every `schedule()`; it is put back before the next.
        """
        scheduler = self._scheduler
        prefills = sum(1 for request in scheduler.running if request.is_prefill_chunk)
        if not prefills:
            return
        decodes = len(scheduler.running) - prefills + num_newcomers
        per_decode = 1 + scheduler.num_spec_tokens
        config = scheduler.scheduler_config
        self._stock_threshold = (config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold)
        budget = (scheduler.max_num_scheduled_tokens - decodes * per_decode) // prefills
        stock = config.long_prefill_token_threshold
        config.long_prefill_token_threshold = max(1, min(budget, stock) if stock else budget)
        scheduler.adaptive_long_prefill_threshold = False

    def _restore_threshold(self) -> None:
        if self._stock_threshold is not None:
            threshold, self._scheduler.adaptive_long_prefill_threshold = self._stock_threshold
            self._scheduler.scheduler_config.long_prefill_token_threshold = threshold
            self._stock_threshold = None
