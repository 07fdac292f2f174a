# SPDX-License-Identifier: Apache-2.0
"""Nobody starves where vLLM orders by priority: who came long ago has its turn among the first. Loop thread only.

vLLM lets in the lowest `priority` and preempts the highest, whatever somebody's age: under a load of urgent requests
that fills an engine by itself, no other ever runs. Once a second those that wait and came more than `after_s` ago get
the lowest priority that waits with them. As they came earlier than most who have it, they go before these, and are
preempted after them. They keep it, here and where they move: what ran and lost its place again would compute for
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_llumnix.engine.vllm_types import Scheduler

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
