# SPDX-License-Identifier: Apache-2.0
"""Requests on their way in: the shell around the destination's state machine. Bypass thread only.

A peer's call becomes an event; it is answered when the machine says so. The same call again joins the first or gets its
answer again. Nothing of a request is visible to the engine's scheduler before the machine says Admit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.v1.request import Request

from llumlet.bridge import HANDOVERS, epoch_of, reason_number
from llumlet.errors import LlumletError
from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.destination import Destination, State
from llumlet.protocol.errors import LocalProtocolError, MigrationError, Reason, Refused
from llumlet.protocol.events import Call, Settlement
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.limits import Limits, Slots
from llumlet.protocol.plan import Terms
from llumlet.types import (
    AbortMigrateInRequest,
    AbortMigrateInResponse,
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    CopyRoundResponse,
    Handover,
    Mode,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
)
from vllm_llumnix import faults
from vllm_llumnix.engine.builder import RequestBuilder
from vllm_llumnix.engine.kvconn import KVConnection
from vllm_llumnix.engine.memory import Movers, SourceMemory, decode_memory
from vllm_llumnix.engine.relay import Relay
from vllm_llumnix.engine.request_state import Residence, repeat_from
from vllm_llumnix.engine.way import why_request_not_portable
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.messages import PeerMemory

if TYPE_CHECKING:
    from vllm_llumnix.engine.bypass import Bypass
    from vllm_llumnix.engine.departures import Departures

logger = logging.getLogger("vllm.llumnix")

TURN_SECONDS = 1.0
"""How long a request waits for the grammars of others from its source: it holds a place that other moves could have."""


class Admission:
    """Whether an Admit that waits for the loop happens: the loop begins it, or it is revoked, whichever comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decided = False

    def claim(self) -> bool:
        """True for the first caller only."""
        with self._lock:
            first, self._decided = not self._decided, True
            return first


