# SPDX-License-Identifier: Apache-2.0
"""All moves into this engine: finds or begins the one that a peer's call is about. Llumlet thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from llumlet.contract.bridge import reason_number
from llumlet.contract.errors import LlumletError
from llumlet.contract.types import (
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
from llumlet.protocol import events as on
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.events import Call, Settlement
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.move.destination import State
from llumlet.protocol.move.limits import Limits, Slots
from llumlet.protocol.move.plan import Terms
from vllm_llumnix import faults
from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.blocks.reblocking import rows_between
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import CallOff, EnginePort
from vllm_llumnix.engine.moves.destination_shell import DestinationShell
from vllm_llumnix.engine.moves.shell import settle_response
from vllm_llumnix.engine.requests.builder import RequestBuilder


class DestinationMoves:
    """All moves into this engine, settled ones included for as long as their source can be in doubt."""

    def __init__(self, context: EngineContext, builder: RequestBuilder, end_here: Callable[[list[str]], None]) -> None:
        self._context = context
        self._loop: EnginePort = context.loop
        self._builder = builder
        self._end_here = end_here
        config, port = context.config, self._loop.port
        self._terms = Terms(
            block_size=port.block_size, has_states=bool(port.rows.num_states), lease_s=config.lease_seconds
        )
        self.moves: dict[str, DestinationShell] = {}
        self._unsettled: dict[str, DestinationShell] = {}
        """Moves whose fate is open, or whose blocks may still be written: few."""
        limits = Limits(
            max_requests=config.max_migrations_in,
            max_tokens=config.max_migration_tokens_in,
            max_kv_ratio=config.max_migration_kv_ratio_in,
        )
        self.slots = Slots(limits, port.capacity_tokens, Reason.DESTINATION_BUSY)

    def pending(self) -> list[DestinationShell]:
        """Moves whose fate is open, oldest first. Any thread."""
        return [move for move in list(self._unsettled.values()) if move.machine.settlement is Settlement.PENDING]

    def draining_blocks(self) -> int:
        """Any thread."""
        return sum(move.blocks.count for move in list(self._unsettled.values()) if move.machine.state is State.DRAINING)

    def _look(self, move: DestinationShell) -> None:
        """Looks at a move whose machine has had an event."""
        machine, migration_id = move.machine, move.migration_id
        if machine.settlement is not Settlement.PENDING:
            if machine.state is not State.DRAINING:
                self._unsettled.pop(migration_id, None)
            self._loop.port.touch()
            if migration_id in self.slots:
                self.slots.give_back(migration_id)
                self._loop.audit_when_idle()
        if machine.over:
            self.moves.pop(migration_id, None)

    # Peer calls

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        identity = self._context.identity
        move = self.moves.get(request.handover.migration_id)
        if move is None:
            if request.dst_engine_id != identity.instance:
                _refuse(Reason.WRONG_INSTANCE, f"this is {identity.instance}, not {request.dst_engine_id}")
            brings_kv = request.method not in (Mode.RECOMPUTE, Mode.WAITING) and not request.tokens_will_do
            if problem := identity.unsupported or (brings_kv and identity.kv_unsupported):
                _refuse(Reason.NOT_PORTABLE, f"at the destination: {problem}")
            if not self._loop.takes_requests:
                _refuse(Reason.SHUTTING_DOWN, "the destination is shutting down")
            try:
                num_tokens = request.num_blocks * (request.row_tokens or self._loop.port.block_size)
                self.slots.take(MigrationId(request.handover.migration_id), num_tokens)
            except Refused as error:
                _refuse(error.reason, error.detail)
            move = self._begin(request.handover, rows_between(self._loop.port.rows, request.row_tokens))
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
            return CommitResponse(state=Handover.UNKNOWN, dst_incarnation=self._context.identity.incarnation)
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
            if move.blocks.count and move.machine.state in (State.RESERVED, State.PULLING):
                move.feed(on.Revoked(Reason.DESTINATION_NEEDS_BLOCKS, "the destination's own requests need them"))
                return

    def call_off_all(self, why: CallOff) -> None:
        """Revoke all pending moves. The loop refuses moves already in ADMITTING: their reservations are void."""
        for move in self.pending():
            move.feed(on.Revoked(why.at_destination, f"the destination {why.what}"))

    async def _settle(
        self, request: SettleRequest, call: Call, event: on.DestinationEvent, *, leaves_a_mark: bool = False
    ) -> SettleResponse:
        move = self._find(request.handover)
        if move is None:
            if not leaves_a_mark or not self._is_this_life(request.handover):
                return settle_response(Settlement.UNKNOWN, None, self._context.identity.incarnation)
            # It overtook its Reserve, or that never came: a late Reserve must find that it is barred.
            move = self._begin(request.handover)
        answer: SettleResponse = await move.ask(call, event)
        return answer

    def _begin(self, handover: Handover, rows: BlockRows | None = None) -> DestinationShell:
        """`rows`: what the move counts in, if not in this engine's own."""
        rows = rows or self._loop.port.rows
        terms = msgspec.structs.replace(self._terms, block_size=rows.size)
        move = DestinationShell(self._context, self._builder, terms, rows, handover, self._end_here, self._look)
        self.moves[move.migration_id] = self._unsettled[move.migration_id] = move
        self._loop.port.touch()
        return move

    def _find(self, handover: Handover) -> DestinationShell | None:
        return self.moves.get(handover.migration_id) if self._is_this_life(handover) else None

    def _is_this_life(self, handover: Handover) -> bool:
        return handover.dst_incarnation in ("", self._context.identity.incarnation)


def _refuse(reason: Reason, detail: str) -> NoReturn:
    raise LlumletError(reason_number(reason), detail)
