# SPDX-License-Identifier: Apache-2.0
"""What a migration does to vLLM's scheduler and block pool. Every method runs on the engine's loop, between two steps.

Who owns a block during a move (S source, D destination; `[from, to)` are block indices of the request):

    S, round k      [copied, frontier)   scheduler, plus one reference of ours (a pin) until the round's result is in
    S, frozen       [0, end)             scheduler, plus a pin on every block until the hand-over is settled
    D, reserved     [0, hits)            prefix cache hits: shared, referenced by the reservation
                    [hits, reserved)     ours alone; unknown to the scheduler's queues, unhashed. A step in flight may
                                         still write them, for a request that has just lost them: whoever asks for
                                         blocks is answered behind that step (`KVConnection.call_for_blocks`)
    D, admitted     [0, end)             scheduler; hashes of full blocks are published at this moment, not before
    D, abandoned    as reserved, until every mover has reported that it no longer writes; only then freed

A pin is a reference in the block pool. vLLM may finish, abort or preempt the request meanwhile: the bytes stay.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from vllm import __version_tuple__
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ledger import audit
from vllm_llumnix.engine.load_events import counters_of
from vllm_llumnix.engine.portability import sees_all_tokens
from vllm_llumnix.engine.request_state import why_not_now

_COUNTS_FROZEN = __version_tuple__ >= (0, 33)
"""The scheduler counts the LoRA adapters of all running requests; before, of those that it schedules in the step."""
_NEVER = 1 << 60
"""A step number that is never reached: a request with this `next_decode_eligible_step` is skipped by the scheduler."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """References on blocks of the pool, to be given back with `SchedulerPort.unpin`, once."""

    blocks: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Frontier:
    """What can be copied of a running request: full blocks of final KV, `[from_block, frontier_blocks)` pinned."""

    frontier_blocks: int
    num_tokens: int
    block_ids: list[int]
    output_token_ids: list[int]
    pin: Pin


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRequest:
    """A request that no step in flight will touch any more; every block is pinned, or none if it leaves them behind."""

    request: Request
    num_tokens: int
    computed_tokens: int
    block_ids: list[int]
    output_token_ids: list[int]
    pin: Pin


class SchedulerPort:
    """The scheduler and block pool of one engine, as a migration sees them.

    `load` follows the scheduler from here on: it has no request yet.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.load = counters_of(scheduler)
        self.kv_cache_manager = scheduler.kv_cache_manager
        self.block_pool = scheduler.kv_cache_manager.block_pool
        self.block_size: int = scheduler.block_size
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._takes_kv = len(groups) == 1 and sees_all_tokens(groups[0])
        self._frozen: dict[str, Request] = {}
        self._eligible: dict[str, int] = {}
        """`next_decode_eligible_step` of frozen requests as vLLM had set it: with a pipeline, a stage gets a sampled
        token some steps later, and the request must not be decoded before."""
        self._parked: dict[str, Request] = {}
        self._reserved: dict[str, Request] = {}
        self._emptied: set[str] = set()
        """Those of them whose blocks have lost their content."""
        self._with_slot: set[str] = set()
        self._newcomers: dict[str, Request] = {}
        self._stock_threshold: tuple[int, bool] | None = None
        self._num_pins = 0
        if scheduler.lora_config is not None:
            # The scheduler's alone: workers in this process read vLLM's.
            scheduler.lora_config = copy.copy(scheduler.lora_config)
            self._max_adapters: int = scheduler.lora_config.max_loras

    @property
    def num_blocks(self) -> int:
        """Of the KV cache. Block 0 is vLLM's null block."""
        return int(self.block_pool.num_gpu_blocks - 1)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def audit_idle(self) -> list[str]:
        """What is wrong with the block pool while nobody holds a block; nothing if somebody may."""
        if self.scheduler.requests or self._reserved or self._num_pins:
            return []
        pool = self.block_pool
        if pool.get_num_free_blocks() == pool.num_gpu_blocks - 1:
            return []
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        return audit(pool.num_gpu_blocks, [0, *free], {})

    def block_ids(self, request: Request) -> list[int]:
        """The request's block table; empty if it holds none."""
        return [block.block_id for block in self._blocks(request)]

    # Source

    def find(self, request_id: str) -> Request:
        """Raises Refused(unknown_request)."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            raise Refused(Reason.UNKNOWN_REQUEST, f"no request {request_id} here")
        return request

    def frontier(self, request: Request, from_block: int, known_output: int) -> Frontier:
        """Pin the final full blocks from `from_block` on; tokens from output index `known_output` on come along.

        Raises Refused when the request cannot be copied at this moment.
        """
        if (problem := why_not_now(request)) is not None:
            raise Refused(*problem)
        final_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        frontier_blocks = final_tokens // self.block_size
        blocks = self._blocks(request)[from_block:frontier_blocks]
        return Frontier(
            frontier_blocks=frontier_blocks,
            num_tokens=request.num_tokens,
            block_ids=[block.block_id for block in blocks],
            output_token_ids=request.output_token_ids[known_output:],
            pin=self._pin(blocks),
        )

    def freeze(self, request: Request) -> None:
        """Stop scheduling the request.

        A running one keeps its slot and its blocks, and a step in flight still emits its token; a queued one leaves the
        queue until `unfreeze`.
        """
        self._eligible.setdefault(request.request_id, request.next_decode_eligible_step)
        request.next_decode_eligible_step = _NEVER
        self._frozen[request.request_id] = request
        if request.status == RequestStatus.RUNNING:
            self._protect(request)
        else:
            self._park(request)

    def drained(self, request: Request, known_output: int, *, with_kv: bool = True) -> FrozenRequest | None:
        """The frozen request, all its blocks pinned if they are to be copied, or None while a step in flight still
        works on it."""
        if request.num_in_flight_tokens or request.num_stale_output_tokens:
            return None
        computed = request.num_computed_tokens
        blocks = self._blocks(request)[: -(-computed // self.block_size)] if with_kv else []
        return FrozenRequest(
            request=request,
            num_tokens=request.num_tokens,
            computed_tokens=computed,
            block_ids=[block.block_id for block in blocks],
            output_token_ids=request.output_token_ids[known_output:],
            pin=self._pin(blocks),
        )

    def unfreeze(self, request: Request) -> None:
        """Let the request run again, from where it was frozen, and no sooner than vLLM would have let it."""
        request.next_decode_eligible_step = self._eligible.pop(request.request_id, request.next_decode_eligible_step)
        self._frozen.pop(request.request_id, None)
        if self._parked.pop(request.request_id, None) is not None:
            self._queue_again(request)

    def forget(self, request: Request) -> None:
        """vLLM has finished a frozen request by itself."""
        self._eligible.pop(request.request_id, None)
        self._frozen.pop(request.request_id, None)
        self._parked.pop(request.request_id, None)

    def park_preempted(self) -> None:
        """A frozen request that was preempted must not resume while its hand-over is open: take it off the queue."""
        for request_id, request in self._frozen.items():
            if request.status == RequestStatus.PREEMPTED and request_id not in self._parked:
                self._park(request)

    def release(self, request: Request) -> None:
        """Forget a request that now lives elsewhere: no output, no finish for the client; workers are told.

        The front-end must not learn of it: with several clients or data-parallel ranks it would drop the route on
        which an abort still has to travel.
        """
        if request.is_finished():
            self.forget(request)
            return
        self.unfreeze(request)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        finished_of_client = self.scheduler.finished_req_ids_dict
        if finished_of_client is not None:
            finished_of_client[request.client_index].discard(request.request_id)

    def pin_all(self, request: Request) -> Pin:
        """Pin every block that the request holds."""
        return self._pin(self._blocks(request))

    def unpin(self, pin: Pin) -> None:
        self._num_pins -= 1
        self.block_pool.free_blocks(reversed(pin.blocks))

    # Destination

    def reserve(self, request: Request, *, use_prefix_cache: bool, queued: bool = False) -> tuple[int, list[int]]:
        """Hold blocks, a batch slot and a place for its LoRA adapter for a request that may come.

        A request that is `queued` at its source has no KV and will queue here too: nothing is held for it, it only has
        to fit an empty cache. Should it start meanwhile, `grow` holds what its KV needs. In a cache of several groups,
        or of layers that do not see all tokens, no request's KV arrives: it has to fit what is free, and gets a slot.

        Returns the number of blocks that the prefix cache already holds, and the ids of all blocks. Preempts nobody,
        and leaves the next in the queue what it needs.
        Raises Refused(destination_full | destination_paused | already_migrating).
        """
        scheduler = self.scheduler
        if request.request_id in scheduler.requests or request.request_id in self._reserved:
            raise Refused(Reason.ALREADY_MIGRATING, f"{request.request_id} is here already, or on its way")
        if self.paused:
            raise Refused(Reason.DESTINATION_PAUSED, "the destination's scheduler is paused")
        if queued:
            self._check_capacity(request)
            self._reserved[request.request_id] = request
            return 0, []
        self._check_slot(request)
        if not self._takes_kv:
            self._check_room(request)
            self._take_slot(request)
            self._reserved[request.request_id] = request
            return 0, []
        hit_tokens, hit_blocks = 0, None
        if use_prefix_cache:
            hit_blocks, hit_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
            aligned = hit_tokens // self.block_size * self.block_size
            if aligned != hit_tokens:
                hit_blocks = self.kv_cache_manager.truncate_computed_blocks(hit_blocks, aligned)
                hit_tokens = aligned
        allocated = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens=self._positions(request.num_tokens) - hit_tokens,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=hit_blocks if hit_tokens else None,
            delay_cache_blocks=True,
            has_scheduled_reqs=True,
            reserved_blocks=self._spoken_for(),
            skip_zeroing_group_ids=(0,),
        )
        if allocated is None:
            raise self._no_room(-(-request.num_tokens // self.block_size))
        self._take_slot(request)
        self._reserved[request.request_id] = request
        return hit_tokens // self.block_size, self.block_ids(request)

    def empty_reservations(self) -> None:
        """The KV memory goes: what was copied into reserved blocks is no cache when it is back."""
        self._emptied = set(self._with_slot)

    def _require_content(self, request: Request) -> None:
        if request.request_id in self._emptied:
            raise Refused(Reason.DESTINATION_PAUSED, "the destination slept, and what was copied there is gone")

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Extend a reservation to `num_tokens` tokens and the next. Raises Refused(destination_full |
        destination_paused).
        """
        self._require_content(request)
        if request.request_id not in self._with_slot:
            self._check_slot(request)
        if not self._extend(request, num_tokens):
            raise Refused(Reason.DESTINATION_FULL, "the destination has no blocks left to grow the reservation")
        self._take_slot(request)
        return self.block_ids(request)

    def admit(self, request: Request, computed_tokens: int) -> None:
        """Hand the request to the scheduler; `computed_tokens` of its KV are in place.

        It goes to the head, since its client is in the middle of a stream or its prefill has begun; without KV and
        output it queues like a new request.

        Raises Refused, with the reservation unchanged, when the engine cannot take it now.
        """
        scheduler = self.scheduler
        if scheduler.pause_state == PauseState.PAUSED_ALL:
            raise Refused(Reason.DESTINATION_PAUSED, "the destination's scheduler is paused")
        if computed_tokens:
            self._require_content(request)
        if computed_tokens and not self._extend(request, request.num_tokens):
            raise Refused(Reason.DESTINATION_FULL, "the destination has no block left for the next token")
        request.events.clear()
        request.status = RequestStatus.WAITING
        self._give_slot_back(request)
        del self._reserved[request.request_id]
        self._emptied.discard(request.request_id)
        scheduler.requests[request.request_id] = request
        if computed_tokens:
            request.num_computed_tokens = computed_tokens
            self.kv_cache_manager.cache_blocks(request, computed_tokens // self.block_size * self.block_size)
            scheduler.kv_holding_waiting.prepend_request(request)
        else:
            self.kv_cache_manager.free(request)
            if request.num_output_tokens:
                scheduler.waiting.prepend_request(request)
            else:
                scheduler.waiting.add_request(request)
        self.load.queued(request)
        if computed_tokens == request.num_tokens - 1:
            self._newcomers[request.request_id] = request

    def cancel_reservation(self, request: Request) -> None:
        """Give a reservation back. No mover may still write its blocks."""
        if self._reserved.pop(request.request_id, None) is not None:
            self._emptied.discard(request.request_id)
            self.kv_cache_manager.free(request)
            self._give_slot_back(request)

    def is_reserved(self, request_id: str) -> bool:
        return request_id in self._reserved

    def short_of_blocks(self) -> bool:
        """Whether the next step's decodes could preempt each other for want of blocks that a reservation holds."""
        if not self._reserved:
            return False
        growing = sum(1 for request in self.scheduler.running if self._grows_next(request))
        return bool(self.block_pool.get_num_free_blocks() < growing)

    # Every step

    def before_step(self) -> None:
        """Make room for newcomers in the coming step, and keep them from being its first victims."""
        self._restore_threshold()
        if self.scheduler.lora_config is not None:
            self._hold_adapters()
        if not self._newcomers:
            return
        for request_id, request in list(self._newcomers.items()):
            if request.status == RequestStatus.RUNNING or request.is_finished():
                del self._newcomers[request_id]
                if request.status == RequestStatus.RUNNING:
                    self._protect(request)
        if self._newcomers:
            self._limit_prefills(len(self._newcomers))

    def running_adapters(self) -> set[int]:
        """The adapters of the batch, those of frozen requests included."""
        return _adapters(self.scheduler.running)

    @property
    def paused(self) -> bool:
        return bool(self.scheduler.pause_state != PauseState.UNPAUSED)

    def has_runnable(self) -> bool:
        """Whether the next step would compute something for a request."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.kv_holding_waiting:
            return True
        return any(request.request_id not in self._frozen for request in scheduler.running)

    def only_frozen(self) -> bool:
        """Whether every request of this engine is frozen, so that a step would compute nothing."""
        return bool(self._frozen) and not self.scheduler.finished_req_ids and not self.has_runnable()

    def _limit_prefills(self, num_newcomers: int) -> None:
        """Chunked prefills that run already take the whole token budget first: leave the newcomers' share for one step.

        The threshold is the scheduler's own knob for this, read at every `schedule()`; it is put back before the next.
        """
        scheduler = self.scheduler
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
            threshold, self.scheduler.adaptive_long_prefill_threshold = self._stock_threshold
            self.scheduler.scheduler_config.long_prefill_token_threshold = threshold
            self._stock_threshold = None

    def _protect(self, request: Request) -> None:
        """First come, first served preempts the last of `running`: go to the front. Priorities are left alone."""
        running = self.scheduler.running
        if self.scheduler.policy != SchedulingPolicy.PRIORITY and request in running:
            running.remove(request)
            running.insert(0, request)

    def _park(self, request: Request) -> None:
        """Take a queued request off the queue; it is still one of the scheduler's requests."""
        self.scheduler.waiting.remove_requests([request])
        self.scheduler.deferred_waiting.discard(request)
        self._parked[request.request_id] = request

    def _queue_again(self, request: Request) -> None:
        """Where it would be had it not left: a preempted one at the head, others in order of arrival or priority."""
        waiting = self.scheduler.waiting
        if request.status == RequestStatus.PREEMPTED:
            waiting.prepend_request(request)
        elif self.scheduler.policy == SchedulingPolicy.PRIORITY:
            waiting.add_request(request)
        else:
            later = (at for at, other in enumerate(waiting) if other.arrival_time > request.arrival_time)
            waiting.insert(next(later, len(waiting)), request)

    def _check_capacity(self, request: Request) -> None:
        """Raises Refused(destination_full) for a request that an empty KV cache could not hold."""
        needed, total = self._num_blocks_for(request), self.block_pool.num_gpu_blocks - 1
        if needed > total:
            raise Refused(Reason.DESTINATION_FULL, f"{needed} blocks needed, the destination has {total}")

    def _check_room(self, request: Request) -> None:
        """Raises Refused(destination_full)."""
        needed = self._num_blocks_for(request)
        if needed > self.block_pool.get_num_free_blocks() - self._spoken_for():
            raise self._no_room(needed)

    def _no_room(self, num_blocks: int) -> Refused:
        problem = f"{num_blocks} blocks needed, {self.block_pool.get_num_free_blocks()} free at the destination"
        if spoken_for := self._spoken_for():
            problem += f", whose own requests need {spoken_for}"
        return Refused(Reason.DESTINATION_FULL, problem)

    def _spoken_for(self) -> int:
        """Blocks that are not for who comes from elsewhere: what prefills under way still need, and the request that is
        next in the queue. Its turn would never come if newcomers took every block that comes free.
        """
        scheduler = self.scheduler
        following = self._num_blocks_for(scheduler.waiting.peek_request()) if scheduler.waiting else 0
        return int(scheduler._inflight_prefill_reserved_blocks()) + following

    def _num_blocks_for(self, request: Request) -> int:
        """For a whole request that is not here yet. Where no KV arrives, by the rule by which vLLM admits one: a window
        needs no more than it spans."""
        positions = self._positions(request.num_tokens)
        if self._takes_kv:
            return -(-positions // self.block_size)
        manager = self.kv_cache_manager
        tokens = min(positions, manager.max_model_len)
        return int(
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=tokens,
                new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=0,
                num_local_computed_tokens=0,
                num_tokens_main_model=tokens,
                apply_admission_cap=True,
            )
        )

    def _check_slot(self, request: Request) -> None:
        """Raises Refused(destination_full)."""
        scheduler = self.scheduler
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            raise Refused(Reason.DESTINATION_FULL, "the destination has no free batch slot")
        if request.lora_request is not None:
            present = _adapters([*scheduler.running, *scheduler.kv_holding_waiting, *self._expected()])
            if len(present - _adapters([request])) >= self._max_adapters:
                problem = f"the destination's batch has its {self._max_adapters} LoRA adapters (--max-loras)"
                raise Refused(Reason.DESTINATION_FULL, problem)

    def _hold_adapters(self) -> None:
        """Keep places for the adapters of requests that are expected, and of those that are frozen.

        The scheduler counts the adapters of its batch, against a limit that it reads at every step. It must not give
        away the place of a frozen request: that may go on, and more adapters than the limit end the engine.
        """
        held: set[int] = set()
        if self._frozen or self._with_slot:
            running = self.scheduler.running
            counted = running if _COUNTS_FROZEN else [one for one in running if one.request_id not in self._frozen]
            held = _adapters([*running, *self._expected()]) - _adapters(counted)
        self.scheduler.lora_config.max_loras = self._max_adapters - len(held)

    def _expected(self) -> list[Request]:
        """The reserved requests that will be in the batch as soon as they are admitted."""
        return [self._reserved[request_id] for request_id in self._with_slot]

    def _take_slot(self, request: Request) -> None:
        """Hold a batch slot for a reservation. Again: no effect."""
        if request.request_id not in self._with_slot:
            self._with_slot.add(request.request_id)
            self.scheduler.max_num_active_reqs -= 1

    def _give_slot_back(self, request: Request) -> None:
        if request.request_id in self._with_slot:
            self._with_slot.remove(request.request_id)
            self.scheduler.max_num_active_reqs += 1

    def _grows_next(self, request: Request) -> bool:
        capacity = len(self._blocks(request)) * self.block_size
        return request.num_computed_tokens + 1 + self.scheduler.num_lookahead_tokens > capacity

    def _extend(self, request: Request, num_tokens: int) -> bool:
        return (
            self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens=self._positions(num_tokens),
                delay_cache_blocks=True,
                skip_zeroing_group_ids=(0,),
            )
            is not None
        )

    def _positions(self, num_tokens: int) -> int:
        """Positions a request of `num_tokens` tokens needs to take its next step without allocating."""
        return num_tokens + 1 + self.scheduler.num_lookahead_tokens

    def _blocks(self, request: Request) -> Sequence[Any]:
        return self.kv_cache_manager.get_blocks(request.request_id).blocks[0]

    def _pin(self, blocks: Iterable[Any]) -> Pin:
        pinned = list(blocks)
        self.block_pool.touch(pinned)
        self._num_pins += 1
        return Pin(pinned)


def _adapters(requests: Iterable[Request]) -> set[int]:
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