class IncomingMove:
    """One request that may come."""

    def __init__(self, arrivals: Arrivals, handover: Handover) -> None:
        self.arrivals = arrivals
        self.migration_id = MigrationId(handover.migration_id)
        self.request_id = handover.request_id
        self.source_incarnation = handover.src_incarnation
        self.source_instance = ""
        self.source_address = ""
        self.machine = Destination(arrivals.terms)
        self.request: Request | None = None
        self.residence: Residence | None = None
        self.transport = ""
        self.tokens_alone = ""
        """Why the KV cache cannot be brought here, if the request may come without."""
        self.began = time.monotonic()
        self.phase_ms: dict[str, float] = {}
        self.copied_bytes = 0
        self.recomputed_tokens = 0
        self._offer: ReserveRequest | None = None
        self._last_round = 0
        self._memory: SourceMemory | None = None
        self._block_ids: list[int] = []
        self._source_blocks: dict[int, int] = {}
        self._jobs: dict[int, int] = {}
        self._commit_seen = False
        self._admission = Admission()
        self._lease_end = 0.0
        self._waiting: dict[Hashable, list[asyncio.Future[Any]]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._block_ids)

    async def ask(self, kind: Hashable, event: on.DestinationEvent) -> Any:
        """Feed a peer's message and wait for its answer. Raises LlumletError for what the machine refuses."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(kind, []).append(answer)
        try:
            self.feed(event)
        except LocalProtocolError as error:
            self._waiting[kind].remove(answer)
            raise LlumletError(reason_number(Reason.INVALID_REQUEST), str(error)) from error
        return await answer

    def feed(self, event: on.DestinationEvent) -> None:
        for effect in self.machine.on(event):
            self._perform(effect)
        if self.machine.settlement is not Settlement.PENDING:
            self.arrivals.settled(self)
        if self.machine.over:
            self.arrivals.forget(self)
        self._shed()

    def _shed(self) -> None:
        """Of a move that is settled, answers are kept for long: the request's tokens and blocks must not be."""
        if self.machine.state in (State.COMMITTED, State.BARRED) and not self._tasks:
            self.request = self._memory = self._offer = None
            self._block_ids, self._source_blocks = [], {}
            if self.machine.closed or self.machine.state is State.BARRED:
                self.residence = None

    def take_offer(self, request: ReserveRequest) -> None:
        if self._offer is None and self.machine.state is State.NEW:
            self._offer = request
            self.source_instance, self.source_address = request.src_engine_id, request.src_address

    def take_round(self, request: CopyRoundRequest) -> on.DestinationEvent:
        """What a round brings beside the machine's event, once."""
        if request.round > self._last_round:
            self._last_round = request.round
            self._take(request.from_block, request.block_ids, request.new_token_ids)
        return on.RoundRequested(request.round, request.from_block, request.to_block, request.num_tokens)

    def take_commit(self, request: CommitRequest) -> on.DestinationEvent:
        """Raises Refused, the first time only: then the move is to be called off."""
        if not self._commit_seen:
            self._commit_seen = True
            self._take(request.from_block, request.block_ids, request.new_token_ids)
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
            request.from_block + len(request.block_ids),
        )

    def _take(self, from_block: int, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """The source's block ids, and the tokens it produced since its last message. Raises Refused."""
        self._source_blocks.update(enumerate(block_ids, from_block))
        if self.request is not None and token_ids:
            self.arrivals.builder.append(self.request, list(token_ids))

    def _perform(self, effect: do.DestinationEffect) -> None:
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
                if self._admission.claim():
                    self.feed(on.AdmitFailed(Reason.BARRED, "revoked before the loop began"))
            case do.FreeReservation():
                if self.request is not None:
                    self.arrivals.kvconn.call(self.arrivals.kvconn.port.cancel_reservation, self.request)
            case do.AbortAdmitted():
                self.arrivals.abort_here([self.request_id])
            case do.AnswerReserve():
                self._answer(Call.RESERVE, self._reserve_response(effect))
            case do.RefuseReserve(reason=reason, detail=detail):
                self._answer(Call.RESERVE, LlumletError(reason_number(reason), detail))
            case do.AnswerRound():
                self._answer((Call.ROUND, effect.round), self._round_response(effect))
            case do.RefuseRound(round=number, reason=reason, detail=detail):
                self._answer((Call.ROUND, number), LlumletError(reason_number(reason), detail))
            case do.AnswerCommit():
                self._answer(Call.COMMIT, self._commit_response(effect))
            case do.AnswerSettle(call=call, state=state, reason=reason):
                self._answer(call, self.arrivals.settlement(state, reason))
            case do.SetTimer(name=name, seconds=seconds):
                self._set_timer(name, seconds)
            case do.ClearTimer(name=name):
                self._clear_timer(name)

    # The loop and the movers

    async def _reserve(self) -> None:
        arrivals, offer = self.arrivals, self._offer
        assert offer is not None
        try:
            self._memory = decode_memory(offer.source_memory)
            bypass = arrivals.bypass
            self._memory.require_same(bypass.identity.digest, bypass.engine.get_weight_version())
            if offer.method != Mode.RECOMPUTE:
                self.tokens_alone = await self._choose_transport(self._memory, offer)
            state, self.residence = await arrivals.builder.read(offer.request_state)
            self.request = await arrivals.builder.build(
                state, self.residence, offer.src_engine_id, patience_s=TURN_SECONDS
            )
            if self.request.request_id != self.request_id:
                raise Refused(Reason.INVALID_REQUEST, "the request state names another request")
            if (problem := arrivals.why_not_portable(self.request)) is not None:
                raise Refused(Reason.NOT_PORTABLE, problem)
            # Connect to the origin now, not when its client waits for the first token from here.
            arrivals.relay.client_index(self.residence.origin)
            hit_blocks, self._block_ids = await arrivals.kvconn.call_for_blocks(
                arrivals.reserve_on_loop, self.request, offer.method == Mode.WAITING, behind_outputs=True
            )
        except MigrationError as error:
            self.feed(on.ReserveFailed(error.reason, error.detail))
            return
        except TransportError as error:
            self.feed(on.ReserveFailed(Reason.TRANSPORT_UNAVAILABLE, str(error)))
            return
        finally:
            self._offer = None
        await arrivals.kvconn.warm_up()
        faults.hit("destination.reserved")
        self.feed(on.BlocksReserved(hit_blocks, len(self._block_ids)))

    async def _choose_transport(self, memory: SourceMemory, offer: ReserveRequest) -> str:
        """Why there is none, if the request may come without its KV cache. Raises Refused, TransportError if not."""
        arrivals = self.arrivals
        if (reason := arrivals.bypass.identity.kv_unsupported) is not None:
            return f"at the destination: {reason}"
        for rank in memory.ranks:
            arrivals.require_reachable(rank)
        try:
            self.transport = await arrivals.movers.probe(memory)
        except (Refused, TransportError) as error:
            if offer.tokens_will_do or offer.method == Mode.WAITING:
                return str(error)
            raise
        return ""

    async def _grow(self, num_tokens: int) -> None:
        kvconn = self.arrivals.kvconn
        if self.tokens_alone:
            self.feed(on.GrowFailed(Reason.NOT_PORTABLE, self.tokens_alone))
            return
        try:
            self._block_ids = await kvconn.call_for_blocks(kvconn.port.grow, self.request, num_tokens)
        except MigrationError as error:
            self.feed(on.GrowFailed(error.reason, error.detail))
            return
        self.feed(on.Grown(len(self._block_ids)))

    async def _pull(self, effect: do.Pull) -> None:
        arrivals = self.arrivals
        assert self._memory is not None
        final = self.machine.state is State.COMMITTING
        began = time.perf_counter()
        blocks = range(effect.from_block, effect.to_block)
        if not self._source_blocks.keys() >= set(blocks):
            detail = f"the source did not say where blocks {effect.from_block} to {effect.to_block} are"
            self.feed(on.PullFailed(effect.job, Reason.INVALID_REQUEST, detail))
            return
        try:
            copied = await arrivals.movers.pull(
                self._mover_job(effect.job),
                self._memory,
                [self._source_blocks[index] for index in blocks],
                self._block_ids[effect.from_block : effect.to_block],
                transport=self.transport,
                # The lease began earlier, so it is what ends a copy that takes too long.
                deadline_s=arrivals.terms.lease_s,
                final=final,
                tag=f"from {effect.from_block}",
            )
        except TransportError as error:
            self.feed(on.PullFailed(effect.job, Reason.TRANSFER_FAILED, str(error)))
            return
        seconds = time.perf_counter() - began
        if final:
            self.phase_ms["last_copy"] = seconds * 1e3
        self.copied_bytes = copied
        self.feed(on.PullDone(effect.job, copied, seconds, lease_valid=time.monotonic() < self._lease_end))

    def _mover_job(self, job: int) -> int:
        """The machine numbers its jobs from 1, the movers' are those of all moves."""
        if job not in self._jobs:
            self._jobs[job] = self.arrivals.movers.next_job()
        return self._jobs[job]

    async def _stop(self, job: int) -> None:
        """The blocks are not given back while a mover may write them."""
        await self.arrivals.movers.stop(self._mover_job(job))
        self.feed(on.PullQuiesced(job))

    async def _admit(self, effect: do.Admit) -> None:
        arrivals, request, residence = self.arrivals, self.request, self.residence
        assert request is not None
        assert residence is not None
        assert residence.origin is not None
        began = time.perf_counter()
        computed_tokens = effect.computed_tokens
        if computed_tokens:
            # Of a prompt that the source has begun, the prefix cache here may hold more: nothing writes shared blocks.
            computed_tokens = max(computed_tokens, self.machine.hit_blocks * arrivals.terms.block_size)
        residence.epoch, residence.last_hop = effect.epoch, effect.epoch.hop
        residence.base = residence.next_index = effect.base
        residence.repeat = repeat_from(request)
        residence.handover_open = residence.admitting = True
        try:
            request.client_index = arrivals.relay.client_index(residence.origin)
            arrivals.relay.welcome(self.request_id, residence)
            await arrivals.kvconn.call(self._admit_on_loop, computed_tokens)
        except MigrationError as error:
            arrivals.relay.farewell(self.request_id, residence)
            self.feed(on.AdmitFailed(error.reason, error.detail))
            return
        residence.admitting = False
        self.phase_ms["admit"] = (time.perf_counter() - began) * 1e3
        arrivals.departures.came_back(self.request_id)
        faults.hit("destination.admitted")
        self.feed(on.Admitted())

    def _admit_on_loop(self, computed_tokens: int) -> None:
        if not self._admission.claim():
            raise Refused(Reason.BARRED, "revoked")
        self.arrivals.kvconn.admit(self.request, computed_tokens)

    # Answers

    def _reserve_response(self, effect: do.AnswerReserve) -> ReserveResponse:
        return ReserveResponse(
            hit_blocks=effect.hit_blocks,
            lease_s=effect.lease_s,
            dst_incarnation=self.arrivals.bypass.identity.incarnation,
            transport=self.transport,
            tokens_alone=self.tokens_alone,
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
            dst_incarnation=self.arrivals.bypass.identity.incarnation,
        )

    def _answer(self, kind: Hashable, answer: Any) -> None:
        for waiting in self._waiting.pop(kind, ()):
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._shed()

    def _set_timer(self, name: str, seconds: float) -> None:
        self._clear_timer(name)
        if name == "lease":
            self._lease_end = time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, lambda: self.feed(on.TimerFired(name)))

    def _clear_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


