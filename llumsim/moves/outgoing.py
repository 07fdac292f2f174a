# SPDX-License-Identifier: Apache-2.0
"""Requests on their way out: the protocol's own `Source` machine, over a modelled engine.

Pins are not modelled: of a request that is preempted while it is copied, the move is called off, and nothing is read
after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Call, Gone, Settlement
from llumlet.protocol.ids import Epoch, MigrationId
from llumlet.protocol.move.limits import Limits, Slots
from llumlet.protocol.move.plan import Method, Plan
from llumlet.protocol.move.source import SETTLED, Source, State
from llumsim import PS
from llumsim.clock import Timers
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.requests import EngineRequest, Phase, Watcher
from llumsim.moves.incoming import Arrivals, Offer

Owner = Callable[[str], ModelledInstance | None]
"""Finds the instance that runs a request, by request id."""

_CALLS: Final[dict[type[do.Effect], tuple[Call, Callable[..., on.DestinationEvent]]]] = {
    do.SendReserve: (Call.RESERVE, on.ReserveRequested),
    do.SendRound: (Call.ROUND, on.RoundRequested),
    do.SendCommit: (Call.COMMIT, on.CommitRequested),
    do.SendWithdraw: (Call.WITHDRAW, on.WithdrawRequested),
    do.SendCancel: (Call.CANCEL, on.CancelRequested),
    do.SendAbort: (Call.ABORT, on.AbortRequested),
    do.SendClose: (Call.CLOSE, on.CloseRequested),
    do.SendQuery: (Call.QUERY, on.QueryRequested),
}
"""The call of each message and the event it is at the destination, which has the same fields."""


class Departures:
    """The moves out of one instance."""

    def __init__(self, member: ModelledInstance, hop_ps: int, owner: Owner, limits: Limits) -> None:
        config = member.hardware.engine
        self.slots = Slots(limits, config.num_blocks * config.block_size, Reason.SOURCE_BUSY)
        self.member = member
        self.hop_ps = hop_ps
        self.owner = owner
        self._numbers: Iterator[int] = itertools.count()
        self._moves: dict[EngineRequest, OutgoingMove] = {}

    def begin(
        self, request: EngineRequest, destination: Arrivals, told: Callable[[OutgoingMove], None]
    ) -> OutgoingMove:
        """Begin a move of a request that decodes or waits here. `told` is called with every state of its machine; the
        settling state is the last. Raises Refused(source_busy) without a free slot."""
        number = MigrationId(f"{self.member.metadata.incarnation}/{next(self._numbers)}")
        self.slots.take(number, self.member.engine.num_tokens(request))
        move = self._moves[request] = OutgoingMove(self, request, destination, number, told)
        request.is_moving = True
        self.member.leaving[request] = None
        move.feed(on.Start())
        self.member.changed(self.member.clock.now_ps)
        return move

    def gone(self, request: EngineRequest, kind: Gone) -> None:
        """The engine says that it has ended, or has been preempted."""
        move = self._moves.get(request)
        if move is not None:
            move.feed(on.RequestGone(kind))

    def lost(self, destination: ModelledInstance) -> None:
        for move in list(self._moves.values()):
            move.destination_lost(destination)

    def settled(self, move: OutgoingMove) -> None:
        self.slots.give_back(move.migration_id)
        self._moves.pop(move.request, None)
        self.member.leaving.pop(move.request, None)
        # One that has left is here until the loop gets to it, and cannot leave again.
        move.request.is_moving = move.machine.state is not State.STAYED
        self.member.changed(self.member.clock.now_ps)


class MoveWatcher(Watcher):
    """The part of a `Watcher` that tells moves of what befalls their requests."""

    departures: Departures

    def preempted(self, request: EngineRequest, now_ps: int) -> None:
        if request.is_moving:
            self.departures.gone(request, Gone.PREEMPTED)

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        if request.is_moving:
            self.departures.gone(request, Gone.FINISHED)


class OutgoingMove:
    def __init__(
        self,
        departures: Departures,
        request: EngineRequest,
        destination: Arrivals,
        migration_id: MigrationId,
        told: Callable[[OutgoingMove], None],
    ) -> None:
        member = departures.member
        method = Method.RECOMPUTE if request.phase is Phase.WAITING else Method.LIVE
        self.request = request
        self.num_tokens = member.engine.num_tokens(request)
        self.machine = Source(
            Plan(
                method=method,
                epoch_next=Epoch().next_hop(),
                bytes_per_block=member.metadata.bytes_per_block,
                stall_budget_s=member.metadata.stall_budget_ms / 1e3,
            )
        )
        self.began_ps = member.clock.now_ps
        self.copying_ps = 0
        """Time during which blocks were copied."""
        self._round_began_ps = 0
        self._departures = departures
        self._member = member
        self._clock = member.clock
        self._destination = destination
        self.migration_id = migration_id
        self._told = told
        self._last_told: State | None = None
        self._awaited: Call | None = None
        """The call that has no answer yet."""
        self._timers = Timers(self._clock, lambda name: self.feed(on.TimerFired(name)))

    def feed(self, event: on.SourceEvent) -> None:
        if not self._member.is_alive:
            return
        for effect in self.machine.on(event):
            self._perform(effect)
        state = self.machine.state
        if state is not self._last_told and self._last_told not in SETTLED:
            self._last_told = state
            if self.machine.settled:
                self._departures.settled(self)
            self._told(self)

    def destination_lost(self, member: ModelledInstance) -> None:
        """A connection breaks."""
        if self._destination.member is member and (call := self._awaited) is not None:
            self._awaited = None
            self._later(lambda: self.feed(on.PeerUnreachable(call)))

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.SetTimer(name, seconds):
                self._timers.set(name, seconds)
            case do.ClearTimer(name):
                self._timers.clear(name)
            case do.SendReserve():
                # The loop tells what the request is like; the destination is asked after that.
                self._member.post(lambda _: self._ask(effect), self._clock.now_ps)
            case do.PinBlocks(_):
                self._member.post(self._pin, self._clock.now_ps)
            case do.Freeze():
                self._member.post(self._freeze, self._clock.now_ps)
            case do.Unfreeze():
                self._member.post(self._unfreeze, self._clock.now_ps)
            case do.Release() | do.Drop():
                self._member.post(self._remove, self._clock.now_ps)
            case do.Unpin():
                pass
            case do.AskFence(epoch):
                self._later(lambda: self._fence(epoch), 2)
            case _:
                self._send(effect)

    # The loop of the engine

    def _ask(self, effect: do.Effect) -> None:
        if not self.machine.settled:
            self.num_tokens = self._member.engine.num_tokens(self.request)
            self._send(effect)

    def _pin(self, now_ps: int) -> None:
        if self.machine.settled:
            return
        self.num_tokens = self._member.engine.num_tokens(self.request)
        size = self._member.hardware.engine.block_size
        self.feed(on.BlocksPinned((self.num_tokens - 1) // size, self.num_tokens))

    def _freeze(self, now_ps: int) -> None:
        if self.machine.settled:
            return
        request, engine = self.request, self._member.engine
        if request.phase is Phase.WAITING:
            engine.park(request)
            computed = 0
        elif request.phase is Phase.DECODE and self.machine.plan.method is Method.LIVE:
            engine.freeze(request)
            computed = request.num_computed
        else:
            # It waited when the move began, and runs by now.
            self.feed(on.PinFailed(Reason.PREFILL_RUNNING))
            return
        self.num_tokens = request.num_tokens
        num_blocks = -(-computed // engine.config.block_size)
        self.feed(on.Frozen(request.num_tokens, computed, num_blocks, request.num_output))

    def _unfreeze(self, now_ps: int) -> None:
        if self.request.phase is Phase.FROZEN:
            if self.request in self._member.engine.running:
                self._member.engine.unfreeze(self.request)
            else:
                self._member.engine.unpark(self.request)

    def _remove(self, now_ps: int) -> None:
        if self.request.phase is not Phase.GONE:
            self._member.engine.remove(self.request)

    # Messages

    def _send(self, effect: do.Effect) -> None:
        call, make = _CALLS[type(effect)]
        event = make(*msgspec.structs.astuple(effect))
        if call in (Call.RESERVE, Call.ROUND, Call.COMMIT, Call.WITHDRAW):
            self._awaited = call
        if call in (Call.ROUND, Call.COMMIT):
            self._round_began_ps = self._clock.now_ps
        self._later(lambda: self._deliver(call, event))

    def _deliver(self, call: Call, event: on.DestinationEvent) -> None:
        destination = self._destination
        if not destination.member.is_alive:
            if self._awaited is call:
                self._awaited = None
                self._later(lambda: self.feed(on.PeerUnreachable(call)))
        elif call is Call.RESERVE:
            holds_kv = self.machine.plan.method is Method.LIVE
            destination.reserve(
                Offer(self.migration_id, self.request, self.num_tokens, holds_kv, self._member, self._answered)
            )
        else:
            destination.tell(self.migration_id, event, self._answered)

    def _answered(self, effect: do.Effect) -> None:
        event = self._event(effect)
        if event is not None:
            if not isinstance(event, on.Unsettled):
                self._awaited = None
            if isinstance(event, on.RoundDone | on.Committed):
                self.copying_ps += self._clock.now_ps - self._round_began_ps
            self.feed(event)

    def _event(self, effect: do.Effect) -> on.SourceEvent | None:
        incarnation = self._destination.member.metadata.incarnation
        match effect:
            case do.AnswerReserve(hit_blocks, lease_s):
                return on.Reserved(hit_blocks, lease_s, incarnation)
            case do.RefuseReserve(reason, detail):
                return on.ReserveRefused(reason, detail)
            case do.AnswerRound(round_, num_bytes, seconds, _):
                return on.RoundDone(round_, num_bytes, seconds)
            case do.RefuseRound(round_, reason, detail):
                return on.RoundFailed(round_, reason, detail)
            case do.AnswerSettle(Call.CANCEL | Call.CLOSE, _, _):
                return None
            case do.AnswerCommit(state, reason) | do.AnswerSettle(_, state, reason):
                if state is Settlement.COMMITTED:
                    return on.Committed(incarnation)
                if state is Settlement.BARRED:
                    return on.Barred(reason or Reason.BARRED, incarnation)
                return on.Unsettled() if state is Settlement.PENDING else on.Forgotten()
        raise AssertionError(f"no answer: {effect}")

    def _fence(self, epoch: Epoch) -> None:
        """Ask the origin, which knows the instance that sends it tokens."""
        owner = self._departures.owner(self.request.id)
        if owner is self._destination.member:
            self.feed(on.FenceStarted())
        elif owner is None:
            self.feed(on.OriginFinished())
        else:
            self.feed(on.FenceRaised(Epoch(epoch.term + 1)))

    def _later(self, action: Callable[[], None], num_hops: int = 1) -> None:
        self._clock.at(self._clock.now_ps + num_hops * self._departures.hop_ps, lambda _: action())

    @property
    def seconds(self) -> float:
        return (self._clock.now_ps - self.began_ps) / PS
