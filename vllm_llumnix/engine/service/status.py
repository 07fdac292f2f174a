# SPDX-License-Identifier: Apache-2.0
"""The status that the llumlet tells of its engine. Read on the llumlet's thread, whatever the loop is doing.

What requests do to the engine comes from the load counters, as one snapshot; what moves do to it, from the moves, of
which there are few; how the loop gets on, from its own notes.
"""

from __future__ import annotations

import asyncio
import time

from vllm.v1.core.sched.interface import PauseState

from llumlet.contract.bridge import HEALTHS
from llumlet.contract.coming_steps import coming_steps
from llumlet.contract.types import InstanceStatus
from llumlet.protocol import wire
from llumlet.protocol.move.limits import Slots
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.load.load_sums import Snapshot
from vllm_llumnix.engine.moves.destination_moves import DestinationMoves
from vllm_llumnix.engine.moves.source_moves import SourceMoves
from vllm_llumnix.engine.recovery.adoptions import Adoptions

WATCH_SECONDS = 0.1
"""Between two looks at what changes without an event: whether the loop still gets on."""
_MOST = (1 << 31) - 1
"""The largest number that the field holds."""


class StatusSource:
    """Makes statuses of one engine."""

    def __init__(
        self, context: EngineContext, departures: SourceMoves, arrivals: DestinationMoves, adoptions: Adoptions
    ) -> None:
        self._identity = context.identity
        self._loop = context.loop
        self._departures = departures
        self._arrivals = arrivals
        self._adoptions = adoptions
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begins, on the event loop that reads."""
        watch = self._watch(self._watched())
        self._watching = asyncio.get_running_loop().create_task(watch, name="llumnix-status")

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def now(self) -> InstanceStatus:
        snapshot = self._loop.port.load.snapshot()
        progress, identity = self._loop.progress, self._identity
        health = progress.health
        status = InstanceStatus(
            instance_id=identity.instance,
            incarnation=identity.incarnation,
            schedulable=self._schedulable(health),
            timestamp_ms=int(time.time() * 1000),
            step_id=self._loop.steps,
            update_id=snapshot.version,
            profiling_id=-1,
            loop_age_ms=progress.stalled_seconds * 1e3,
            health=HEALTHS[health],
            busy_with=progress.busy_with,
            num_adopted=self._adoptions.num_adopted,
            num_rescued=self._adoptions.num_rescued,
            num_preemptions=snapshot.num_preemptions,
            num_gone=snapshot.num_gone,
            gone_tokens=snapshot.gone_tokens,
            kv_unsupported=identity.kv_unsupported or "",
        )
        self._add_load(status, snapshot)
        self._add_moves(status)
        self._add_steps(status)
        self._add_pressure(status)
        self._add_coming_steps(status)
        return status

    async def _watch(self, told: object) -> None:
        """Tell the counters when the loop hangs or goes on, when the engine stops taking requests, and when it stops
        carrying their KV cache."""
        load = self._loop.port.load
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (now := self._watched()) != told:
                told = now
                load.touch()

    def _watched(self) -> object:
        return self._schedulable(), self._loop.progress.health, self._identity.kv_unsupported

    def _schedulable(self, health: wire.Health | None = None) -> bool:
        healthy = (health or self._loop.progress.health) is wire.Health.OK
        paused = self._loop.port.scheduler.pause_state != PauseState.UNPAUSED
        return healthy and not paused and self._loop.takes_requests

    def _add_load(self, status: InstanceStatus, snapshot: Snapshot) -> None:
        load, port = snapshot.load, self._loop.port
        status.recent_waiting_requests.extend(snapshot.recent)
        status.waiting_requests.extend(snapshot.waiting)
        status.num_waiting_requests = load.num_waiting
        status.num_loading_requests = load.num_loading
        status.num_running_requests = load.num_running
        status.scheduler_waiting_to_decode_requests_num = load.waiting_to_decode
        status.scheduler_waiting_to_decode_tokens_num = load.waiting_to_decode_tokens
        status.scheduler_running_to_decode_requests_num = load.running_to_decode
        status.scheduler_running_to_decode_tokens_num = load.running_to_decode_tokens
        status.num_uncomputed_tokens_scheduler_waiting_prefills = load.waiting_prefill_tokens
        status.num_uncomputed_tokens_scheduler_running_prefills = load.running_prefill_tokens
        status.num_unallocated_tokens_scheduler_running_prefills = load.running_unallocated_tokens
        status.num_tokens_loading_requests = load.loading_tokens
        status.num_uncomputed_pairs = load.prefill_pairs
        # vLLM's connectors keep no queue of their own.
        status.num_uncomputed_tokens_all_waiting_prefills = load.waiting_prefill_tokens
        status.num_unallocated_tokens_all_waiting_requests = load.waiting_unallocated_tokens
        status.num_unallocated_tokens_first_waiting_request = snapshot.first_waiting_tokens
        status.num_urgent_requests = load.num_urgent
        status.scheduler_running_to_decode_urgent_requests_num = load.urgent_running_to_decode
        total, free = port.num_blocks, snapshot.num_free_blocks
        status.num_total_blocks, status.num_free_blocks = total, free
        status.num_total_gpu_tokens = total * port.block_size
        status.num_used_gpu_tokens = (total - free) * port.block_size

    def _add_steps(self, status: InstanceStatus) -> None:
        times = self._loop.step_times
        decodes = times.decodes
        status.num_decode_steps, status.decode_steps_s = decodes.number, decodes.seconds
        status.decode_steps_requests, status.decode_steps_kv = decodes.requests, decodes.kv
        if samples := times.samples:
            status.steps.extend(samples)
            latest = samples[-1]
            status.profiling_id, status.step_duration = latest.number, latest.seconds * 1e3
            status.num_scheduled_prefill_tokens = latest.prefill_tokens

    def _add_pressure(self, status: InstanceStatus) -> None:
        tokens, shortage = self._loop.port.tokens, self._loop.port.shortage
        status.num_computed_tokens, status.num_recomputed_tokens = tokens.computed, tokens.recomputed
        status.num_averted_preemptions, status.num_lacking_blocks = shortage.num_averted, shortage.num_blocks

    def _add_coming_steps(self, status: InstanceStatus) -> None:
        """Adds the coming steps, for caches of one kind, where each step gives a request one token. The batch may
        change meanwhile: its list is copied at once, and what is told of a request that is about to end is right until
        it has."""
        port = self._loop.port
        scheduler = port.scheduler
        if len(scheduler.kv_cache_config.kv_cache_groups) > 1 or scheduler.num_spec_tokens:
            return
        longest = port.kv_cache_manager.max_model_len
        computed, left = [], []
        for request in list(scheduler.running):
            num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
            if num_tokens - num_computed <= 1:
                computed.append(num_computed)
                left.append(min(request.max_tokens - request.num_output_tokens, longest - num_tokens))
        coming = coming_steps(computed, left, port.block_size)
        status.coming_blocks.extend(coming.blocks)
        status.coming_ends.extend(coming.ends)

    def _add_moves(self, status: InstanceStatus) -> None:
        capacity = self._loop.port.capacity_tokens
        arriving, leaving = self._arrivals.pending(), list(self._departures.moves.values())
        # One that settles meanwhile lets go of its request.
        in_tokens = sum(request.num_tokens for move in arriving if (request := move.request) is not None)
        out_tokens = sum(move.request.num_tokens for move in leaving)
        in_left, out_left = (_available(side.slots, capacity) for side in (self._arrivals, self._departures))
        status.num_migrate_in_reqs, status.num_migrate_out_reqs = len(arriving), len(leaving)
        status.num_migrate_in_tokens, status.num_migrate_out_tokens = in_tokens, out_tokens
        status.num_available_migrate_in_slots, status.num_available_migrate_in_tokens = in_left
        status.num_available_migrate_out_slots, status.num_available_migrate_out_tokens = out_left
        status.kv_cache_usage_ratio_migrate_in = in_tokens / capacity
        status.kv_cache_usage_ratio_migrate_out = out_tokens / capacity
        status.available_kv_cache_usage_ratio_migrate_in = in_left[1] / capacity
        status.available_kv_cache_usage_ratio_migrate_out = out_left[1] / capacity
        status.num_pinned_blocks = sum(move.leaving.num_pinned_blocks for move in leaving)
        status.num_reserved_blocks = sum(move.blocks.count for move in arriving)
        status.num_draining_blocks = self._arrivals.draining_blocks()


def _available(slots: Slots, capacity: int) -> tuple[int, int]:
    """Requests and tokens for which there is room; what no limit leaves available is as many as can be said, and the
    whole cache."""
    requests, tokens = slots.available_requests, slots.available_tokens
    return _MOST if requests is None else requests, capacity if tokens is None else tokens
