# SPDX-License-Identifier: Apache-2.0
"""The order of vLLM's queue for requests that enter it in the middle of their lives, and for those that wait for long.
Loop thread only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from vllm_llumnix.engine.vllm_types import Request, Scheduler


def queue_in_turn(scheduler: Scheduler, request: Request) -> None:
    """Has a request wait where it would had it been here all the time: who is in the middle of a stream goes before who
    has yet to begin, and of two who begin the one that arrived first at its API server. Where vLLM orders by priority,
    it does so here.

    Raises nothing, and changes nobody else's order. The clocks of two hosts may differ: then so do turns, by as much.
    """
    waiting = scheduler.waiting
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        waiting.add_request(request)
        return
    if request.status == RequestStatus.PREEMPTED:
        waiting.prepend_request(request)
        return
    turn, place = _turn(request), len(waiting)
    for other in reversed(waiting):
        if _turn(other) <= turn:
            break
        place -= 1
    waiting.insert(place, request)


def protect(scheduler: Scheduler, request: Request) -> None:
    """First come, first served preempts the last of `running`: go to the front. Priorities are left alone."""
    running = scheduler.running
    if scheduler.policy != SchedulingPolicy.PRIORITY and request in running:
        running.remove(request)
        running.insert(0, request)


def _turn(request: Request) -> tuple[bool, float]:
    has_begun = request.status == RequestStatus.PREEMPTED or request.num_output_tokens > 0
    return not has_begun, request.arrival_time


_LOOK_S: Final = 1.0
"""Between two looks: each sorts the queue."""


class Ageing:
    """`after_s` 0: never. `clock` is that of `arrival_time`."""

    def __init__(self, scheduler: Scheduler, after_s: float, clock: Callable[[], float] = time.time) -> None:
        self._scheduler = scheduler
        self._after_s = after_s if scheduler.policy == SchedulingPolicy.PRIORITY else 0.0
        self._clock = clock
        self._due_s = 0.0

    def before_step(self) -> None:
        if not self._after_s or not self._scheduler.waiting or (now_s := self._clock()) < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        first, *others = self._scheduler.waiting
        latest_s = now_s - self._after_s
        raised = [one for one in others if one.priority > first.priority and one.arrival_time < latest_s]
        if not raised:
            return
        self._scheduler.waiting.remove_requests(raised)
        for request in raised:
            request.priority = first.priority
            self._scheduler.waiting.add_request(request)
