# SPDX-License-Identifier: Apache-2.0
"""Operations of a migration on vLLM's scheduler and block pool. Every method runs on the engine's loop, between two
steps.

Who owns a block during a move (S source, D destination; `[from, to)` are rows of the request, see `block_rows`):

    S, round k      [copied, frontier)   scheduler, plus one reference of ours (a pin) until the round's result is in
    S, frozen       [0, end)             scheduler, plus a pin on every block until the hand-over is settled
    D, reserved     [0, hits)            prefix cache hits: shared, referenced by the reservation
                    [hits, reserved)     ours alone; unknown to the scheduler's queues, unhashed. A step in flight may
                                         still write them, for a request that has just lost them: whoever asks for
                                         blocks is answered behind that step (`EngineLoop.call_for_blocks`)
    D, admitted     [0, end)             scheduler; hashes of full blocks are published at this moment, not before
    D, abandoned    as reserved, until every mover has reported that it no longer writes; only then freed

A pin is a reference in the block pool. vLLM may finish, abort or preempt the request meanwhile: the bytes stay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.move.ledger import audit
from vllm_llumnix.engine.blocks.block_rows import BlockRows, ids_of, present
from vllm_llumnix.engine.blocks.cached_blocks import CachedBlocks
from vllm_llumnix.engine.blocks.connectors import Connectors
from vllm_llumnix.engine.blocks.latest_states import LatestStates
from vllm_llumnix.engine.blocks.reservations import Reservations, adapters_of
from vllm_llumnix.engine.engine_port import Frontier, FrozenRequest, Pin
from vllm_llumnix.engine.load.scheduler_events import SchedulerEvents, counters_of
from vllm_llumnix.engine.queue.newcomers import Newcomers
from vllm_llumnix.engine.queue.sessions import Sessions
from vllm_llumnix.engine.queue.shortage import Shortage
from vllm_llumnix.engine.queue.turns import Ageing, protect, queue_in_turn
from vllm_llumnix.engine.requests.request_state import BETWEEN_PARTS, first_holding, why_not_now
from vllm_llumnix.engine.vllm_types import Block, Request, Scheduler

_NEVER = 1 << 60
"""A step number that is never reached: a request with this `next_decode_eligible_step` is skipped by the scheduler."""


class SchedulerPort:
    """The scheduler and block pool of one engine, as a migration sees them: here what happens to requests that are in
    it; `reservations` and `newcomers` are those that come.

    `load`, `tokens` and `cached_blocks` follow the scheduler from here on: it has no request yet. `ageing_s`: see
    `turns.Ageing`.
    """

    def __init__(self, scheduler: Scheduler, ageing_s: float = 0.0) -> None:
        self.scheduler = scheduler
        self.cached_blocks = CachedBlocks(scheduler)
        self.newcomers = Newcomers(scheduler)
        self._ageing = Ageing(scheduler, ageing_s)
        self.rows = BlockRows(scheduler)
        self.latest_states = LatestStates(scheduler, self.rows)
        self.events = SchedulerEvents(scheduler, counters_of(scheduler), self.latest_states)
        self.load, self.tokens = self.events.load, self.events.tokens
        self.connectors = Connectors(scheduler)
        self.sessions = Sessions(scheduler)
        self.reservations = Reservations(
            scheduler, self.rows, self.load, self.newcomers, self.connectors, self.sessions
        )
        self.shortage = Shortage(
            scheduler, self.load.num_preemptions, holds=self.rows.is_simple, sizes=self.rows.column_sizes
        )
        self.shortage.on_change = self.load.touch
        self.kv_cache_manager = scheduler.kv_cache_manager
        self.block_pool = scheduler.kv_cache_manager.block_pool
        self.block_size = self.rows.size
        self._frozen: dict[str, Request] = {}
        self._eligible: dict[str, int] = {}
        """`next_decode_eligible_step` of frozen requests as vLLM had set it: with a pipeline, a stage gets a sampled
        token some steps later, and the request must not be decoded before."""
        self._parked: dict[str, Request] = {}
        self._pins: set[Pin] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache. Block 0 is vLLM's null block."""
        return int(self.block_pool.num_gpu_blocks - 1)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_model_len(self) -> int:
        return int(self.scheduler.max_model_len)

    @property
    def loses_states_by_waiting(self) -> bool:
        return self.latest_states.are_lost_by_waiting

    def touch(self) -> None:
        self.load.touch()

    def publish_cache_events(self) -> None:
        """Have vLLM's KV events of what was done between two steps published now. vLLM publishes at the end of a step,
        and the next one may be long in coming: followers would believe in blocks that are already written anew."""
        if events := self.kv_cache_manager.take_events():
            self.scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def audit_idle(self) -> list[str]:
        """Faults of the block pool while nobody holds a block; nothing if somebody may."""
        if self.scheduler.requests or len(self.reservations) or self._pins:
            return []
        pool = self.block_pool
        if pool.get_num_free_blocks() == pool.num_gpu_blocks - 1:
            return []
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        return audit(pool.num_gpu_blocks, [0, *free], {})

    def find(self, request_id: str) -> Request:
        """Raises Refused(unknown_request)."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            raise Refused(Reason.UNKNOWN_REQUEST, f"no request {request_id} here")
        return request

    def why_not_now(self, request: Request) -> tuple[Reason, str] | None:
        """Why this request cannot be moved at this moment; None if it can."""
        if request.resumable and self.rows.num_states:
            return Reason.NOT_PORTABLE, "its input comes in parts, and its states change with every step"
        return why_not_now(request) or self.connectors.why_not_now(request)

    def frontier(self, request: Request, from_block: int, known_output: int, rows: BlockRows | None = None) -> Frontier:
        """Pin the final full rows from `from_block` on, counted in `rows`; tokens from output index `known_output` on
        come along.

        Raises Refused when the request cannot be copied at this moment.
        """
        if (problem := self.why_not_now(request)) is not None:
            raise Refused(*problem)
        final_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        rows = rows or self.rows
        frontier_blocks = final_tokens // rows.size
        blocks = rows.blocks(request, frontier_blocks * rows.size, from_block)
        return Frontier(
            frontier_blocks=frontier_blocks,
            num_tokens=request.num_tokens,
            block_ids=ids_of(blocks),
            output_token_ids=request.output_token_ids[known_output:],
            pin=self._pin(blocks),
        )

    def freeze(self, request: Request) -> None:
        """Stop scheduling the request.

        A running one keeps its slot and its blocks, and a step in flight still emits its token; a queued one leaves the
        queue until `unfreeze`. One that waits for more input gets none until `sessions` has it go on.
        """
        self._eligible.setdefault(request.request_id, request.next_decode_eligible_step)
        request.next_decode_eligible_step = _NEVER
        self._frozen[request.request_id] = request
        if request.status == RequestStatus.RUNNING:
            protect(self.scheduler, request)
        elif request.status == BETWEEN_PARTS:
            self.sessions.hold(request)
        else:
            self._park(request)

    def drained(
        self, request: Request, known_output: int, *, with_kv: bool = True, rows: BlockRows | None = None
    ) -> FrozenRequest | None:
        """The frozen request, all its blocks pinned if they are to be copied, counted in `rows`, or None while a step
        in flight still works on it. It is asked for at every turn of the loop, and may be given one step more to come
        to where it can be copied."""
        computed = request.num_computed_tokens if with_kv else 0
        is_in_flight = bool(request.num_in_flight_tokens or request.num_stale_output_tokens)
        if not is_in_flight and computed and self.latest_states.of(request).is_put_elsewhere:
            if request.request_id in self._frozen:
                self.unfreeze(request)
            return None
        if request.request_id not in self._frozen:
            self.freeze(request)
        if is_in_flight:
            return None
        rows = rows or self.rows
        blocks = rows.blocks(request, computed)
        latest = self.latest_states.of(request)
        num_accepted = latest.num_accepted if computed else 0
        states = self.rows.states(request, latest.num_tokens) if computed else []
        accepted = self.rows.states(request, latest.num_tokens, num_accepted) if num_accepted else []
        return FrozenRequest(
            request=request,
            num_tokens=request.num_tokens,
            computed_tokens=request.num_computed_tokens,
            num_blocks=rows.rows_of(computed),
            block_ids=ids_of(blocks),
            state_ids=ids_of(states),
            output_token_ids=request.output_token_ids[known_output:],
            pin=self._pin([*blocks, *states, *accepted]),
            num_accepted=num_accepted,
            accepted_ids=ids_of(accepted),
        )

    def unfreeze(self, request: Request) -> None:
        """Let the request run again, from where it was frozen, and no sooner than vLLM would have let it."""
        request.next_decode_eligible_step = self._eligible.pop(request.request_id, request.next_decode_eligible_step)
        self._frozen.pop(request.request_id, None)
        if self._parked.pop(request.request_id, None) is not None:
            queue_in_turn(self.scheduler, request)

    def start_over(self, request: Request) -> None:
        """Have a request that runs be computed again from its tokens, in other blocks: as preempted by vLLM."""
        if request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, time.monotonic())

    def forget(self, request: Request) -> None:
        """vLLM has finished a frozen request by itself."""
        self._eligible.pop(request.request_id, None)
        self._frozen.pop(request.request_id, None)
        self._parked.pop(request.request_id, None)
        self.sessions.ended(request)

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
        """Keeps the bytes of all its blocks until `unpin`, whatever vLLM does with the request."""
        return self._pin(self.rows.blocks(request, request.num_computed_tokens))

    def unpin(self, pin: Pin) -> None:
        self._pins.remove(pin)
        self.block_pool.free_blocks(reversed(pin.blocks))

    @property
    def has_frozen(self) -> bool:
        return bool(self._frozen)

    @property
    def holds_blocks(self) -> bool:
        """True if a move has a block, at either end."""
        return any(pin.blocks for pin in self._pins) or any(self.reservations.blocks())

    @contextlib.contextmanager
    def held_aside(self) -> Iterator[None]:
        """Hide the blocks that moves hold from the pool. Do not allocate inside this context."""
        held = [*(pin.blocks for pin in self._pins), *self.reservations.blocks()]
        for blocks in held:
            self.block_pool.free_blocks(blocks)
        try:
            yield
        finally:
            for blocks in held:
                self.block_pool.touch(blocks)

    # Every step

    def before_step(self) -> None:
        """Make room for newcomers, raise who waits for long, and keep places for adapters."""
        self._ageing.before_step()
        self.newcomers.before_step()
        self.reservations.hold_adapters(self._frozen)

    def running_adapters(self) -> set[int]:
        """The adapters of the batch, those of frozen requests included."""
        return adapters_of(self.scheduler.running)

    @property
    def paused(self) -> bool:
        return bool(self.scheduler.pause_state != PauseState.UNPAUSED)

    def has_runnable(self) -> bool:
        """True if the next step would compute something for a request."""
        scheduler = self.scheduler
        if scheduler.waiting or first_holding(scheduler) is not None:
            return True
        return any(request.request_id not in self._frozen for request in scheduler.running)

    def only_frozen(self) -> bool:
        """True if every request of this engine is frozen, so that a step would compute nothing and tell nobody
        anything."""
        if not self._frozen or self.scheduler.finished_req_ids or self.has_runnable():
            return False
        return not self.connectors.have_work()

    def _park(self, request: Request) -> None:
        """Take a queued request off the queue; it is still one of the scheduler's requests."""
        self.scheduler.waiting.remove_requests([request])
        self.scheduler.deferred_waiting.discard(request)
        self._parked[request.request_id] = request

    def _pin(self, blocks: Sequence[Block]) -> Pin:
        pinned = present(blocks)
        self.block_pool.touch(pinned)
        self._pins.add(pin := Pin(pinned))
        return pin
