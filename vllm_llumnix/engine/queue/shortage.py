# SPDX-License-Identifier: Apache-2.0
"""Blocks that the coming step lacks, and who is left out of it for that. Loop thread only, but for the counts.

vLLM preempts when a running request finds no block: the last of the batch loses its KV cache, and computes it again
later. Where it is worth waiting for a move (`protocol.move.shortage`), those that find none are left out of the step
instead, as frozen requests are; of vLLM's own step nothing else changes. Nobody waits for anything: each step asks
anew. Who is left out keeps its blocks, and its next token is what it would have been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llumlet.protocol.move.shortage import Shortages
from vllm_llumnix.engine.vllm_types import Request, Scheduler


class Shortage:
    """Follows the shortages of one engine. `num_preemptions`: of its scheduler, since the start. `holds`: its cache is
    of one kind, so that the blocks of a request follow from its tokens; else vLLM preempts as it always did. `sizes`:
    tokens of a block of each group that keeps tokens, if there are several."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_preemptions: Callable[[], int],
        *,
        holds: bool,
        sizes: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = 0
        """Blocks that the coming step lacks."""
        self.asks = False
        """Somebody reads statuses, and may have a request moved."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a shortage begins or ends."""
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._num_preemptions = num_preemptions
        self._holds = holds
        self._sizes = tuple(sizes) or (int(scheduler.block_size),)
        self._clock = clock
        self._shortages = Shortages()

    @property
    def num_averted(self) -> int:
        return self._shortages.num_averted

    def before_step(self, *, moving: bool) -> None:
        """Looks at what the coming step needs. `moving`: a request is on its way out, or one on its way here is about
        to be refused."""
        lacking, was_open = self.lacking(), self._shortages.is_open
        if not lacking:
            if was_open:
                self._shortages.over(self._num_preemptions())
                self.on_change()
            return
        waits = self._shortages.waits(self._clock(), self._num_preemptions(), moving=moving, asks=self.asks)
        if waits and self._holds:
            for request in lacking:
                # The coming step counts one more.
                step = self._scheduler.current_step + 2
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, step)
        if not was_open:
            self.on_change()

    def lacking(self) -> list[Request]:
        """Running requests for which the coming step would find no block, in vLLM's order; `num_blocks` is how many
        blocks that are."""
        scheduler, running = self._scheduler, self._scheduler.running
        self.num_blocks, sizes = 0, self._sizes
        ahead, budget = int(scheduler.num_lookahead_tokens), scheduler.max_num_scheduled_tokens
        free = self._manager.block_pool.get_num_free_blocks()
        if free > sum(len(running) * (2 + ahead // size) + budget // size for size in sizes):
            return []  # whatever they do
        lacking, step = [], scheduler.current_step + 1
        for request in running:
            number = min(tokens_to_schedule(request), budget)
            if number <= 0 or step < request.next_decode_eligible_step:
                continue
            computed = request.num_computed_tokens
            end = min(computed + number + ahead, self._manager.max_model_len)
            # For what is computed it has them; to look is what takes time, and of decodes few begin a block.
            if any(-(-end // size) > -(-(computed + ahead) // size) for size in sizes):
                blocks = self._lacks(request, end)
                if blocks > free:
                    self.num_blocks += blocks - free
                    lacking.append(request)
                    continue
                free -= max(blocks, 0)
            budget -= number
        return lacking

    def _lacks(self, request: Request, end: int) -> int:
        """Blocks for its first `end` tokens that it does not have. Of several groups, what vLLM says: windows that move
        on may give some back first."""
        if self._holds:
            return -(-end // self._sizes[0]) - len(self._manager.get_blocks(request.request_id).blocks[0])
        needed = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=end,
            new_computed_blocks=self._manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=end - int(self._scheduler.num_lookahead_tokens),
        )
        return int(needed)


def tokens_to_schedule(request: Request) -> int:
    """Tokens of a running request that vLLM would schedule if nothing but the request limited it."""
    if request.num_computed_tokens >= request.num_prompt_tokens + request.max_tokens - 1:
        return 0  # the step in flight computes its last
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
