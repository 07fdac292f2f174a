# SPDX-License-Identifier: Apache-2.0
"""Blocks, batch slots and places for adapters that are held for requests which may come. Loop thread only.

Whose the blocks are, at each stage: `scheduler_port`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from vllm import __version_tuple__
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.blocks.block_rows import BlockRows, ids_of, present
from vllm_llumnix.engine.blocks.connectors import Connectors
from vllm_llumnix.engine.engine_port import Reserved
from vllm_llumnix.engine.load.load_counters import LoadCounters
from vllm_llumnix.engine.queue.newcomers import Newcomers
from vllm_llumnix.engine.queue.sessions import Sessions
from vllm_llumnix.engine.queue.turns import queue_in_turn
from vllm_llumnix.engine.vllm_types import Block, GroupManager, Request, Scheduler

_COUNTS_FROZEN = __version_tuple__ >= (0, 33)
"""The scheduler counts the LoRA adapters of all running requests; before, of those that it schedules in the step."""


class Reservations:
    """The reservations at one scheduler. `load`, `newcomers`, `connectors` and `sessions` hear of requests
    that it is given."""

    def __init__(
        self,
        scheduler: Scheduler,
        rows: BlockRows,
        load: LoadCounters,
        newcomers: Newcomers,
        connectors: Connectors,
        sessions: Sessions,
    ) -> None:
        self._scheduler = scheduler
        self._rows = rows
        self._load = load
        self._newcomers = newcomers
        self._connectors = connectors
        self._sessions = sessions
        self._manager = scheduler.kv_cache_manager
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers: Sequence[GroupManager] = self._manager.coordinator.single_type_managers
        self._reserved: dict[str, Request] = {}
        self._least_computed: dict[str, int] = {}
        """Tokens behind which a request must come with its KV cache: windows before are not held."""
        self._void: dict[str, tuple[Reason, str]] = {}
        """Reservations that are never admitted, and why."""
        self._counted_in: dict[str, BlockRows] = {}
        """The rows of moves between engines whose rows differ."""
        self._queued: set[str] = set()
        """Reservations for requests that wait at their source."""
        self._with_slot: set[str] = set()
        if scheduler.lora_config is not None:
            # The scheduler's alone: workers in this process read vLLM's.
            scheduler.lora_config = copy.copy(scheduler.lora_config)
            self._max_adapters: int = scheduler.lora_config.max_loras

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reserved

    def __len__(self) -> int:
        return len(self._reserved)

    @property
    def hold_blocks(self) -> bool:
        return bool(self._with_slot)

    def make(
        self,
        request: Request,
        *,
        use_prefix_cache: bool,
        queued: bool = False,
        computed_tokens: int = 0,
        rows: BlockRows | None = None,
    ) -> Reserved:
        """Hold blocks, a batch slot and a place for its LoRA adapter for a request that may come.

        A request that is `queued` at its source has no KV and will queue here too: nothing is held for it, it only has
        to fit an empty cache. Should it start meanwhile, `grow` holds what its KV needs. `computed_tokens`: those of
        which it has KV now; it comes with that of as many, or of more. Of a window nothing is held that such a request
        does not look at, and of a request that comes without KV, in a cache of several groups, nothing at all: it has
        to fit what is free, and gets a slot. `rows`: what the move counts in, if not in this scheduler's own.

        Preempts nobody, and leaves the next in the queue what it needs.
        Raises Refused(destination_full | destination_paused | already_migrating | invalid_request).
        """
        scheduler, rows = self._scheduler, rows or self._rows
        if request.request_id in scheduler.requests or request.request_id in self._reserved:
            raise Refused(Reason.ALREADY_MIGRATING, f"{request.request_id} is here already, or on its way")
        if self._scheduler.pause_state != PauseState.UNPAUSED:
            raise Refused(Reason.DESTINATION_PAUSED, "the destination's scheduler is paused")
        if computed_tokens > request.num_tokens:
            raise Refused(Reason.INVALID_REQUEST, f"{computed_tokens} tokens computed of {request.num_tokens}")
        if queued:
            self._check_capacity(request)
            self._keep(request, rows)
            self._queued.add(request.request_id)
            return Reserved()
        self._check_slot(request)
        if not (rows.is_simple or (rows.takes_kv and computed_tokens)):
            self._check_room(request)
            self._take_slot(request)
            self._keep(request, rows)
            return Reserved()
        hit_tokens, hit_blocks = 0, None
        if use_prefix_cache and rows.takes_hits:
            hit_blocks, hit_tokens, _ = self._manager.get_computed_blocks(request)
            aligned = hit_tokens // rows.size * rows.size
            if aligned != hit_tokens:
                hit_blocks = self._manager.truncate_computed_blocks(hit_blocks, aligned)
                hit_tokens = aligned
        brought = 0 if rows.is_simple else max(0, computed_tokens - hit_tokens)
        allocated = self._allocate(
            request,
            self._positions(request.num_tokens, rows) - hit_tokens - brought,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=hit_blocks if hit_tokens else None,
            num_external_computed_tokens=brought,
            has_scheduled_reqs=True,
            reserved_blocks=self._spoken_for(),
        )
        if not allocated:
            raise self._no_room(self._num_blocks_for(request))
        self._take_slot(request)
        self._keep(request, rows)
        if brought:
            self._least_computed[request.request_id] = computed_tokens
            self._let_go(request, computed_tokens)
        return self._held(request, hit_tokens // rows.size)

    def _keep(self, request: Request, rows: BlockRows) -> None:
        self._reserved[request.request_id] = request
        if rows is not self._rows:
            self._counted_in[request.request_id] = rows

    def blocks(self) -> Iterator[Sequence[Block]]:
        """The blocks of every reservation that has some, one group of layers at a time."""
        tables = (group.req_to_blocks.get(request_id, ()) for request_id in self._reserved for group in self._managers)
        return (blocks for table in tables if (blocks := present(table)))

    def void(self, reason: Reason, detail: str) -> None:
        """Makes all present reservations void: KV that was copied for them is out of date and never admitted."""
        self._void = dict.fromkeys(self._reserved, (reason, detail)) | self._void

    def _require_valid(self, request: Request) -> None:
        if (why := self._void.get(request.request_id)) is not None:
            raise Refused(*why)

    def grow(self, request: Request, num_tokens: int) -> Reserved:
        """Extend a reservation to `num_tokens` tokens and the next. Raises Refused(destination_full), and what it
        has become void for.
        """
        self._require_valid(request)
        if request.request_id not in self._with_slot:
            self._check_slot(request)
        if not self._extend(request, num_tokens):
            raise Refused(Reason.DESTINATION_FULL, "the destination has no blocks left to grow the reservation")
        self._take_slot(request)
        return self._held(request)

    def admit(self, request: Request, computed_tokens: int) -> None:
        """Hand the request to the scheduler; `computed_tokens` of its KV are in place.

        With KV it goes to the head, behind those that were admitted before it: its client is in the middle of a stream,
        or its prefill has begun. Without, it takes its turn (`queue_in_turn`); but one that was preempted, and waited
        there for room, goes to the end. It is long, and where it came first and did not fit, either, everybody behind
        it would wait (benchmarks/experiments.md). The batch slot that was reserved stays its own until it runs.

        Raises Refused, with the reservation unchanged, when the engine cannot take it now.
        """
        scheduler = self._scheduler
        self._require_valid(request)
        if not computed_tokens and request.resumable:
            raise Refused(Reason.INVALID_REQUEST, "between two parts of its input it comes with its KV cache")
        if computed_tokens:
            if computed_tokens < self._least_computed.get(request.request_id, 0):
                raise Refused(Reason.INVALID_REQUEST, f"it comes with {computed_tokens} tokens, fewer than it had")
            self._rows.seat_states(request, computed_tokens)
        if computed_tokens and not self._extend(request, request.num_tokens):
            raise Refused(Reason.DESTINATION_FULL, "the destination has no block left for the next token")
        if computed_tokens and self._rows_for(request).holds_several:
            self._rows.give_back(request, self._positions(request.num_tokens))
        self._connectors.meet(request)
        request.events.clear()
        request.status = RequestStatus.WAITING
        had_slot = self._give_slot_back(request)
        del self._reserved[request.request_id]
        self._least_computed.pop(request.request_id, None)
        self._counted_in.pop(request.request_id, None)
        scheduler.requests[request.request_id] = request
        if computed_tokens:
            request.num_computed_tokens = computed_tokens
            self._let_go(request, computed_tokens)
            self._publish(request, computed_tokens)
            if request.resumable:
                self._sessions.come(request)
            else:
                self._newcomers.queue(request)
        else:
            self._manager.free(request)
            if request.request_id in self._queued and request.num_output_tokens:
                scheduler.waiting.add_request(request)
            else:
                queue_in_turn(scheduler, request)
        self._queued.discard(request.request_id)
        self._load.queued(request)
        if had_slot and not request.resumable:
            self._newcomers.add(request, decodes=computed_tokens == request.num_tokens - 1)

    def start_newcomers_over(self) -> None:
        """Have those that were admitted with their KV cache and do not run yet compute it here, as vLLM has those that
        run: it gets all blocks back."""
        for request in self._newcomers.waiting():
            if request.num_computed_tokens:
                self._scheduler.kv_holding_waiting.remove_requests([request])
                self._manager.free(request)
                request.num_computed_tokens = 0
                queue_in_turn(self._scheduler, request)
                self._load.queued(request)

    def cancel(self, request: Request) -> None:
        """Give a reservation back. No mover may still write its blocks."""
        if self._reserved.pop(request.request_id, None) is not None:
            self._least_computed.pop(request.request_id, None)
            self._counted_in.pop(request.request_id, None)
            self._void.pop(request.request_id, None)
            self._queued.discard(request.request_id)
            self._manager.free(request)
            self._give_slot_back(request)

    def _check_capacity(self, request: Request) -> None:
        """Raises Refused(destination_full) for a request that an empty KV cache could not hold."""
        needed, total = self._num_blocks_for(request), self._pool.num_gpu_blocks - 1
        if needed > total:
            raise Refused(Reason.DESTINATION_FULL, f"{needed} blocks needed, the destination has {total}")

    def _check_room(self, request: Request) -> None:
        """Raises Refused(destination_full)."""
        needed = self._num_blocks_for(request)
        if needed > self._pool.get_num_free_blocks() - self._spoken_for():
            raise self._no_room(needed)

    def _no_room(self, num_blocks: int) -> Refused:
        problem = f"{num_blocks} blocks needed, {self._pool.get_num_free_blocks()} free at the destination"
        if spoken_for := self._spoken_for():
            problem += f", whose own requests need {spoken_for}"
        return Refused(Reason.DESTINATION_FULL, problem)

    def _spoken_for(self) -> int:
        """Blocks that are not for who comes from elsewhere: what prefills under way still need, and the request that is
        next in the queue. Its turn would never come if newcomers took every block that comes free.
        """
        scheduler = self._scheduler
        following = self._num_blocks_for(scheduler.waiting.peek_request()) if scheduler.waiting else 0
        return int(scheduler._inflight_prefill_reserved_blocks()) + following

    def _num_blocks_for(self, request: Request) -> int:
        """Blocks for a whole request that is not here yet. Of several groups, by the rule by which vLLM admits one: a
        window needs no more than it spans."""
        positions = self._positions(request.num_tokens)
        if self._rows.is_simple:
            return self._rows.rows_of(positions)
        manager = self._manager
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
        scheduler, newcomers = self._scheduler, self._newcomers.waiting()
        # vLLM counts in who waits for more input.
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input + len(newcomers)
        if taken >= scheduler.max_num_active_reqs:
            raise Refused(Reason.DESTINATION_FULL, "the destination has no free batch slot")
        if request.lora_request is not None:
            present = adapters_of([*scheduler.running, *scheduler.kv_holding_waiting, *newcomers, *self._expected()])
            if len(present - adapters_of([request])) >= self._max_adapters:
                problem = f"the destination's batch has its {self._max_adapters} LoRA adapters (--max-loras)"
                raise Refused(Reason.DESTINATION_FULL, problem)

    def hold_adapters(self, frozen: Collection[str]) -> None:
        """Keep places for the adapters of requests that are expected, and of those that are frozen.

        The scheduler counts the adapters of its batch, against a limit that it reads at every step. It must not give
        away the place of a frozen request: that may go on, and more adapters than the limit end the engine.
        """
        if self._scheduler.lora_config is None:
            return
        held: set[int] = set()
        if frozen or self._with_slot:
            running = self._scheduler.running
            counted = running if _COUNTS_FROZEN else [one for one in running if one.request_id not in frozen]
            held = adapters_of([*running, *self._expected()]) - adapters_of(counted)
        self._scheduler.lora_config.max_loras = self._max_adapters - len(held)

    def _expected(self) -> list[Request]:
        """The reserved requests that will be in the batch as soon as they are admitted."""
        return [self._reserved[request_id] for request_id in self._with_slot]

    def _take_slot(self, request: Request) -> None:
        """Hold a batch slot for a reservation. Again: no effect."""
        if request.request_id not in self._with_slot:
            self._with_slot.add(request.request_id)
            self._scheduler.max_num_active_reqs -= 1

    def _give_slot_back(self, request: Request) -> bool:
        """Release the request's batch slot. Returns False if it had none."""
        had_slot = request.request_id in self._with_slot
        if had_slot:
            self._with_slot.remove(request.request_id)
            self._scheduler.max_num_active_reqs += 1
        return had_slot

    def _extend(self, request: Request, num_tokens: int) -> bool:
        return self._allocate(request, self._positions(num_tokens, self._rows_for(request)))

    def _allocate(self, request: Request, num_new_tokens: int, **more: Any) -> bool:
        """Takes the blocks, and returns False if there is no room. Workers do not fill these blocks with zeros, as they
        would new ones of some models: bytes may have arrived there by then."""
        recorded = [len(manager.new_block_ids) for manager in self._managers]
        allocated = self._manager.allocate_slots(
            request, num_new_tokens=num_new_tokens, delay_cache_blocks=True, **more
        )
        for manager, before in zip(self._managers, recorded, strict=True):
            del manager.new_block_ids[before:]
        if allocated is None:
            return False
        tables = self._manager.get_blocks(request.request_id).blocks
        own = [block for table in tables for block in present(table) if block.block_hash is None]
        self._connectors.give_out(ids_of(own))
        return True

    def _let_go(self, request: Request, computed_tokens: int) -> None:
        """Frees the blocks that a window has left behind, as vLLM's next step would. It was reserved when the window
        was there, and has not been copied since: it must not become cache."""
        self._manager.remove_skipped_blocks(request.request_id, computed_tokens, request.num_prompt_tokens)

    def _publish(self, request: Request, computed_tokens: int) -> None:
        """Puts the blocks that have arrived into the prefix cache. The blocks behind them are as new as any that vLLM
        gives out."""
        manager, rows = self._manager, self._rows
        if rows.caches_prefixes:
            manager.cache_blocks(request, computed_tokens // rows.size * rows.size)
        for group in self._managers:
            if group.records_new_block_ids:
                unwritten = group.req_to_blocks[request.request_id][-(-computed_tokens // group.block_size) :]
                group.new_block_ids.extend(ids_of(present(unwritten)))

    def _held(self, request: Request, num_hits: int = 0) -> Reserved:
        rows = self._rows_for(request)
        num_rows = rows.count(request)
        blocks = ids_of(rows.blocks(request, num_rows * rows.size))
        return Reserved(num_hits, num_rows, blocks, ids_of(rows.states_to_come(request)), rows.num_held(request))

    def _rows_for(self, request: Request) -> BlockRows:
        return self._counted_in.get(request.request_id, self._rows)

    def _positions(self, num_tokens: int, rows: BlockRows | None = None) -> int:
        """Positions a request of `num_tokens` tokens needs to take its next step without allocating. Where a row has
        several blocks of a group, to the end of the last row: of a row that is held every block is there to be filled,
        up to the longest request that there can be."""
        positions = num_tokens + 1 + int(self._scheduler.num_lookahead_tokens)
        return rows.rows_of(positions) * rows.size if rows and rows.holds_several else positions


def adapters_of(requests: Iterable[Request]) -> set[int]:
    """The ids of their LoRA adapters."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
