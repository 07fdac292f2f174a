# SPDX-License-Identifier: Apache-2.0
"""Requests on their way out: the shell around the source's state machine. Bypass thread only.

The machine decides; this module carries its effects out (peer calls, changes on the engine's loop, timers) and feeds
the results back. Whatever happens to a call, an event comes of it: an answer, a refusal, or "unreachable".
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import Request

from llumlet.bridge import MODES, PHASES, epoch_message, reason_number, reason_of
from llumlet.client import LlumletClient
from llumlet.errors import LlumletCallFailed, LlumletError
from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol import ids, wire
from llumlet.protocol.errors import LocalProtocolError, MigrationError, Reason, Refused
from llumlet.protocol.events import Call, Gone
from llumlet.protocol.limits import Limits, Slots
from llumlet.protocol.plan import Method, Plan
from llumlet.protocol.source import Outcome, Source, State
from llumlet.types import (
    Address,
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    Handover,
    Mode,
    MovePhase,
    MoveProgress,
    ReserveRequest,
    SettleRequest,
    SettleResponse,
)
from vllm_llumnix import faults
from vllm_llumnix.engine.kvconn import Departure, KVConnection
from vllm_llumnix.engine.memory import Movers, encode_memory
from vllm_llumnix.engine.records import MoveRecords
from vllm_llumnix.engine.relay import OriginUnreachable, Relay
from vllm_llumnix.engine.request_state import Residence, state_of, why_not_now
from vllm_llumnix.engine.scheduler_port import Frontier, FrozenRequest, Pin, SchedulerPort
from vllm_llumnix.engine.way import Way, has_kv, why_request_not_portable
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.grants import CAPABILITY_BYTES
from vllm_llumnix.request_wire import RequestState, encode

if TYPE_CHECKING:
    from vllm_llumnix.adapters import Adapters
    from vllm_llumnix.engine.bypass import Bypass

logger = logging.getLogger("vllm.llumnix")

LOCAL = "local"
"""The one transport for which the source has nothing to do."""
REPORT_SECONDS = 0.1
"""Between two reports of a move that goes on. Each is a message that takes time of the engine's process and of the
asker's: one for each phase was more than all that the move itself asks of the llumlet."""
FORWARDING_ENTRIES = 65_536
"""How many requests that left are remembered, to send late aborts after them."""
MAX_CLIENTS = 256
"""Peers to which a connection is kept at a time."""

Report = Callable[[MoveProgress], None]
PeerCall = Callable[..., Awaitable[Any]]


