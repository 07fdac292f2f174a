# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens that an engine has computed, and computed again: the cost of preemption.

A token is computed when a step schedules it. It is computed again if its KV cache was lost: by a preemption, or by a
move without it. Tokens found in the prefix cache are not scheduled, and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput


class ComputedTokens:
    """Since the engine's start. Written by the loop thread, read by any other."""

    def __init__(self) -> None:
        self.computed = 0
        self.recomputed = 0
        """Tokens among them that had been computed before."""
        self._lost: dict[str, int] = {}
        """Requests that compute tokens again, and the number of tokens after which they are where they were."""

    def lost(self, request: Request, num_tokens: int) -> None:
        """The KV cache of the request's first `num_tokens` tokens is gone, and the request is not."""
        if num_tokens > self._lost.get(request.request_id, 0):
            self._lost[request.request_id] = num_tokens

    def scheduled(self, requests: Mapping[str, Request], step: SchedulerOutput) -> None:
        self.computed += step.total_num_scheduled_tokens
        if not self._lost:
            return
        for request_id in self._lost.keys() & step.num_scheduled_tokens.keys():
            # Scheduled tokens are among those that vLLM calls computed by now.
            end, had = requests[request_id].num_computed_tokens, self._lost[request_id]
            begin = end - step.num_scheduled_tokens[request_id]
            self.recomputed += max(min(end, had) - begin, 0)
            if end >= had:
                del self._lost[request_id]

    def gone(self, request_id: str) -> None:
        self._lost.pop(request_id, None)