class Arrivals:
    """All moves into this engine, settled ones included for as long as their source can be in doubt."""

    def __init__(
        self,
        bypass: Bypass,
        kvconn: KVConnection,
        relay: Relay,
        movers: Movers,
        builder: RequestBuilder,
        departures: Departures,
        abort_here: Callable[[list[str]], None],
    ) -> None:
        self.bypass = bypass
        self.kvconn = kvconn
        self.relay = relay
        self.movers = movers
        self.builder = builder
        self.departures = departures
        self.abort_here = abort_here
        self.terms = Terms(block_size=kvconn.port.block_size, lease_s=bypass.config.lease_seconds)
        self.moves: dict[str, IncomingMove] = {}
        self._unsettled: dict[str, IncomingMove] = {}
        """Of them, those whose fate is open, or whose blocks may still be written: few."""
        config = bypass.config
        limits = Limits(
            max_requests=config.max_migrations_in,
            max_tokens=config.max_migration_tokens_in,
            max_kv_ratio=config.max_migration_kv_ratio_in,
        )
        self.slots = Slots(limits, kvconn.port.capacity_tokens, Reason.DESTINATION_BUSY)

    def pending(self) -> list[IncomingMove]:
        """Moves whose fate is open, oldest first. Any thread."""
        return [move for move in list(self._unsettled.values()) if move.machine.settlement is Settlement.PENDING]

    def draining_blocks(self) -> int:
        """Any thread."""
        return sum(move.num_blocks for move in list(self._unsettled.values()) if move.machine.state is State.DRAINING)

    def settled(self, move: IncomingMove) -> None:
        if move.machine.state is not State.DRAINING:
            self._unsettled.pop(move.migration_id, None)
        self.kvconn.port.load.touch()
        if move.migration_id in self.slots:
            self.slots.give_back(move.migration_id)
            self.kvconn.audit_when_idle()

    def forget(self, move: IncomingMove) -> None:
        self.moves.pop(move.migration_id, None)

    # Peer calls

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        identity = self.bypass.identity
        move = self.moves.get(request.handover.migration_id)
        if move is None:
            if request.dst_engine_id != identity.instance:
                _refuse(Reason.WRONG_INSTANCE, f"this is {identity.instance}, not {request.dst_engine_id}")
            brings_kv = request.method not in (Mode.RECOMPUTE, Mode.WAITING) and not request.tokens_will_do
            if problem := identity.unsupported or (brings_kv and identity.kv_unsupported):
                _refuse(Reason.NOT_PORTABLE, f"at the destination: {problem}")
            if not self.bypass.takes_requests:
                _refuse(Reason.SHUTTING_DOWN, "the destination is shutting down")
            try:
                self.slots.take(MigrationId(request.handover.migration_id), request.num_blocks * self.terms.block_size)
            except Refused as error:
                _refuse(error.reason, error.detail)
            move = self._begin(request.handover)
        move.take_offer(request)
        answer: ReserveResponse = await move.ask(Call.RESERVE, on.ReserveRequested())
        return answer

    async def copy_round(self, request: CopyRoundRequest) -> CopyRoundResponse:
        move = self._find(request.handover)
        if move is None:
            _refuse(Reason.UNKNOWN_MIGRATION, "this engine knows nothing of it (any more)")
        try:
            event = move.take_round(request)
        except Refused as error:
            await move.ask(Call.CANCEL, on.CancelRequested(error.reason, error.detail))
            _refuse(error.reason, error.detail)
        answer: CopyRoundResponse = await move.ask((Call.ROUND, request.round), event)
        return answer

    async def commit(self, request: CommitRequest) -> CommitResponse:
        faults.hit("destination.commit_received")
        move = self._find(request.handover)
        if move is None:
            return CommitResponse(state=Handover.UNKNOWN, dst_incarnation=self.bypass.identity.incarnation)
        try:
            event = move.take_commit(request)
        except Refused as error:
            await move.ask(Call.CANCEL, on.CancelRequested(error.reason, error.detail))
            event = move.take_commit(request)
        answer: CommitResponse = await move.ask(Call.COMMIT, event)
        return answer

    async def withdraw(self, request: SettleRequest) -> SettleResponse:
        return await self._settle(request, Call.WITHDRAW, on.WithdrawRequested(), leaves_a_mark=True)

    async def cancel(self, request: SettleRequest) -> SettleResponse:
        return await self._settle(request, Call.CANCEL, on.CancelRequested(), leaves_a_mark=True)

    async def abort(self, request: SettleRequest) -> SettleResponse:
        return await self._settle(request, Call.ABORT, on.AbortRequested(), leaves_a_mark=True)

    async def close_handover(self, request: SettleRequest) -> SettleResponse:
        answer = await self._settle(request, Call.CLOSE, on.CloseRequested())
        move = self._find(request.handover)
        if move is not None and move.machine.closed and move.residence is not None:
            move.residence.handover_open = False
        return answer

    async def query(self, request: SettleRequest) -> SettleResponse:
        return await self._settle(request, Call.QUERY, on.QueryRequested())

    async def call_off(self, request: AbortMigrateInRequest) -> AbortMigrateInResponse:
        """An operator ends moves into this instance, by the ids of migrations or of requests."""
        response = AbortMigrateInResponse()
        # Of several moves of one request, the one whose fate is open.
        by_request = {move.request_id: move for move in [*self.moves.values(), *self.pending()]}
        asked = [(mid, self.moves.get(mid)) for mid in request.migration_ids]
        asked += [(rid, by_request.get(rid)) for rid in request.request_ids]
        for asked_id, move in asked:
            if move is None:
                response.results.add(id=asked_id, state=Handover.UNKNOWN)
                continue
            answer: SettleResponse = await move.ask(Call.CANCEL, on.CancelRequested())
            response.results.add(id=asked_id, migration_id=move.migration_id, state=answer.state)
        return response

    async def give_way(self, request_id: str) -> None:
        """The origin starts this request here itself: whatever was on its way here is barred."""
        for move in self.pending():
            if move.request_id == request_id:
                await move.ask(Call.CANCEL, on.CancelRequested())

    def revoke_youngest(self) -> None:
        """The engine's own requests need blocks: give the youngest reservation back, one at a time."""
        if any(move.machine.state is State.DRAINING for move in self._unsettled.values()):
            return
        for move in reversed(self.pending()):
            if move.num_blocks and move.machine.state in (State.RESERVED, State.PULLING):
                move.feed(on.Revoked(Reason.DESTINATION_NEEDS_BLOCKS, "the destination's own requests need them"))
                return

    def settlement(self, state: Settlement, reason: Reason | None) -> SettleResponse:
        return SettleResponse(
            state=HANDOVERS[state], reason=reason_number(reason), dst_incarnation=self.bypass.identity.incarnation
        )

    async def _settle(
        self, request: SettleRequest, call: Call, event: on.DestinationEvent, *, leaves_a_mark: bool = False
    ) -> SettleResponse:
        move = self._find(request.handover)
        if move is None:
            if not leaves_a_mark or not self._is_this_life(request.handover):
                return self.settlement(Settlement.UNKNOWN, None)
            # It overtook its Reserve, or that never came: a late Reserve must find that it is barred.
            move = self._begin(request.handover)
        answer: SettleResponse = await move.ask(call, event)
        return answer

    def _begin(self, handover: Handover) -> IncomingMove:
        move = IncomingMove(self, handover)
        self.moves[move.migration_id] = self._unsettled[move.migration_id] = move
        self.kvconn.port.load.touch()
        return move

    def _find(self, handover: Handover) -> IncomingMove | None:
        return self.moves.get(handover.migration_id) if self._is_this_life(handover) else None

    def _is_this_life(self, handover: Handover) -> bool:
        return handover.dst_incarnation in ("", self.bypass.identity.incarnation)

    def require_reachable(self, rank: PeerMemory) -> None:
        """Raises Refused(address_refused): nobody makes us connect to where peers do not live."""
        for address in filter(None, (rank.tcp, rank.mooncake)):
            if (problem := self.bypass.config.reaches.why_not_llumlet(address)) is not None:
                raise Refused(Reason.ADDRESS_REFUSED, problem)

    def why_not_portable(self, request: Request) -> str | None:
        return why_request_not_portable(request, self.bypass.identity)

    def reserve_on_loop(self, request: Request, queued: bool) -> tuple[int, list[int]]:
        port = self.kvconn.port
        self.kvconn.require_out_of_flight(request.request_id)
        reserved = port.reserve(request, use_prefix_cache=not self.bypass.config.exact, queued=queued)
        try:
            self.kvconn.load_adapter(request)
        except Refused:
            port.cancel_reservation(request)
            raise
        return reserved


def _refuse(reason: Reason, detail: str) -> NoReturn:
    raise LlumletError(reason_number(reason), detail)
