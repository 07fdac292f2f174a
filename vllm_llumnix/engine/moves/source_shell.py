# SPDX-License-Identifier: Apache-2.0
"""A request on its way out: the shell around the source's state machine. Llumlet thread only.

The machine decides; this module carries its effects out (peer calls, changes on the engine's loop, timers) and feeds
the results back. Whatever happens to a call, an event comes of it: an answer, a refusal, or "unreachable".

    source_calls          calls to the destination
    source_origin_calls   messages to the request's origin
    source_request        changes on the engine's loop
    source_report         reports to those who asked for the move
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from llumlet.contract.bridge import epoch_message
from llumlet.contract.types import CommitRequest, CopyRoundRequest, Handover, Mode, MoveProgress, ReserveRequest
from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.errors import LocalProtocolError, MigrationError, Reason, Refused
from llumlet.protocol.events import Call, Gone
from llumlet.protocol.ids import Epoch, MigrationId
from llumlet.protocol.move.plan import Method, Plan
from llumlet.protocol.move.source import Source, State
from vllm_llumnix import faults
from vllm_llumnix.engine.blocks.block_rows import NULL_ID
from vllm_llumnix.engine.blocks.movers import MoveGrant
from vllm_llumnix.engine.blocks.reblocking import rows_of_move
from vllm_llumnix.engine.compatibility.way import Way
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import Frontier, FrozenRequest
from vllm_llumnix.engine.moves.shell import Shell
from vllm_llumnix.engine.moves.source_calls import HandoverCalls, OriginCalls, Target, decided
from vllm_llumnix.engine.moves.source_report import Report, SourceReport
from vllm_llumnix.engine.moves.source_request import SourceRequest
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.errors import TransportError
from vllm_llumnix.wire.request_wire import RequestState, encode

logger = logging.getLogger("vllm.llumnix")

LOCAL = "local"
"""The one transport for which the source has nothing to do."""


class SourceShell(Shell[Source]):
    """An attempt to move a request. `done` is resolved with the last report.

    `deadline_s`: for a call without copied bytes, and for a question to the origin. `on_end` is called when the move
    holds nothing of the request here any more.
    """

    def __init__(
        self,
        context: EngineContext,
        request: Request,
        residence: Residence,
        to: Target,
        plan: Plan,
        way: Way,
        report: Report,
        deadline_s: float,
        on_end: Callable[[SourceShell], None],
    ) -> None:
        super().__init__(Source(plan))
        self.request = request
        self.to = to
        self.migration_id = MigrationId(uuid.uuid4().hex)
        self.leaving = SourceRequest(
            context, request, residence, plan.force, self._frozen_now, lambda how: self.feed(on.RequestGone(Gone(how)))
        )
        self.done: asyncio.Future[MoveProgress] = asyncio.get_running_loop().create_future()
        self._context = context
        self._call = context.loop.call
        handover = Handover(
            migration_id=self.migration_id,
            request_id=request.request_id,
            src_incarnation=context.identity.incarnation,
        )
        self._calls = HandoverCalls(to, handover, plan, deadline_s, self.feed)
        self._origin = OriginCalls(context.relay, request, residence, deadline_s)
        self._report = SourceReport(self.migration_id, self.leaving, way, report)
        self._insists = way.insists
        self._on_end = on_end
        self._grant = MoveGrant(context.movers)
        self._seen = self.machine.state
        self._frontier: Frontier | None = None
        self._frozen: FrozenRequest | None = None
        self._released: asyncio.Future[None] | None = None

    @property
    def progress(self) -> MoveProgress:
        return self._report.progress

    def feed(self, event: on.Event) -> None:
        try:
            super().feed(event)
        except LocalProtocolError:
            logger.exception("move %s of %s", self.migration_id, self.request.request_id)

    def _advanced(self) -> None:
        machine, before = self.machine, self._seen
        self._seen = machine.state
        if self.done.done():
            return
        if machine.outcome is not None:
            # The request's fate is known. Pins may outlive it: the machine's lease timer gives them back.
            self._call(self._context.loop.unwatch, self.request.request_id)
            self._report.end(machine.outcome)
            if self._released is None:
                self._on_end(self)
            else:
                # Until the loop has let go of it, the request looks as if it could be moved from here.
                self._released.add_done_callback(lambda _: self._on_end(self))
            self.done.set_result(self.progress)
        elif machine.state is not before:
            self._report.enter(machine.state)

    # Effects. What touches the loop is handed to it here and now, so that it gets there in the order asked for.

    def _perform(self, effect: do.Effect) -> None:
        call, leaving, spawn = self._call, self.leaving, self._tasks.spawn
        match effect:
            case do.SendReserve():
                spawn(self._reserve(call(leaving.first_state)))
            case do.PinBlocks(from_block=from_block):
                spawn(self._pin(call(leaving.pin, from_block)))
            case do.SendRound():
                spawn(self._round(effect))
            case do.Freeze():
                with_kv = self.machine.plan.method is not Method.RECOMPUTE
                stays_with_kv = self.progress.tokens_alone if self._insists and not with_kv else ""
                spawn(self._freeze(call(leaving.freeze, with_kv, stays_with_kv)))
            case do.SendCommit():
                spawn(self._commit(effect))
            case do.SendWithdraw():
                spawn(self._calls.settle(Call.WITHDRAW))
            case do.SendQuery():
                spawn(self._calls.settle(Call.QUERY))
            case do.SendAbort():
                spawn(self._calls.settle(Call.ABORT))
            case do.SendCancel(reason=reason):
                spawn(self._calls.cancel(reason))
            case do.SendClose():
                spawn(self._close())
            case do.AskFence(epoch=epoch):
                spawn(self._fence(epoch))
            case do.Unfreeze(epoch=epoch):
                call(leaving.unfreeze, self._origin.client_index(epoch), epoch is not None)
            case do.Unpin():
                call(leaving.stop_freezing)
                if self._grant.has_blocks:
                    spawn(self._revoke())
                else:
                    call(leaving.unpin)
            case do.Release():
                self._context.forwarding.remember(self.request.request_id, self.to.address)
                self._tell_origin()
                self._released = call(leaving.release)
                faults.hit("source.committed")
            case do.Drop():
                self._tell_origin()
                self._released = call(leaving.release)

    async def _reserve(self, first_state: asyncio.Future[RequestState]) -> None:
        context = self._context
        try:
            state = await first_state
            if (adapter := self.request.lora_request) is not None:
                state = msgspec.structs.replace(state, lora_digest=await context.adapters.digest_of(adapter))
        except Refused as error:
            self.feed(on.ReserveRefused(error.reason, error.detail))
            return
        request = ReserveRequest(
            src_engine_id=context.identity.instance,
            dst_engine_id=self.to.instance,
            src_address=str(context.address),
            request_state=encode(state),
            source_memory=context.offered_memory(self._grant.capability),
            num_blocks=self.leaving.rows.rows_of(self.request.num_tokens) + 1,
            method=Mode.WAITING if self.leaving.queued else self.progress.mode,
            tokens_will_do=not self._insists,
            computed_tokens=self.leaving.computed_tokens,
            row_tokens=self.leaving.rows.size,
        )
        answer = await self._calls.reserve(request)
        if answer is not None:
            try:
                self._count_in(answer.row_tokens)
            except Refused as error:
                self.feed(on.ReserveRefused(error.reason, error.detail))
                return
            self.progress.hit_tokens = answer.hit_blocks * self.leaving.rows.size
            self.progress.transport = answer.transport
            copies = self.machine.plan.method is not Method.RECOMPUTE
            if answer.tokens_alone and copies and self.machine.state is State.RESERVING:
                self.machine.leave_kv()
                self._report.leaves_kv(answer.tokens_alone)
            self.feed(on.Reserved(answer.hit_blocks, answer.lease_s, answer.dst_incarnation))

    def _count_in(self, row_tokens: int) -> None:
        """The destination has said what this move counts in. Raises Refused."""
        before, rows = self.leaving.rows, rows_of_move(self.leaving.rows, row_tokens)
        if rows is not before and self.machine.state is State.RESERVING:
            self.leaving.rows = rows
            self.machine.widen_rows(rows.size // before.size)

    async def _pin(self, pinned: asyncio.Future[Frontier]) -> None:
        try:
            self._frontier = frontier = await pinned
        except MigrationError as error:
            self._not_pinned(error)
            return
        self.feed(on.BlocksPinned(frontier.frontier_blocks, frontier.num_tokens))

    async def _freeze(self, frozen: asyncio.Future[None]) -> None:
        try:
            await frozen
        except MigrationError as error:
            self._not_pinned(error)

    def _not_pinned(self, error: MigrationError) -> None:
        # That the request has ended, and how, is what the loop's watch over it says in the same turn.
        if error.reason is not Reason.REQUEST_FINISHED:
            self.feed(on.PinFailed(error.reason, error.detail))

    def _frozen_now(self, frozen: FrozenRequest) -> None:
        self._frozen = frozen
        self._report.freezes(frozen)
        self.feed(
            on.Frozen(
                num_tokens=frozen.num_tokens,
                computed_tokens=frozen.computed_tokens,
                num_blocks=frozen.num_blocks,
                base=frozen.num_tokens - self.request.num_prompt_tokens,
            )
        )

    async def _round(self, effect: do.SendRound) -> None:
        frontier = self._frontier
        assert frontier is not None
        faults.hit("source.round")
        request = CopyRoundRequest(
            round=effect.round,
            from_block=effect.from_block,
            to_block=effect.to_block,
            num_tokens=frontier.num_tokens,
            block_ids=frontier.block_ids,
            new_token_ids=frontier.output_token_ids,
        )
        self.leaving.num_known_tokens += len(frontier.output_token_ids)
        await self._let_send(request.block_ids)
        answer = await self._calls.copy_round(request)
        if answer is not None:
            self.progress.rounds = effect.round
            self.progress.copied_bytes += answer.copied_bytes
            self.feed(on.RoundDone(effect.round, answer.copied_bytes, answer.seconds))

    async def _commit(self, effect: do.SendCommit) -> None:
        frozen = self._frozen
        assert frozen is not None
        request = CommitRequest(
            epoch=epoch_message(effect.epoch),
            base=effect.base,
            computed_tokens=effect.computed_tokens,
            from_block=effect.from_block,
            block_ids=frozen.block_ids[self.leaving.rows.width * effect.from_block :],
            state_ids=frozen.state_ids,
            num_accepted_drafts=frozen.num_accepted,
            accepted_state_ids=frozen.accepted_ids,
            new_token_ids=frozen.output_token_ids,
        )
        faults.hit("source.frozen")
        await self._let_send([*request.block_ids, *request.state_ids, *request.accepted_state_ids])
        sent = time.perf_counter()
        answer = await self._calls.commit(request)
        if answer is None:
            return
        self.progress.copied_bytes += answer.copied_bytes
        self.progress.recomputed_tokens = answer.recomputed_tokens
        self.progress.phase_ms["commit_call"] = (time.perf_counter() - sent) * 1e3
        for part, milliseconds in answer.phase_ms.items():
            self.progress.phase_ms[part] = milliseconds
        if answer.state == Handover.COMMITTED:
            self.progress.epoch.CopyFrom(request.epoch)
        self.feed(decided(answer))

    async def _let_send(self, block_ids: Sequence[int]) -> None:
        """Our workers may send these blocks, if they are not read without them."""
        granted = [block_id for block_id in block_ids if block_id != NULL_ID]
        if self.progress.transport == LOCAL or not granted:
            return
        try:
            await self._grant.add(granted)
        except TransportError as error:
            logger.warning("move %s: %s", self.migration_id, error)

    async def _revoke(self) -> None:
        """The blocks are not given back while a worker may send them."""
        await self._grant.revoke()
        self._call(self.leaving.unpin)

    async def _close(self) -> None:
        """Closes the hand-over at the destination. Only once the request is out of our scheduler can it come back."""
        assert self._released is not None
        await self._released
        await self._calls.close()

    async def _fence(self, epoch: Epoch) -> None:
        self.feed(await self._origin.fence(epoch))

    def _tell_origin(self) -> None:
        self._origin.hand_over(self.machine.plan.epoch_next, self.to, self._calls.destination_incarnation)