class OutgoingMove:
    """One attempt to move one request. `done` is resolved with the last report."""

    def __init__(
        self,
        departures: Departures,
        request: Request,
        residence: Residence,
        to: Destination,
        plan: Plan,
        way: Way,
        report: Report,
    ) -> None:
        self.departures = departures
        self.request = request
        self.residence = residence
        self.to = to
        self.machine = Source(plan)
        self.migration_id = ids.MigrationId(uuid.uuid4().hex)
        self._capability = secrets.token_bytes(CAPABILITY_BYTES)
        self._granted = False
        self.progress = MoveProgress(
            migration_id=self.migration_id,
            request_id=request.request_id,
            external_request_id=residence.external_request_id,
            phase=MovePhase.SELECTED,
            mode=MODES[plan.method],
            tokens_alone=way.tokens_alone,
            context_tokens=request.num_tokens,
        )
        self.done: asyncio.Future[MoveProgress] = asyncio.get_running_loop().create_future()
        self._insists = way.insists
        self._report = report
        self._kvconn: KVConnection = departures.kvconn
        self._port: SchedulerPort = departures.kvconn.port
        self._departure = Departure(request, self._drained_on_loop, self._gone_on_loop)
        self._destination_incarnation = ""
        self._known_output = 0
        self._queued = False
        self._step = 0
        self._frontier: Frontier | None = None
        self._frozen: FrozenRequest | None = None
        self._released: asyncio.Future[None] | None = None
        self._pins: list[Pin] = []  # loop thread only
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._phase_began = time.perf_counter()
        self._reporting: asyncio.TimerHandle | None = None

    @property
    def frozen(self) -> bool:
        return self._departure.frozen

    @property
    def num_pinned_blocks(self) -> int:
        return sum(len(pin.blocks) for pin in self._pins)

    def feed(self, event: on.SourceEvent) -> None:
        """Give the machine an event and do what it says."""
        machine = self.machine
        state = machine.state
        try:
            effects = machine.on(event)
        except LocalProtocolError:
            logger.exception("move %s of %s", self.migration_id, self.request.request_id)
            return
        for effect in effects:
            self._perform(effect)
        if not self.done.done():
            if machine.outcome is not None:
                self._settled(machine.outcome)
            elif machine.state is not state:
                self._enter_phase(machine.state)
                self._report_soon()

    # Effects. What touches the loop is handed to it here and now, so that it gets there in the order asked for.

    def _perform(self, effect: do.SourceEffect) -> None:
        call = self._kvconn.call
        match effect:
            case do.SendReserve():
                self._spawn(self._reserve(call(self._first_state_on_loop)))
            case do.TakeSnapshot(from_block=from_block):
                self._spawn(self._snapshot(call(self._snapshot_on_loop, from_block)))
            case do.SendRound():
                self._spawn(self._round(effect))
            case do.Freeze():
                stays_with_kv = self._insists and self.machine.plan.method is Method.RECOMPUTE
                self._spawn(self._freeze(call(self._freeze_on_loop, stays_with_kv)))
            case do.SendCommit():
                self._spawn(self._commit(effect))
            case do.SendWithdraw():
                self._spawn(self._settle(Call.WITHDRAW, self.to.client.withdraw))
            case do.SendQuery():
                self._spawn(self._settle(Call.QUERY, self.to.client.query))
            case do.SendAbort():
                self._spawn(self._settle(Call.ABORT, self.to.client.abort_handover))
            case do.SendCancel(reason=reason):
                self._spawn(self._tell(self.to.client.cancel, reason))
            case do.SendClose():
                self._spawn(self._close())
            case do.AskFence(epoch=epoch):
                self._spawn(self._fence(epoch))
            case do.Unfreeze(epoch=epoch):
                call(self._unfreeze_on_loop, self._settle_under(epoch))
            case do.Unpin():
                call(self._stop_freezing_on_loop)
                if self._granted:
                    self._spawn(self._revoke())
                else:
                    call(self._unpin_on_loop)
            case do.Release():
                self.departures.remember(self.request.request_id, self.to.address, self.migration_id)
                self._tell_origin()
                self._released = call(self._release_on_loop)
                faults.hit("source.committed")
            case do.Drop():
                self._tell_origin()
                self._released = call(self._release_on_loop)
            case do.SetTimer(name=name, seconds=seconds):
                self._set_timer(name, seconds)
            case do.ClearTimer(name=name):
                self._clear_timer(name)

    async def _reserve(self, first_state: asyncio.Future[RequestState]) -> None:
        source = self.departures
        try:
            state = await self._with_adapter(await first_state)
        except Refused as error:
            self.feed(on.ReserveRefused(error.reason, error.detail))
            return
        request = ReserveRequest(
            handover=self._handover(),
            src_engine_id=source.identity.instance,
            dst_engine_id=self.to.instance,
            src_address=str(source.address),
            request_state=encode(state),
            source_memory=source.memory(self._capability),
            num_blocks=-(-self.request.num_tokens // self._port.block_size) + 1,
            method=Mode.WAITING if self._queued else self.progress.mode,
            tokens_will_do=not self._insists,
        )
        answer = await self._ask(Call.RESERVE, self.to.client.reserve, request)
        if answer is not None:
            self._destination_incarnation = answer.dst_incarnation
            self.progress.hit_tokens = answer.hit_blocks * self._port.block_size
            self.progress.transport = answer.transport
            copies = self.machine.plan.method is not Method.RECOMPUTE
            if answer.tokens_alone and copies and self.machine.state is State.RESERVING:
                self.machine.leave_kv()
                self.progress.mode, self.progress.tokens_alone = Mode.RECOMPUTE, answer.tokens_alone
            self.feed(on.Reserved(answer.hit_blocks, answer.lease_s, answer.dst_incarnation))

    async def _with_adapter(self, state: RequestState) -> RequestState:
        """Raises Refused(lora_not_available) when nobody here knows what the adapter holds."""
        adapter = self.request.lora_request
        if adapter is None:
            return state
        return msgspec.structs.replace(state, lora_digest=await self.departures.adapters.digest_of(adapter))

    async def _snapshot(self, taken: asyncio.Future[Frontier]) -> None:
        try:
            self._frontier = frontier = await taken
        except MigrationError as error:
            self._not_taken(error)
            return
        self.feed(on.Snapshot(frontier.frontier_blocks, frontier.num_tokens))

    async def _freeze(self, frozen: asyncio.Future[None]) -> None:
        try:
            await frozen
        except MigrationError as error:
            self._not_taken(error)

    def _not_taken(self, error: MigrationError) -> None:
        # That the request has ended, and how, is what the loop's watch over it says in the same turn (`_gone_on_loop`).
        if error.reason is not Reason.REQUEST_FINISHED:
            self.feed(on.SnapshotFailed(error.reason, error.detail))

    async def _round(self, effect: do.SendRound) -> None:
        frontier = self._frontier
        assert frontier is not None
        faults.hit("source.round", round=effect.round)
        request = CopyRoundRequest(
            handover=self._handover(),
            round=effect.round,
            from_block=effect.from_block,
            to_block=effect.to_block,
            num_tokens=frontier.num_tokens,
            block_ids=frontier.block_ids[: effect.to_block - effect.from_block],
            new_token_ids=frontier.output_token_ids,
        )
        self._known_output += len(frontier.output_token_ids)
        await self._grant(request.block_ids)
        answer = await self._ask(Call.ROUND, self.to.client.copy_round, request, round_number=effect.round)
        if answer is not None:
            self.progress.rounds = effect.round
            self.progress.copied_bytes += answer.copied_bytes
            self.feed(on.RoundDone(effect.round, answer.copied_bytes, answer.seconds))

    async def _commit(self, effect: do.SendCommit) -> None:
        frozen = self._frozen
        assert frozen is not None
        request = CommitRequest(
            handover=self._handover(),
            epoch=epoch_message(effect.epoch),
            base=effect.base,
            computed_tokens=effect.computed_tokens,
            from_block=effect.from_block,
            block_ids=frozen.block_ids[effect.from_block : effect.num_blocks],
            new_token_ids=frozen.output_token_ids,
        )
        faults.hit("source.frozen")
        await self._grant(request.block_ids)
        sent = time.perf_counter()
        answer = await self._ask(Call.COMMIT, self.to.client.commit, request)
        if answer is None:
            return
        self.progress.copied_bytes += answer.copied_bytes
        self.progress.recomputed_tokens = answer.recomputed_tokens
        self.progress.phase_ms["commit_call"] = (time.perf_counter() - sent) * 1e3
        for part, milliseconds in answer.phase_ms.items():
            self.progress.phase_ms[part] = milliseconds
        if answer.state == Handover.COMMITTED:
            self.progress.epoch.CopyFrom(request.epoch)
        self._decided(answer)

    async def _grant(self, block_ids: Sequence[int]) -> None:
        """Let our workers send these blocks, if they are not read without them."""
        if self.progress.transport == LOCAL or not block_ids:
            return
        self._granted = True
        try:
            await self.departures.movers.grant(self._capability, list(block_ids))
        except TransportError as error:
            logger.warning("move %s: %s", self.migration_id, error)

    async def _revoke(self) -> None:
        """The blocks are not given back while a worker may send them."""
        await self.departures.movers.revoke(self._capability)
        self._kvconn.call(self._unpin_on_loop)

    async def _settle(self, name: Call, call: PeerCall) -> None:
        """Withdraw, Query or Abort: tells the machine what the destination has decided, if it has."""
        answer = await self._ask(name, call, SettleRequest(handover=self._handover()))
        if answer is not None:
            self._decided(answer)

    def _decided(self, answer: CommitResponse | SettleResponse) -> None:
        match answer.state:
            case Handover.COMMITTED:
                self.feed(on.Committed(answer.dst_incarnation))
            case Handover.BARRED:
                self.feed(on.Barred(reason_of(answer.reason), answer.dst_incarnation, answer.detail))
            case Handover.PENDING:
                self.feed(on.Unsettled())
            case _:
                self.feed(on.Forgotten())

    async def _tell(self, call: PeerCall, reason: Reason | None) -> None:
        """Said once; no answer changes anything for us."""
        message = SettleRequest(handover=self._handover(), reason=reason_number(reason))
        try:
            await call(message, deadline_s=self.departures.deadline_s)
        except LlumletCallFailed as error:
            logger.info("move %s: %s", self.migration_id, error)

    async def _close(self) -> None:
        """Only once the request is out of our scheduler can it come back."""
        assert self._released is not None
        await self._released
        await self._tell(self.to.client.close_handover, None)

    def _tell_origin(self) -> None:
        """The request is no longer ours. The origin watches the next owner from now on."""
        relay, request_id = self.departures.relay, self.request.request_id
        relay.farewell(request_id)
        relay.hand_over(
            self.residence.origin or "",
            wire.HandedOver(
                request_id,
                self.machine.plan.epoch_next,
                self.to.instance,
                self._destination_incarnation,
                str(self.to.address),
            ),
        )

    async def _fence(self, epoch: ids.Epoch) -> None:
        try:
            answer = await self.departures.relay.fence(
                self.residence.origin or "", self.request.request_id, epoch, self.departures.deadline_s
            )
        except OriginUnreachable as error:
            self.feed(on.PeerUnreachable(Call.FENCE, f"the API server at {error} does not answer"))
            return
        if answer.finished:
            self.feed(on.OriginFinished())
        elif answer.raised is not None:
            self.feed(on.FenceRaised(answer.raised))
        else:
            self.feed(on.FenceStarted())

    def _settle_under(self, epoch: ids.Epoch | None) -> int:
        """The client index to go on with here; under a raised epoch outputs go through the relay from now on."""
        if epoch is None or self.residence.origin is None:
            return self.request.client_index
        residence = self.residence
        residence.epoch, residence.last_hop = epoch, epoch.hop
        residence.base = residence.next_index = self.request.num_output_tokens
        self.departures.relay.welcome(self.request.request_id, residence)
        return self.departures.relay.client_index(residence.origin)

    # Loop thread

    def _first_state_on_loop(self) -> RequestState:
        """The request as it is; from now on it is watched."""
        self._kvconn.watch(self._departure)
        self._known_output = self.request.num_output_tokens
        self._queued = not self.request.num_computed_tokens
        return state_of(self.request, self.residence)

    def _snapshot_on_loop(self, from_block: int) -> Frontier:
        frontier = self._port.frontier(self.request, from_block, self._known_output)
        self._pins.append(frontier.pin)
        return frontier

    def _freeze_on_loop(self, stays_with_kv: bool) -> None:
        if (problem := why_not_now(self.request)) is not None:
            raise Refused(*problem)
        if (why := why_request_not_portable(self.request, self.departures.identity)) is not None:
            raise Refused(Reason.NOT_PORTABLE, why)
        if stays_with_kv and has_kv(self.request):
            raise Refused(Reason.NOT_PORTABLE, f"it began meanwhile: {self.progress.tokens_alone}")
        self._kvconn.freeze(self._departure)

    def _drained_on_loop(self) -> bool:
        with_kv = self.machine.plan.method is not Method.RECOMPUTE
        frozen = self._port.drained(self.request, self._known_output, with_kv=with_kv)
        if frozen is None:
            return False
        self._pins.append(frozen.pin)
        self.departures.bypass.post(self._frozen_now, frozen)
        return True

    def _gone_on_loop(self, kind: str) -> None:
        self.departures.bypass.post(self.feed, on.RequestGone(Gone(kind)))

    def _unfreeze_on_loop(self, client_index: int) -> None:
        self._kvconn.unwatch(self.request.request_id)
        if not self.request.is_finished():
            self.request.client_index = client_index
            self._port.unfreeze(self.request)

    def _release_on_loop(self) -> None:
        self._kvconn.unwatch(self.request.request_id)
        self._port.release(self.request)

    def _stop_freezing_on_loop(self) -> None:
        self._departure.freezing = False

    def _unpin_on_loop(self) -> None:
        for pin in self._pins:
            self._port.unpin(pin)
        self._pins.clear()

    # Plumbing

    def _frozen_now(self, frozen: FrozenRequest) -> None:
        self._frozen = frozen
        self.progress.context_tokens = frozen.num_tokens
        if not frozen.computed_tokens:
            self.progress.mode = Mode.RECOMPUTE if self.request.num_output_tokens else Mode.WAITING
            self.progress.tokens_alone = ""
        self.feed(
            on.Frozen(
                num_tokens=frozen.num_tokens,
                computed_tokens=frozen.computed_tokens,
                num_blocks=len(frozen.block_ids),
                base=frozen.num_tokens - self.request.num_prompt_tokens,
            )
        )

    async def _ask(self, name: Call, call: PeerCall, message: Any, round_number: int = 0) -> Any:
        """A call to the destination. None when it was refused or not answered: the machine has been told."""
        try:
            return await call(message, deadline_s=self._deadline_of(name))
        except LlumletError as error:
            reason = reason_of(error.reason)
            if name is Call.RESERVE:
                self.feed(on.ReserveRefused(reason, error.detail))
            elif name is Call.ROUND:
                self.feed(on.RoundFailed(round_number, reason, error.detail))
            else:
                self.feed(on.PeerUnreachable(name, str(error)))
        except LlumletCallFailed as error:
            self.feed(on.PeerUnreachable(name, str(error)))
        return None

    def _deadline_of(self, name: Call) -> float:
        """The machine's own, where it has one: a call that ends sooner would decide what is the machine's to decide."""
        plan = self.machine.plan
        deadlines = {
            Call.RESERVE: plan.reserve_s,
            Call.ROUND: plan.round_s,
            # An answer counts also after the deadline of the state in which it was asked for.
            Call.COMMIT: plan.round_s + plan.commit_s,
        }
        return deadlines.get(name, self.departures.deadline_s)

    def _handover(self) -> Handover:
        self._step += 1
        return Handover(
            migration_id=self.migration_id,
            request_id=self.request.request_id,
            src_incarnation=self.departures.identity.incarnation,
            dst_incarnation=self._destination_incarnation,
            step=self._step,
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self, name: str, seconds: float) -> None:
        self._clear_timer(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, lambda: self.feed(on.TimerFired(name)))

    def _clear_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _enter_phase(self, phase: State) -> None:
        now = time.perf_counter()
        before = MovePhase.Name(self.progress.phase).lower()
        self.progress.phase_ms[before] += (now - self._phase_began) * 1e3
        self._phase_began = now
        self.progress.phase = PHASES[phase]

    def _report_soon(self) -> None:
        """Most moves are over by then, and tell of nothing but their end."""
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report_now)

    def _report_now(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        snapshot = MoveProgress()
        snapshot.CopyFrom(self.progress)
        self._report(snapshot)

    def _settled(self, outcome: Outcome) -> None:
        """The request's fate is known. Pins may outlive it: the machine's lease timer gives them back."""
        self._kvconn.call(self._kvconn.unwatch, self.request.request_id)
        self.progress.reason = reason_number(outcome.reason)
        self.progress.detail = outcome.detail
        self._enter_phase(outcome.state)
        self._report_now()
        self.departures.records.add(self.progress)
        if self._released is None:
            self.departures.forget(self)
        else:
            # Until the loop has let go of it, the request looks as if it could be moved from here.
            self._released.add_done_callback(lambda _: self.departures.forget(self))
        self.done.set_result(self.progress)


class Destination:
    """Where a request goes: the peer's llumlet."""

    def __init__(self, instance: str, address: Address, client: LlumletClient) -> None:
        self.instance = instance
        self.address = address
        self.client = client


class Departures:
    """All moves out of this engine, and where those that left have gone."""

    def __init__(
        self,
        bypass: Bypass,
        kvconn: KVConnection,
        relay: Relay,
        adapters: Adapters,
        movers: Movers,
        deadline_s: float,
    ) -> None:
        self.bypass = bypass
        self.adapters = adapters
        self.kvconn = kvconn
        self.relay = relay
        self.identity = bypass.identity
        self.movers = movers
        self.deadline_s = deadline_s
        """Of a call in which no bytes move, and of a question to an origin."""
        self.moves: dict[str, OutgoingMove] = {}
        self.records = MoveRecords()
        config = bypass.config
        limits = Limits(
            max_requests=config.max_migrations_out,
            max_tokens=config.max_migration_tokens_out,
            max_kv_ratio=config.max_migration_kv_ratio_out,
        )
        self.slots = Slots(limits, kvconn.port.capacity_tokens, Reason.SOURCE_BUSY)
        self._clients: OrderedDict[Address, LlumletClient] = OrderedDict()
        self._left: OrderedDict[str, tuple[Address, ids.MigrationId]] = OrderedDict()

    @property
    def address(self) -> Address | None:
        return self.bypass.address

    def memory(self, capability: bytes) -> bytes:
        """Where the KV cache of this engine's workers lies, for a peer that will have blocks granted."""
        return encode_memory(
            self.identity.digest, self.bypass.movers, capability, self.bypass.engine.get_weight_version()
        )

    def client(self, address: Address) -> LlumletClient:
        """Every call to another llumlet begins here. Raises LlumletError for an address that is not to be called."""
        client = self._clients.get(address)
        if client is None:
            if (problem := self.bypass.config.reaches.why_not(address.host)) is not None:
                raise LlumletError(reason_number(Reason.ADDRESS_REFUSED), problem, str(address))
            client = self._clients[address] = LlumletClient(address, credentials=self.bypass.credentials)
            if len(self._clients) > MAX_CLIENTS:
                # Dropped, not closed: a move may still use the one that was asked for longest ago.
                self._clients.popitem(last=False)
        self._clients.move_to_end(address)
        return client

    def begin(
        self, request: Request, residence: Residence, to: Destination, plan: Plan, way: Way, report: Report
    ) -> OutgoingMove:
        """Raises Refused(source_busy) when as much is on its way as may be."""
        move = OutgoingMove(self, request, residence, to, plan, way, report)
        self.slots.take(move.migration_id, request.num_tokens)
        self.moves[request.request_id] = move
        self.kvconn.port.load.touch()
        move.feed(on.Start())
        return move

    def forget(self, move: OutgoingMove) -> None:
        self.slots.give_back(move.migration_id)
        self.moves.pop(move.request.request_id, None)
        self.kvconn.port.load.touch()
        self.kvconn.audit_when_idle()

    def remember(self, request_id: str, address: Address, migration_id: ids.MigrationId) -> None:
        """The request lives at `address` now."""
        self._left[request_id] = (address, migration_id)
        self._left.move_to_end(request_id)
        while len(self._left) > FORWARDING_ENTRIES:
            self._left.popitem(last=False)

    def came_back(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def owner_of(self, request_id: str) -> Address | None:
        entry = self._left.get(request_id)
        return entry[0] if entry else None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
