# SPDX-License-Identifier: Apache-2.0
"""The states of requests beside speculative decoding. Loop thread only.

A step computes the drafts that it is given as if all were accepted, and leaves a state behind each: recurrent ones in
blocks of their own, one behind the other in the block table, from where the step's last token belongs; the inputs of
convolutions in the first of these, where they begin one further on for each draft. Which of them is the latest is what
the sampler accepts. The workers note it for themselves; here it is told from the tokens that the step has brought.

Where the last accepted draft fills a block that is kept, vLLM puts the state behind it in its first place, after it has
told the tokens: at that moment nobody knows where it is, and the request takes one more step before it is frozen.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.vllm_types import Request, Scheduler
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput


class Latest(NamedTuple):
    """The latest state of a request: behind `num_accepted` drafts of a step that was given the tokens to `num_tokens`.
    `is_put_elsewhere`: perhaps by now."""

    num_tokens: int
    num_accepted: int = 0
    is_put_elsewhere: bool = False


class LatestStates:
    """Latest states of one scheduler's requests, from here on."""

    def __init__(self, scheduler: Scheduler, rows: BlockRows) -> None:
        self._size = rows.state_size
        self._latest: dict[str, tuple[Request, Latest]] = {}
        """Requests that have taken a step here. A request that left and has come back is another object."""
        self.are_lost_by_waiting = bool(rows.num_drafts) and not scheduler.use_v2_model_runner
        """True if workers forget what was accepted of a request that is left out of a step: the V1 runner takes it from
        its batch, and goes on behind the first token of its last step when it comes back."""
        self.follow = bool(rows.num_drafts)
        """True if the caller has to announce steps, with `stepping` before their outputs are looked at and `stepped`
        after."""

    def of(self, request: Request) -> Latest:
        """Latest state of a request that no step in flight works on."""
        known, latest = self._latest.get(request.request_id, (None, None))
        return latest if latest and known is request else Latest(request.num_computed_tokens)

    def stepping(self, scheduler: Scheduler, output: SchedulerOutput) -> list[tuple[Request, int, int]]:
        """The requests of a step, with their computed and output tokens before its outputs are looked at."""
        found = (scheduler.requests.get(request_id) for request_id in output.num_scheduled_tokens)
        return [(request, request.num_computed_tokens, request.num_output_tokens) for request in found if request]

    def stepped(self, scheduler: Scheduler, requests: list[tuple[Request, int, int]]) -> None:
        for request, num_tokens, num_outputs in requests:
            self._stepped(request, num_tokens, request.num_output_tokens - num_outputs)
        for request_id in self._latest.keys() - scheduler.requests.keys():
            del self._latest[request_id]

    def _stepped(self, request: Request, num_tokens: int, num_sampled: int) -> None:
        """A step that was given the tokens to `num_tokens`, if it is the last in flight, has brought `num_sampled`."""
        num_accepted = max(0, num_sampled - 1)
        fills_a_block = request.num_computed_tokens == num_tokens and num_tokens % self._size == 0
        latest = Latest(num_tokens, num_accepted, is_put_elsewhere=fills_a_block and num_accepted > 0)
        self._latest[request.request_id] = request, latest
