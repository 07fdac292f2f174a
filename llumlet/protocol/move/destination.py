# SPDX-License-Identifier: Apache-2.0
"""The destination's half of a migration: one machine per migration id that a source has named.

Theory of operation
===================

The machine is D's record of one migration, and `settlement` is what the record says:

    UNKNOWN      NEW, FORGOTTEN                                              as if never heard of
    PENDING      RESERVING, RESERVED, GROWING, PULLING,                      S is decoding
                 EXTENDING, COMMITTING, ADMITTING                            S is frozen
    COMMITTED    COMMITTED                                                   D owns the request
    BARRED       DRAINING, BARRED                                            D never will, under this migration

PENDING becomes COMMITTED only when the scheduler has taken the request (Admitted), and BARRED for many reasons, a
Withdraw among them. Both are final, and kept longer than any source can be in doubt: a Commit that was delayed in the
network for a minute must still meet BARRED. A Cancel or Abort that overtakes its Reserve leaves the same mark.

Every message of the source may come twice, late, or out of order. A repetition of the one that is being worked on joins
it (no effect: its answer goes to all who wait); of one that was answered gets the same answer; a message that makes no
sense is refused, and a Commit that makes no sense bars.

Two things are never done early:

- Blocks are freed only when nothing that we started can touch them. A pull that is abandoned leaves its blocks DRAINING
  until every mover has said that it is quiet, if need be for ever; a reservation or a growth that the loop has begun is
  waited for in the same way. Being barred does not wait for that: the answer goes out at once.
- Bytes count only if the source still held them when the last one was read. The source pins for `lease_s` from
  receiving an answer of ours, we count from sending it (the timer is set before the answer is sent, and only a *first*
  answer renews it: the source may have seen that one and not its repetition). `PullDone.lease_valid` is looked at after
  the last byte; if it is false the bytes are never published.

ADMITTING is short, but D's loop may be in a step of several seconds. A Withdraw is not made to wait for it: RevokeAdmit
takes the admission back unless the loop has begun it, and the loop's answer, one way or the other, answers the
Withdraw. The same happens by itself after `admit_s`: the client waits, and S cannot tell a long step from a long copy.

The table is at the end of the file; `docs/understand/protocol.md` has its picture.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.effects import Effect
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Call, Settlement
from llumlet.protocol.machine import Machine, deadline, install, rows, timer
from llumlet.protocol.move.plan import Terms

LEASE = "lease"


class State(enum.StrEnum):
    NEW = "new"
    RESERVING = "reserving"
    RESERVED = "reserved"
    GROWING = "growing"
    PULLING = "pulling"
    EXTENDING = "extending"
    COMMITTING = "committing"
    ADMITTING = "admitting"
    COMMITTED = "committed"
    DRAINING = "draining"
    BARRED = "barred"
    FORGOTTEN = "forgotten"


_FINAL = {State.COMMITTED: Settlement.COMMITTED, State.DRAINING: Settlement.BARRED, State.BARRED: Settlement.BARRED}


class Destination(Machine[State, ev.DestinationEvent, do.DestinationEffect]):
    """Feed it events with `on()`; throw it away when `over`."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(State.NEW)
        self.terms = terms
        self.hit_blocks = 0
        self.num_blocks = 0
        """Blocks of the reservation, hits included."""
        self.copied_blocks = 0
        """Blocks `[0, copied_blocks)` hold final KV, hits included."""
        self.closed = False
        """The source has let the request go; until then the request must not move on."""
        self.reason: Reason | None = None
        """Why it is barred."""
        self.detail = ""
        self._round = ev.RoundRequested(0, 0, 0, 0)
        self._answers: dict[int, do.AnswerRound] = {}
        self._commit: ev.CommitRequested | None = None
        self._job = 0
        self._waiting: list[Call] = []
        self._abort_when_admitted = False

    @property
    def settlement(self) -> Settlement:
        return Settlement.UNKNOWN if self.over else _FINAL.get(self.state, Settlement.PENDING)

    @property
    def over(self) -> bool:
        """True if nothing is known any more, or nothing ever was."""
        return self.state in (State.NEW, State.FORGOTTEN)

    def _deadline(self, state: State) -> float | None:
        if state is State.ADMITTING:
            return self.terms.admit_s
        return self.terms.tombstone_s if state in (State.COMMITTED, State.BARRED) else None

    # Reserve

    def _reserved(self, event: ev.BlocksReserved) -> list[Effect]:
        self.hit_blocks = self.copied_blocks = event.hit_blocks
        self.num_blocks = event.num_blocks
        return [do.SetTimer(LEASE, self.terms.lease_s), *self._reserved_before(event)]

    def _reserved_before(self, event: object) -> list[Effect]:
        return [do.AnswerReserve(self.hit_blocks, self.terms.lease_s)]

    def _refuse_reserve(self, event: object) -> list[Effect]:
        return [do.RefuseReserve(self.reason or Reason.BARRED, self.detail)]

    # Rounds

    def _in_work(self, event: ev.RoundRequested) -> bool:
        return event == self._round

    def _answered(self, event: ev.RoundRequested) -> bool:
        return event.round in self._answers

    def _next_round(self, event: ev.RoundRequested) -> bool:
        in_order = event.round == self._round.round + 1
        return in_order and event.from_block == self.copied_blocks and event.to_block > event.from_block

    def _next_with_room(self, event: ev.RoundRequested) -> bool:
        """The reservation is a block ahead: growing at Commit would make the client wait for a turn of the loop."""
        ahead = event.num_tokens // self.terms.block_size + 2
        return self._next_round(event) and max(event.to_block, ahead) <= self.num_blocks

    def _grow_for_round(self, event: ev.RoundRequested) -> list[Effect]:
        self._round = event
        return [do.GrowReservation(event.num_tokens + 2 * self.terms.block_size)]

    def _pull_round(self, event: ev.RoundRequested) -> list[Effect]:
        self._round = event
        return [self._pull(event.from_block, event.to_block)]

    def _grown_for_round(self, event: ev.Grown) -> list[Effect]:
        self.num_blocks = event.num_blocks
        return [self._pull(self._round.from_block, self._round.to_block)]

    def _fits_anyway(self, event: ev.GrowFailed) -> bool:
        return self._round.to_block <= self.num_blocks

    def _pull_without_room(self, event: ev.GrowFailed) -> list[Effect]:
        return [self._pull(self._round.from_block, self._round.to_block)]

    def _grown_too_little(self, event: ev.Grown) -> bool:
        wanted = self._commit.num_blocks if self._commit else self._round.to_block
        return event.num_blocks < wanted

    def _pull(self, from_block: int, to_block: int) -> Effect:
        self._job += 1
        return do.Pull(self._job, from_block, to_block)

    def _in_time(self, event: ev.PullDone) -> bool:
        return event.job == self._job and event.lease_valid

    def _this_job(self, event: ev.PullDone | ev.PullFailed | ev.PullQuiesced) -> bool:
        return event.job == self._job

    def _round_done(self, event: ev.PullDone) -> list[Effect]:
        done = self._round
        self.copied_blocks = done.to_block
        answer = do.AnswerRound(done.round, event.num_bytes, event.seconds, self.terms.lease_s)
        self._answers[done.round] = answer
        return [do.SetTimer(LEASE, self.terms.lease_s), answer]

    def _answer_round(self, event: ev.RoundRequested) -> list[Effect]:
        return [self._answers[event.round]]

    def _round_out_of_order(self, event: ev.RoundRequested) -> list[Effect]:
        detail = f"round {event.round} [{event.from_block}, {event.to_block}) after {self.copied_blocks} blocks"
        return [do.RefuseRound(event.round, Reason.INVALID_REQUEST, detail)]

    def _refuse_round(self, event: ev.RoundRequested) -> list[Effect]:
        return [do.RefuseRound(event.round, self.reason or Reason.UNKNOWN_MIGRATION, self.detail)]

    # Commit

    def _makes_sense(self, event: ev.CommitRequested) -> bool:
        """The KV is carried whole, what is left to pull does not touch hits, and nothing is left out."""
        size = self.terms.block_size
        if event.computed_tokens == 0:
            return event.from_block == event.num_blocks == 0
        if event.num_blocks != -(-event.computed_tokens // size):
            return False
        if event.from_block == event.num_blocks:
            return event.num_blocks <= self.copied_blocks and not self.terms.has_states
        return self.hit_blocks <= event.from_block <= self.copied_blocks and event.from_block < event.num_blocks

    def _complete(self, event: ev.CommitRequested) -> bool:
        return self._makes_sense(event) and event.from_block == event.num_blocks

    def _fits(self, event: ev.CommitRequested) -> bool:
        return self._makes_sense(event) and event.num_blocks <= self.num_blocks

    def _admit_commit(self, event: ev.CommitRequested) -> list[Effect]:
        self._commit = event
        return [self._admit(event), *self._clear_lease()]

    def _pull_commit(self, event: ev.CommitRequested) -> list[Effect]:
        self._commit = event
        return [self._pull(event.from_block, event.num_blocks)]

    def _grow_for_commit(self, event: ev.CommitRequested) -> list[Effect]:
        self._commit = event
        return [do.GrowReservation(event.computed_tokens)]

    def _grown_for_commit(self, event: ev.Grown) -> list[Effect]:
        self.num_blocks = event.num_blocks
        assert self._commit is not None
        return [self._pull(self._commit.from_block, self._commit.num_blocks)]

    def _copied(self, event: ev.PullDone) -> list[Effect]:
        assert self._commit is not None
        self.copied_blocks = self._commit.num_blocks
        return [self._admit(self._commit), *self._clear_lease()]

    def _admit(self, commit: ev.CommitRequested) -> Effect:
        return do.Admit(commit.epoch, commit.base, commit.computed_tokens)

    def _admitted(self, event: ev.Admitted) -> list[Effect]:
        answers = [do.AnswerSettle(call, Settlement.COMMITTED) for call in self._waiting]
        abort = [do.AbortAdmitted()] if self._abort_when_admitted else []
        self._waiting.clear()
        return [*abort, do.AnswerCommit(Settlement.COMMITTED), *answers]

    def _not_admitted(self, event: ev.AdmitFailed) -> list[Effect]:
        answers = [do.AnswerSettle(call, Settlement.BARRED, event.reason) for call in self._waiting]
        self._waiting.clear()
        return [*self._bar(event.reason, event.detail), do.FreeReservation(), *answers]

    def _answer_commit(self, event: ev.CommitRequested) -> list[Effect]:
        return [do.AnswerCommit(self.settlement, self.reason, self.detail)]

    # Being barred

    def _bar(self, reason: Reason, detail: str = "") -> list[Effect]:
        """Bars the migration and answers all callers that wait for this state's work."""
        self.reason, self.detail = reason, detail
        open_calls: list[Effect] = []
        match self.state:
            case State.RESERVING:
                open_calls = [do.RefuseReserve(reason, detail)]
            case State.GROWING | State.PULLING:
                open_calls = [do.RefuseRound(self._round.round, reason, detail)]
            case State.EXTENDING | State.COMMITTING | State.ADMITTING:
                open_calls = [do.AnswerCommit(Settlement.BARRED, reason, detail)]
        return [*open_calls, *self._clear_lease()]

    def _let_go(self) -> list[Effect]:
        """Releases the blocks, now or when the present work has ended."""
        if self.state is State.RESERVED:
            return [do.FreeReservation()]
        if self.state in (State.PULLING, State.COMMITTING):
            return [do.StopPull(self._job)]
        return []

    def _failed(self, event: ev.PullFailed | ev.CancelRequested | ev.Revoked) -> list[Effect]:
        return [*self._let_go(), *self._bar(event.reason, event.detail)]

    def _not_reserved(self, event: ev.ReserveFailed) -> list[Effect]:
        return self._bar(event.reason, event.detail)

    def _not_grown(self, event: ev.GrowFailed) -> list[Effect]:
        return [*self._bar(event.reason, event.detail), do.FreeReservation()]

    def _grown_wrongly(self, event: ev.Grown) -> list[Effect]:
        return [*self._bar(Reason.DESTINATION_FULL, "the reservation did not grow enough"), do.FreeReservation()]

    def _pulled_too_late(self, event: ev.PullDone) -> list[Effect]:
        return [*self._bar(Reason.LEASE_EXPIRED, "the copy ended after its lease"), do.FreeReservation()]

    def _lease_ran_out(self, event: ev.TimerFired) -> list[Effect]:
        return [*self._let_go(), *self._bar(Reason.LEASE_EXPIRED, f"while {self.state}")]

    def _bad_commit(self, event: ev.CommitRequested) -> list[Effect]:
        bar = [*self._let_go(), *self._bar(Reason.INVALID_REQUEST, f"{event} while {self.state}")]
        return [*bar, do.AnswerCommit(Settlement.BARRED, self.reason, self.detail)]

    def _withdraw(self, event: ev.WithdrawRequested) -> list[Effect]:
        return self._bar_for(Call.WITHDRAW, Reason.BARRED, "withdrawn")

    def _cancel(self, event: ev.CancelRequested) -> list[Effect]:
        return self._bar_for(Call.CANCEL, event.reason, event.detail)

    def _abort(self, event: ev.AbortRequested) -> list[Effect]:
        return self._bar_for(Call.ABORT, Reason.REQUEST_ABORTED, "")

    def _bar_for(self, call: Call, reason: Reason, detail: str) -> list[Effect]:
        return [*self._let_go(), *self._bar(reason, detail), do.AnswerSettle(call, Settlement.BARRED, reason)]

    def _revoke_for_withdraw(self, event: ev.WithdrawRequested) -> list[Effect]:
        return self._revoke_for(Call.WITHDRAW)

    def _revoke_for_cancel(self, event: ev.CancelRequested) -> list[Effect]:
        return self._revoke_for(Call.CANCEL)

    def _revoke_for_abort(self, event: ev.AbortRequested) -> list[Effect]:
        self._abort_when_admitted = True
        return self._revoke_for(Call.ABORT)

    def _revoke_for(self, call: Call) -> list[Effect]:
        if call not in self._waiting:
            self._waiting.append(call)
        return [do.RevokeAdmit()]

    # Settled

    def _abort_admitted(self, event: ev.AbortRequested) -> list[Effect]:
        return [do.AbortAdmitted(), do.AnswerSettle(Call.ABORT, Settlement.COMMITTED)]

    def _close(self, event: ev.CloseRequested) -> list[Effect]:
        self.closed = True
        return self._state_for(Call.CLOSE)

    def _state_for(self, call: Call) -> list[Effect]:
        return [do.AnswerSettle(call, self.settlement, self.reason)]

    def _clear_lease(self) -> list[Effect]:
        return [do.ClearTimer(LEASE)] if LEASE in self._armed else []


def _answer(call: Call) -> Callable[[Destination, object], list[Effect]]:
    return lambda machine, event: machine._state_for(call)


_D, _P = Destination, State
_BUSY = (_P.RESERVING, _P.GROWING, _P.PULLING, _P.EXTENDING, _P.COMMITTING)
"""The loop or the movers are at work for us: being barred means DRAINING first."""
_LEASED = (_P.GROWING, _P.PULLING, _P.EXTENDING, _P.COMMITTING)
_TAKEN = (_P.EXTENDING, _P.COMMITTING, _P.ADMITTING)
_GRANTED = (_P.RESERVED, _P.GROWING, _P.PULLING, *_TAKEN, _P.COMMITTED)
_BARRED = (_P.DRAINING, _P.BARRED)
_SETTLED = (_P.COMMITTED, *_BARRED)
_KNOWN = tuple(state for state in State if state not in (_P.NEW, *_BARRED))

install(
    Destination,
    [
        # The way to COMMITTED
        rows(_P.NEW, ev.ReserveRequested, _P.RESERVING, [do.ReserveBlocks()]),
        rows(_P.RESERVING, ev.BlocksReserved, _P.RESERVED, _D._reserved),
        rows(_P.RESERVED, ev.RoundRequested, _P.PULLING, _D._pull_round, when=_D._next_with_room),
        rows(_P.RESERVED, ev.RoundRequested, _P.GROWING, _D._grow_for_round, when=_D._next_round),
        rows(_P.GROWING, ev.Grown, _P.BARRED, _D._grown_wrongly, when=_D._grown_too_little),
        rows(_P.GROWING, ev.Grown, _P.PULLING, _D._grown_for_round),
        rows(_P.PULLING, ev.PullDone, _P.RESERVED, _D._round_done, when=_D._in_time),
        rows(_P.RESERVED, ev.CommitRequested, _P.ADMITTING, _D._admit_commit, when=_D._complete),
        rows(_P.RESERVED, ev.CommitRequested, _P.COMMITTING, _D._pull_commit, when=_D._fits),
        rows(_P.RESERVED, ev.CommitRequested, _P.EXTENDING, _D._grow_for_commit, when=_D._makes_sense),
        rows(_P.EXTENDING, ev.Grown, _P.BARRED, _D._grown_wrongly, when=_D._grown_too_little),
        rows(_P.EXTENDING, ev.Grown, _P.COMMITTING, _D._grown_for_commit),
        rows(_P.COMMITTING, ev.PullDone, _P.ADMITTING, _D._copied, when=_D._in_time),
        rows(_P.ADMITTING, ev.Admitted, _P.COMMITTED, _D._admitted),
        # The ways to BARRED: something failed here
        rows(_P.RESERVING, ev.ReserveFailed, _P.BARRED, _D._not_reserved),
        rows(_P.GROWING, ev.GrowFailed, _P.PULLING, _D._pull_without_room, when=_D._fits_anyway),
        rows((_P.GROWING, _P.EXTENDING), ev.GrowFailed, _P.BARRED, _D._not_grown),
        rows((_P.PULLING, _P.COMMITTING), ev.PullFailed, _P.DRAINING, _D._failed, when=_D._this_job),
        rows((_P.PULLING, _P.COMMITTING), ev.PullDone, _P.BARRED, _D._pulled_too_late, when=_D._this_job),
        rows(_P.ADMITTING, ev.AdmitFailed, _P.BARRED, _D._not_admitted),
        rows(_P.RESERVED, ev.TimerFired, _P.BARRED, _D._lease_ran_out, when=timer(LEASE)),
        rows(_LEASED, ev.TimerFired, _P.DRAINING, _D._lease_ran_out, when=timer(LEASE)),
        rows(_P.ADMITTING, ev.TimerFired, None, [do.RevokeAdmit()], when=deadline),
        rows(_P.RESERVED, ev.Revoked, _P.BARRED, _D._failed),
        rows(_BUSY, ev.Revoked, _P.DRAINING, _D._failed),
        # … or the source wants it so
        rows(_P.RESERVED, ev.WithdrawRequested, _P.BARRED, _D._withdraw),
        rows(_BUSY, ev.WithdrawRequested, _P.DRAINING, _D._withdraw),
        rows(_P.ADMITTING, ev.WithdrawRequested, None, _D._revoke_for_withdraw),
        rows((_P.NEW, _P.RESERVED), ev.CancelRequested, _P.BARRED, _D._cancel),
        rows(_BUSY, ev.CancelRequested, _P.DRAINING, _D._cancel),
        rows(_P.ADMITTING, ev.CancelRequested, None, _D._revoke_for_cancel),
        rows((_P.NEW, _P.RESERVED), ev.AbortRequested, _P.BARRED, _D._abort),
        rows(_BUSY, ev.AbortRequested, _P.DRAINING, _D._abort),
        rows(_P.ADMITTING, ev.AbortRequested, None, _D._revoke_for_abort),
        rows(_P.RESERVED, ev.CommitRequested, _P.BARRED, _D._bad_commit),
        rows((_P.RESERVING, _P.GROWING, _P.PULLING), ev.CommitRequested, _P.DRAINING, _D._bad_commit),
        # Barred, and what was under way has ended
        rows(_P.DRAINING, ev.BlocksReserved, _P.BARRED, [do.FreeReservation()]),
        rows(_P.DRAINING, ev.ReserveFailed, _P.BARRED),
        rows(_P.DRAINING, ev.Grown, _P.BARRED, [do.FreeReservation()]),
        rows(_P.DRAINING, ev.GrowFailed, _P.BARRED, [do.FreeReservation()]),
        rows(_P.DRAINING, ev.PullQuiesced, _P.BARRED, [do.FreeReservation()], when=_D._this_job),
        # Settled
        rows(_P.COMMITTED, ev.AbortRequested, None, _D._abort_admitted),
        rows(_P.COMMITTED, ev.CloseRequested, None, _D._close),
        rows((_P.COMMITTED, _P.BARRED), ev.TimerFired, _P.FORGOTTEN, when=deadline),
        # Repetitions: join what is in work, or get the same answer again
        rows(_P.RESERVING, ev.ReserveRequested, None, late=True),
        rows(_GRANTED, ev.ReserveRequested, None, _D._reserved_before, late=True),
        rows(_BARRED, ev.ReserveRequested, None, _D._refuse_reserve, late=True),
        rows((_P.GROWING, _P.PULLING), ev.RoundRequested, None, when=_D._in_work, late=True),
        rows(_KNOWN, ev.RoundRequested, None, _D._answer_round, when=_D._answered, late=True),
        rows((_P.NEW, *_BARRED), ev.RoundRequested, None, _D._refuse_round, late=True),
        rows(_KNOWN, ev.RoundRequested, None, _D._round_out_of_order, late=True),
        rows(_TAKEN, ev.CommitRequested, None, late=True),
        rows((_P.NEW, *_SETTLED), ev.CommitRequested, None, _D._answer_commit, late=True),
        rows((_P.NEW, *_SETTLED), ev.WithdrawRequested, None, _answer(Call.WITHDRAW), late=True),
        rows(_SETTLED, ev.CancelRequested, None, _answer(Call.CANCEL), late=True),
        rows(_BARRED, ev.AbortRequested, None, _answer(Call.ABORT), late=True),
        rows(State, ev.CloseRequested, None, _answer(Call.CLOSE), late=True),
        rows(State, ev.QueryRequested, None, _answer(Call.QUERY), late=True),
        # What crossed with a change of state
        rows((_P.ADMITTING, *_SETTLED), ev.Revoked, None, late=True),
        rows(_P.BARRED, ev.AdmitFailed, None, late=True),
        *(rows(State, ended, None, late=True) for ended in (ev.PullDone, ev.PullFailed, ev.PullQuiesced)),
    ],
)
