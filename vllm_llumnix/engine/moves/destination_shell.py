# SPDX-License-Identifier: Apache-2.0
"""A request that may come: the shell around the destination's state machine. Llumlet thread only.

A peer's call becomes an event; it is answered when the machine says so. The same call again joins the first or gets its
answer again. Nothing of a request is visible to the engine's scheduler before the machine says Admit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from llumlet.contract.bridge import HANDOVERS, epoch_of, reason_number
from llumlet.contract.errors import LlumletError
from llumlet.contract.types import (
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    CopyRoundResponse,
    Handover,
    Mode,
    ReserveRequest,
    ReserveResponse,
)
from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.effects import Admit
from llumlet.protocol.errors import LocalProtocolError, MigrationError, Reason, Refused
from llumlet.protocol.events import Call
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.move.destination import Destination, State
from llumlet.protocol.move.plan import Terms
from vllm_llumnix import faults
from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.compatibility.way import why_request_not_portable
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import EnginePort
from vllm_llumnix.engine.moves.destination_blocks import DestinationBlocks
from vllm_llumnix.engine.moves.shell import Callers, Shell, settle_response
from vllm_llumnix.engine.requests.builder import RequestBuilder
from vllm_llumnix.engine.requests.request_state import Residence, repeat_from
from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.errors import TransportError

TURN_SECONDS = 1.0
"""Seconds that a request waits for the grammars of others from its source: it holds a place that other moves could
have."""


class DestinationShell(Shell[Destination]):
    """A request that may come, counted in `rows`. `end_here` aborts requests of this engine, by id; `on_event` is
    called after each event of the machine."""

    def __init__(
        self,
        context: EngineContext,
        builder: RequestBuilder,
        terms: Terms,
        rows: BlockRows,
        handover: Handover,
        end_here: Callable[[list[str]], None],
        on_event: Callable[[DestinationShell], None],
    ) -> None:
        super().__init__(Destination(terms))
        self._context = context
        self._loop: EnginePort = context.loop
        self._builder = builder
        self._end_here = end_here
        self._on_event = on_event
        self.migration_id = MigrationId(handover.migration_id)
        self.request_id = handover.request_id
        self.source_instance = ""
        self.source_address = ""
        self.request: Request | None = None
        self.residence: Residence | None = None
        self.rows = rows
        self.blocks = DestinationBlocks(context, rows)
        self.tokens_alone = ""
        """Why the KV cache cannot be brought here, if the request may come without."""
        self.phase_ms: dict[str, float] = {}
        self.copied_bytes = 0
        self.recomputed_tokens = 0
        self._offer: ReserveRequest | None = None
        self._last_round = 0
        self._commit_seen = False
        self._admission = Admission(context)
        self._lease_end = 0.0
        self.callers = Callers()

    async def ask(self, kind: Hashable, event: on.DestinationEvent) -> Any:
        """Feed a peer's message and wait for its answer. Raises LlumletError for what the machine refuses."""
        answer = self.callers.wait(kind)
        try:
            self.feed(event)
        except LocalProtocolError as error:
            self.callers.give_up(kind, answer)
            raise LlumletError(reason_number(Reason.INVALID_REQUEST), str(error)) from error
        return await answer

    def _advanced(self) -> None:
        self._on_event(self)
        self._shed()

    def _shed(self) -> None:
        """Drops what is large of a settled move, the request's tokens and blocks: its answers are kept for long."""
        if self.machine.state in (State.COMMITTED, State.BARRED) and not self._tasks:
            self.request = self._offer = None
            self.blocks.shed()
            if self.machine.closed or self.machine.state is State.BARRED:
                self.residence = None

    def take_offer(self, request: ReserveRequest) -> None:
        if self._offer is None and self.machine.state is State.NEW:
            self._offer = request
            self.source_instance, self.source_address = request.src_engine_id, request.src_address

    def take_round(self, request: CopyRoundRequest) -> on.DestinationEvent:
        """Takes the block ids and tokens of a round, once, and returns the machine's event."""
        if request.round > self._last_round:
            self._last_round = request.round
            self.blocks.find_at_source(request.from_block, request.to_block, request.block_ids)
            self._append(request.new_token_ids)
        return on.RoundRequested(request.round, request.from_block, request.to_block, request.num_tokens)

    def take_commit(self, request: CommitRequest) -> on.DestinationEvent:
        """Raises Refused, the first time only: then the move is to be called off."""
        num_rows = self.rows.rows_of(request.computed_tokens)
        if not self._commit_seen:
            self._commit_seen = True
            self.blocks.find_at_source(request.from_block, num_rows, request.block_ids)
            if request.computed_tokens:
                accepted = request.num_accepted_drafts
                self.blocks.find_states_at_source(request.state_ids, accepted, request.accepted_state_ids)
            self._append(request.new_token_ids)
            if self.request is not None:
                recomputed = self.request.num_tokens - request.computed_tokens - 1
                if recomputed < 0 or request.base != self.request.num_output_tokens:
                    raise Refused(
                        Reason.INVALID_REQUEST,
                        f"{request.computed_tokens} tokens computed and {request.base} put out, of "
                        f"{self.request.num_tokens} and {self.request.num_output_tokens}",
                    )
                self.recomputed_tokens = recomputed if self.request.num_output_tokens else 0
        return on.CommitRequested(
            epoch_of(request.epoch),
            request.base,
            request.computed_tokens,
            request.from_block,
            num_rows,
        )

    def _append(self, token_ids: Sequence[int]) -> None:
        """The tokens that the source produced since its last message. Raises Refused."""
        if self.request is not None and token_ids:
            self._builder.append(self.request, list(token_ids))

    def _perform(self, effect: do.Effect) -> None:
        answer = self.callers.answer
        match effect:
            case do.ReserveBlocks():
                self._spawn(self._reserve())
            case do.GrowReservation(num_tokens=num_tokens):
                self._spawn(self._grow(num_tokens))
            case do.Pull():
                self._spawn(self._pull(effect))
            case do.StopPull(job=job):
                self._spawn(self._stop(job))
            case do.Admit():
                self._spawn(self._admit(effect))
            case do.RevokeAdmit():
                if self._admission.revoke():
                    self.feed(on.AdmitFailed(Reason.BARRED, "revoked before the loop began"))
            case do.FreeReservation():
                if self.request is not None:
                    self._loop.call(self._loop.port.reservations.cancel, self.request)
            case do.AbortAdmitted():
                self._end_here([self.request_id])
            case do.AnswerReserve():
                answer(Call.RESERVE, self._reserve_response(effect))
            case do.RefuseReserve(reason=reason, detail=detail):
                answer(Call.RESERVE, LlumletError(reason_number(reason), detail))
            case do.AnswerRound():
                answer((Call.ROUND, effect.round), self._round_response(effect))
            case do.RefuseRound(round=number, reason=reason, detail=detail):
                answer((Call.ROUND, number), LlumletError(reason_number(reason), detail))
            case do.AnswerCommit():
                answer(Call.COMMIT, self._commit_response(effect))
            case do.AnswerSettle(call=call, state=state, reason=reason):
                answer(call, settle_response(state, reason, self._context.identity.incarnation))

    # The loop and the movers

    async def _reserve(self) -> None:
        context, offer = self._context, self._offer
        assert offer is not None
        try:
            queued = offer.method == Mode.WAITING
            self.blocks.come_from(offer.source_memory, offer.row_tokens)
            if offer.method != Mode.RECOMPUTE:
                may_stay = queued or offer.tokens_will_do
                self.tokens_alone = await self.blocks.choose_transport(may_stay=may_stay)
            state, self.residence = await self._builder.read(offer.request_state)
            self.request = await self._builder.build(
                state, self.residence, offer.src_engine_id, patience_s=TURN_SECONDS
            )
            if self.request.request_id != self.request_id:
                raise Refused(Reason.INVALID_REQUEST, "the request state names another request")
            if (problem := why_request_not_portable(self.request, context.identity)) is not None:
                raise Refused(Reason.NOT_PORTABLE, problem)
            # Connect to the origin now, not when its client waits for the first token from here.
            context.relay.client_index(state.origin)
            computed_tokens = 0 if self.tokens_alone or offer.method == Mode.RECOMPUTE else offer.computed_tokens
            self.blocks.here = await self._loop.call_for_blocks(
                self._loop.reserve,
                self.request,
                queued,
                not context.config.exact,
                computed_tokens,
                self.rows,
                behind_outputs=True,
            )
        except MigrationError as error:
            self.feed(on.ReserveFailed(error.reason, error.detail))
            return
        except TransportError as error:
            self.feed(on.ReserveFailed(Reason.TRANSPORT_UNAVAILABLE, str(error)))
            return
        finally:
            self._offer = None
        await self._loop.warm_up()
        faults.hit("destination.reserved")
        self.feed(on.BlocksReserved(self.blocks.here.num_hits, self.blocks.here.num_rows))

    async def _grow(self, num_tokens: int) -> None:
        if self.tokens_alone:
            self.feed(on.GrowFailed(Reason.NOT_PORTABLE, self.tokens_alone))
            return
        try:
            grow = self._loop.port.reservations.grow
            self.blocks.here = await self._loop.call_for_blocks(grow, self.request, num_tokens)
        except MigrationError as error:
            self.feed(on.GrowFailed(error.reason, error.detail))
            return
        self.feed(on.Grown(self.blocks.here.num_rows))

    async def _pull(self, effect: do.Pull) -> None:
        final = self.machine.state is State.COMMITTING
        began = time.perf_counter()
        try:
            # The lease began earlier, so it is what ends a copy that takes too long.
            copied = await self.blocks.pull(effect, final=final, deadline_s=self.machine.terms.lease_s)
        except Refused as error:
            self.feed(on.PullFailed(effect.job, error.reason, error.detail))
            return
        except TransportError as error:
            self.feed(on.PullFailed(effect.job, Reason.TRANSFER_FAILED, str(error)))
            return
        seconds = time.perf_counter() - began
        if final:
            self.phase_ms["last_copy"] = seconds * 1e3
        self.copied_bytes = copied
        self.feed(on.PullDone(effect.job, copied, seconds, lease_valid=time.monotonic() < self._lease_end))

    async def _stop(self, job: int) -> None:
        """The blocks are not given back while a mover may write them."""
        await self.blocks.stop(job)
        self.feed(on.PullQuiesced(job))

    async def _admit(self, effect: do.Admit) -> None:
        assert self.request is not None
        assert self.residence is not None
        cached_tokens = self.machine.hit_blocks * self.machine.terms.block_size
        began = time.perf_counter()
        try:
            await self._admission.run(self.request, self.residence, effect, cached_tokens)
        except MigrationError as error:
            self.feed(on.AdmitFailed(error.reason, error.detail))
            return
        self.phase_ms["admit"] = (time.perf_counter() - began) * 1e3
        faults.hit("destination.admitted")
        self.feed(on.Admitted())

    # Answers

    def _reserve_response(self, effect: do.AnswerReserve) -> ReserveResponse:
        return ReserveResponse(
            hit_blocks=effect.hit_blocks,
            lease_s=effect.lease_s,
            dst_incarnation=self._context.identity.incarnation,
            transport=self.blocks.transport,
            tokens_alone=self.tokens_alone,
            row_tokens=self.rows.size if self.blocks.pairs else 0,
        )

    def _round_response(self, effect: do.AnswerRound) -> CopyRoundResponse:
        return CopyRoundResponse(
            round=effect.round, copied_bytes=effect.num_bytes, seconds=effect.seconds, lease_s=effect.lease_s
        )

    def _commit_response(self, effect: do.AnswerCommit) -> CommitResponse:
        return CommitResponse(
            state=HANDOVERS[effect.state],
            reason=reason_number(effect.reason),
            detail=effect.detail,
            copied_bytes=self.copied_bytes,
            recomputed_tokens=self.recomputed_tokens,
            phase_ms=self.phase_ms,
            dst_incarnation=self._context.identity.incarnation,
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(coroutine).add_done_callback(lambda _: self._shed())

    def _set_timer(self, name: str, seconds: float) -> None:
        if name == "lease":
            self._lease_end = time.monotonic() + seconds
        super()._set_timer(name, seconds)


class Admission:
    """The admission of one request: the loop begins it, or it is revoked, whichever comes first."""

    def __init__(self, context: EngineContext) -> None:
        self._loop: EnginePort = context.loop
        self._relay = context.relay
        self._forwarding = context.forwarding
        self._lock = threading.Lock()
        self._decided = False

    def revoke(self) -> bool:
        """Revokes the admission. Returns True if that was in time: then the request is not admitted. Any thread."""
        return self._decide()

    async def run(self, request: Request, residence: Residence, under: Admit, cached_tokens: int) -> None:
        """Returns when the scheduler has the request. `cached_tokens`: its leading tokens of which the prefix cache
        here held the KV.

        Raises Refused, and then nothing of it is here.
        """
        assert residence.origin is not None
        # Of a prompt that the source has begun, the prefix cache here may hold more: nothing writes shared blocks.
        computed_tokens = max(under.computed_tokens, cached_tokens) if under.computed_tokens else 0
        residence.epoch, residence.last_hop = under.epoch, under.epoch.hop
        residence.base = residence.next_index = residence.num_earlier + under.base
        residence.repeat = repeat_from(request)
        residence.handover_open = residence.admitting = True
        try:
            request.client_index = self._relay.client_index(residence.origin)
            self._relay.welcome(request.request_id, residence)
            await self._loop.call(self._admit, request, computed_tokens)
        except MigrationError:
            self._relay.farewell(request.request_id, residence)
            raise
        residence.admitting = False
        self._forwarding.came_back(request.request_id)
        if residence.num_parts:
            # What has come for it meanwhile was dropped, and is sent to who has it.
            self._relay.beat(residence.origin)

    def _admit(self, request: Request, computed_tokens: int) -> None:
        """Loop thread."""
        if not self._decide():
            raise Refused(Reason.BARRED, "revoked")
        self._loop.admit(request, computed_tokens)

    def _decide(self) -> bool:
        """True for the first caller only."""
        with self._lock:
            first, self._decided = not self._decided, True
            return first
