# SPDX-License-Identifier: Apache-2.0
"""Requests on their way in: the protocol's own `Destination` machine, over a modelled engine and modelled links.

What the machine asks of the engine is done between two steps, as in production. Messages are not lost, doubled or
reordered here, so a record is forgotten as soon as no message can ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.events import Settlement
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.move.destination import LEASE, Destination, State
from llumlet.protocol.move.limits import Limits, Slots
from llumlet.protocol.move.plan import Terms
from llumsim import PS
from llumsim.clock import Timers
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.queue import QueuePlace
from llumsim.engine.requests import EngineRequest
from llumsim.moves.links import Network, Transfer

_DESTINATION_RECORDS: Final = frozenset({State.COMMITTED, State.BARRED})


@dataclass(frozen=True, slots=True)
class Offer:
    """A source's description of a request and of itself."""

    migration_id: MigrationId
    request: EngineRequest
    """The request as it is at the source: read, never changed."""
    num_tokens: int
    holds_kv: bool
    source: ModelledInstance
    answer: Callable[[do.Effect], None]
    """Takes an answer at once; the way back is the answerer's."""


class Arrivals:
    """The moves into one instance."""

    def __init__(
        self,
        member: ModelledInstance,
        network: Network,
        hop_ps: int,
        owned: Callable[[EngineRequest, ModelledInstance], None],
        limits: Limits,
    ) -> None:
        """`owned`: called with what has arrived."""
        self.member = member
        self.network = network
        self.hop_ps = hop_ps
        self.owned = owned
        config = member.hardware.engine
        self.terms = Terms(block_size=config.block_size)
        self.slots = Slots(limits, config.num_blocks * config.block_size, Reason.DESTINATION_BUSY)
        self._moves: dict[MigrationId, IncomingMove] = {}

    def reserve(self, offer: Offer) -> None:
        """Begin a move, or refuse it."""
        try:
            if not self.member.is_schedulable:
                raise Refused(Reason.SHUTTING_DOWN, "it takes nothing new")
            self.slots.take(offer.migration_id, offer.num_tokens)
        except Refused as refused:
            offer.answer(do.RefuseReserve(refused.reason, refused.detail))
            return
        move = self._moves[offer.migration_id] = IncomingMove(self, offer)
        self.member.coming[offer.migration_id] = offer.num_tokens
        move.feed(on.ReserveRequested())

    def tell(self, migration_id: MigrationId, event: on.DestinationEvent, answer: Callable[[do.Effect], None]) -> None:
        """A message of the source's. Of a move that is not known, the answer says so."""
        move = self._moves.get(migration_id)
        if move is not None:
            move.feed(event)
        elif isinstance(event, on.CommitRequested):
            answer(do.AnswerCommit(Settlement.UNKNOWN))

    def lost(self, source: ModelledInstance) -> None:
        """An instance is gone from which requests may be coming."""
        for move in list(self._moves.values()):
            if move.offer.source is source:
                move.source_lost()

    def settled(self, move: IncomingMove) -> None:
        self.slots.give_back(move.offer.migration_id)
        self.member.coming.pop(move.offer.migration_id, None)

    def forget(self, move: IncomingMove) -> None:
        self._moves.pop(move.offer.migration_id, None)


