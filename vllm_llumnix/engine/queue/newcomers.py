# SPDX-License-Identifier: Apache-2.0
"""Requests that were admitted and do not run yet: their batch slot is theirs. Loop thread only."""

from __future__ import annotations

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from vllm_llumnix.engine.queue.turns import protect
from vllm_llumnix.engine.vllm_types import Request, Scheduler


class Newcomers:
    """The newcomers of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}
        self._decoding: set[str] = set()
        """Newcomers whose next step computes one token."""
        self._stock_threshold: tuple[int, bool] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> list[Request]:
        """Newcomers that do not run yet: the scheduler counts their batch slots as free."""
        return [request for request in self._waiting.values() if not _has_its_slot(request)]

    def add(self, request: Request, *, decodes: bool) -> None:
        """Takes a request that is the scheduler's now. `decodes`: one token follows, and then it is in the batch."""
        self._waiting[request.request_id] = request
        if decodes:
            self._decoding.add(request.request_id)

    def queue(self, request: Request) -> None:
        """Has a request with its KV cache in place wait for the next step: behind the newcomers that were admitted
        before it, in front of everybody else. Where vLLM orders by priority, that decides."""
        queue = self._scheduler.kv_holding_waiting
        if self._scheduler.policy == SchedulingPolicy.PRIORITY:
            queue.add_request(request)
            return
        places = (place for place, other in enumerate(queue, 1) if other.request_id in self._waiting)
        queue.insert(max(places, default=0), request)

    def before_step(self) -> None:
        """Make room for them in the coming step, and keep them from being its first victims."""
        self._restore_threshold()
        for request_id, request in list(self._waiting.items()):
            if _has_its_slot(request):
                del self._waiting[request_id]
                if request_id in self._decoding and request.status == RequestStatus.RUNNING:
                    protect(self._scheduler, request)
        self._decoding &= self._waiting.keys()
        if num_decoding := sum(bool(self._waiting[request_id].num_computed_tokens) for request_id in self._decoding):
            self._limit_prefills(num_decoding)

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


def _has_its_slot(request: Request) -> bool:
    """True if the scheduler counts the slot itself, or the request needs none any more."""
    return request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED) or request.is_finished()