class IncomingMove:
    def __init__(self, arrivals: Arrivals, offer: Offer) -> None:
        self.offer = offer
        self.machine = Destination(arrivals.terms)
        self._arrivals = arrivals
        self._member = arrivals.member
        self._clock = arrivals.member.clock
        self._timers = Timers(self._clock, lambda name: self.feed(on.TimerFired(name)))
        self._lease_end_ps = 0
        self._num_blocks = 0
        self._job = 0
        self._transfer: Transfer | None = None
        self._is_revoked = False
        self._admitted: EngineRequest | None = None

    def feed(self, event: on.DestinationEvent) -> None:
        if not self._member.is_alive:
            return
        machine = self.machine
        for effect in machine.on(event):
            self._perform(effect)
        if machine.settlement in (Settlement.COMMITTED, Settlement.BARRED):
            self._arrivals.settled(self)
        if machine.closed and self._admitted is not None:
            self._admitted.is_moving = False
        if machine.state is State.BARRED or (machine.state is State.COMMITTED and machine.closed):
            self._timers.close()
            self._arrivals.forget(self)

    def source_lost(self) -> None:
        """Notes that the source is lost: its memory is gone, and it will close nothing."""
        if self._admitted is not None:
            self.feed(on.CloseRequested())
        elif self._transfer is not None:
            self._arrivals.network.cancel(self._transfer)
            self._transfer = None
            self.feed(on.PullFailed(self._job, Reason.TRANSFER_FAILED))

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.SetTimer(name, seconds):
                if name == LEASE:
                    self._lease_end_ps = self._clock.now_ps + round(seconds * PS)
                if name not in _DESTINATION_RECORDS:
                    self._timers.set(name, seconds)
            case do.ClearTimer(name):
                self._timers.clear(name)
            case do.ReserveBlocks():
                self._post(self._reserve)
            case do.GrowReservation(num_tokens):
                self._post(lambda _: self._grow(num_tokens))
            case do.Pull(job, from_block, to_block):
                self._pull(job, to_block - from_block)
            case do.StopPull(job):
                if self._transfer is not None:
                    self._arrivals.network.cancel(self._transfer)
                self._clock.at(self._clock.now_ps, lambda _: self.feed(on.PullQuiesced(job)))
            case do.Admit(_, _, computed_tokens):
                self._post(lambda now_ps: self._admit(computed_tokens, now_ps))
            case do.RevokeAdmit():
                self._is_revoked = True
            case do.FreeReservation():
                self._post(lambda _: self._free())
            case do.AbortAdmitted():
                if (admitted := self._admitted) is not None:
                    self._post(lambda _: self._member.engine.remove(admitted))
            case _:
                hop_ps = self._arrivals.hop_ps
                self._clock.at(self._clock.now_ps + hop_ps, lambda _: self.offer.answer(effect))

    def _post(self, action: Callable[[int], None]) -> None:
        self._member.post(action, self._clock.now_ps)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._arrivals.terms.block_size)

    def _reserve(self, now_ps: int) -> None:
        wanted = self._blocks_of(self.offer.num_tokens + 1) if self.offer.holds_kv else 0
        if wanted and not self._member.engine.reserve(wanted, slot=True):
            self.feed(on.ReserveFailed(Reason.DESTINATION_FULL))
            return
        self._num_blocks = wanted
        self.feed(on.BlocksReserved(0, wanted))

    def _grow(self, num_tokens: int) -> None:
        more = self._blocks_of(num_tokens) - self._num_blocks
        if more > 0 and not self._member.engine.reserve(more, slot=False):
            self.feed(on.GrowFailed(Reason.DESTINATION_FULL))
            return
        self._num_blocks += max(more, 0)
        self.feed(on.Grown(self._num_blocks))

    def _pull(self, job: int, num_blocks: int) -> None:
        self._job = job
        source, hardware = self.offer.source, self._member.hardware
        if not source.is_alive:
            self._clock.at(self._clock.now_ps, lambda _: self.feed(on.PullFailed(job, Reason.TRANSFER_FAILED)))
            return
        num_bytes = num_blocks * self._arrivals.terms.block_size * hardware.bytes_per_token
        began_ps = self._clock.now_ps

        def done(_: int) -> None:
            self._transfer = None
            now_ps = self._clock.now_ps  # not the network's: this instance may be one whose time stands still
            seconds = (now_ps - began_ps) / PS
            self.feed(on.PullDone(job, num_bytes, seconds, lease_valid=now_ps <= self._lease_end_ps))

        self._transfer = self._arrivals.network.transfer(
            source.metadata.node_id, self._member.metadata.node_id, num_bytes, hardware.link_bytes_per_s, done
        )

    def _admit(self, computed_tokens: int, now_ps: int) -> None:
        if self._is_revoked:
            self.feed(on.AdmitFailed(Reason.BARRED))
            return
        here = self._admitted = copy_of(self.offer.request)
        here.is_moving = here.has_moved = True
        if computed_tokens:
            here.num_computed = computed_tokens
            self._member.engine.admit(here, self._num_blocks)
        else:
            self._member.engine.add(here, now_ps, QueuePlace.LAST if here.num_output else QueuePlace.IN_TURN)
        self._arrivals.owned(here, self._member)
        self.feed(on.Admitted())

    def _free(self) -> None:
        if not self._num_blocks:
            return
        self._member.engine.give_back(self._num_blocks)
        self._num_blocks = 0


def copy_of(request: EngineRequest) -> EngineRequest:
    """A request with what it went through, and without what an engine holds for it."""
    made = EngineRequest(
        request.id,
        request.num_prompt,
        request.max_tokens,
        request.priority,
        request.content,
        request.arrived_ps,
        request.external_id,
    )
    made.num_tokens = request.num_tokens
    made.first_token_ps, made.last_token_ps = request.first_token_ps, request.last_token_ps
    made.num_preemptions, made.preempted_ps = request.num_preemptions, request.preempted_ps
    made.preemption_loss_ps, made.num_recomputed = request.preemption_loss_ps, request.num_recomputed
    made.num_hits = request.num_hits
    return made
