# SPDX-License-Identifier: Apache-2.0
"""The source's half of a migration: one machine per request that is on its way out.

Theory of operation
===================

Four parties: S (this machine), D (the destination), O (the API server that holds the client's stream), and S's own
loop. The request belongs to S until Commit is *sent*. What can go wrong before that has one answer: tell D to forget
it, give back what we hold, and let the request go on here. Sending Commit is the point of no return: from then on D may
own the request whether or not we ever hear of it, so silence and errors mean *doubt*, never "no".

Doubt is resolved by exactly one of three facts, asked for in this order:

1. D's settlement. COMMITTED and BARRED are final and binding if they come from the life of D (`incarnation`) that
   granted the reservation. Withdraw makes D decide: it is a compare-and-swap PENDING -> BARRED.
2. O's fence. O has seen output of the new epoch (somebody else owns the request: let go), or bars it for good and
   raises the term: then, and only then, S goes on without D's word. Once O has been asked, D's word does not settle the
   request any more: O may have raised the term, and a COMMITTED believed after that would leave no owner at all.
3. Neither answers: S lets the request go. D may be running it; if not, O starts it again from what it has delivered.

"Unknown migration" from D is not a no: the life of D that we spoke to may have committed, emitted and died.

Rounds. While the request decodes, S pins the blocks whose KV is final and has D copy them. A round counts when D
reports it while the pin is held; then the pin goes back. Rounds end when at most one full block is left, or when a
round leaves as much as it copied; what is left then must fit the stall budget. From Freeze to the settlement every
block is pinned, because neither preemption nor an abort at S may take the bytes from under D's last pull.

The client waits meanwhile, so S is not patient after Commit. Only a last copy that may take long (a blocking move's is
the whole request) gets more time, and only while D says, asked every `commit_s`, that it has not decided: a D that is
stopped or cut off costs the same however much there is to copy.

Pins that outlive the settlement. When S goes on by the fence, lets go, or loses the request to an abort, D may still be
reading: it may be stopped, and wake up. D checks its lease after the last byte, and its lease ends before ours (D
counts from sending an answer, S from receiving it). So the pins stay until the lease is over or D settles, although the
machine's state is final by then. `settled` says that the request's fate is known, `over` that nothing is held any more.

    PLANNED, RESERVING, PINNING, COPYING, FREEZING     S owns the request; any failure: STAYED
    COMMITTING, WITHDRAWING, FENCING                   nobody knows who owns it; it does not run here
    MOVED, STAYED, GONE, LOST                          settled; `outcome` says why

The table is at the end of the file; `docs/understand/protocol.md` has its picture.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.effects import Effect
from llumlet.protocol.errors import LocalProtocolError, Reason
from llumlet.protocol.events import Call, Gone
from llumlet.protocol.machine import Machine, deadline, install, rows, timer
from llumlet.protocol.move.plan import Method, Plan

LEASE = "lease"
ASK = "ask"


class State(enum.StrEnum):
    PLANNED = "planned"
    RESERVING = "reserving"
    PINNING = "pinning"
    COPYING = "copying"
    FREEZING = "freezing"
    COMMITTING = "committing"
    WITHDRAWING = "withdrawing"
    FENCING = "fencing"
    MOVED = "moved"
    STAYED = "stayed"
    GONE = "gone"
    LOST = "lost"


SETTLED = frozenset({State.MOVED, State.STAYED, State.GONE, State.LOST})
IN_DOUBT = frozenset({State.COMMITTING, State.WITHDRAWING, State.FENCING})


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a move. `reason` is None exactly when it moved."""

    state: State
    reason: Reason | None = None
    detail: str = ""


class Source(Machine[State, ev.SourceEvent, do.SourceEffect]):
    """Feed it events with `on()` until `over`; read `outcome` as soon as `settled`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(State.PLANNED)
        self.plan = plan
        self.rounds = 0
        """Rounds that were begun."""
        self.copied_blocks = 0
        """Blocks `[0, copied_blocks)` are at the destination, prefix-cache hits included."""
        self.copied_bytes = 0
        self._copy_seconds = 0.0
        self._round_blocks = 0
        self._incarnation = ""
        self._lease_s = 0.0
        self._pinned = False
        self._heard = True
        """True if the destination has answered since Commit, or since it was last asked if it has decided."""
        self._reprieves = 0
        """Number of times that Commit's deadline may still be postponed."""
        self._reason: Reason | None = None
        self._detail = ""

    @property
    def settled(self) -> bool:
        return self.state in SETTLED

    @property
    def over(self) -> bool:
        """Settled, and no pin is held any more: the machine may be thrown away."""
        return self.settled and not self._pinned

    @property
    def outcome(self) -> Outcome | None:
        if not self.settled:
            return None
        reason = None if self.state is State.MOVED else self._reason
        return Outcome(self.state, reason, self._detail if reason else "")

    def widen_rows(self, times: int) -> None:
        """The destination has said that a row of this move is so many of those that were planned with. Before its
        answer is fed."""
        self.plan = msgspec.structs.replace(self.plan, bytes_per_block=times * self.plan.bytes_per_block)

    def leave_kv(self) -> None:
        """The destination has said that it takes the tokens alone: this is a move by recomputation.

        Before its answer is fed. Raises LocalProtocolError later.
        """
        if self.state is not State.RESERVING:
            raise LocalProtocolError(f"the KV cache cannot be left behind while {self.state}")
        self.plan = msgspec.structs.replace(self.plan, method=Method.RECOMPUTE)

    def _deadline(self, state: State) -> float | None:
        plan = self.plan
        return {
            State.RESERVING: plan.reserve_s,
            State.PINNING: plan.loop_s,
            State.COPYING: plan.round_s,
            State.FREEZING: plan.loop_s,
            State.COMMITTING: plan.commit_s,
            State.WITHDRAWING: plan.withdraw_s,
            State.FENCING: plan.fence_s,
        }.get(state)

    # Copying

    def _is_live(self, event: ev.Reserved) -> bool:
        return self.plan.method is Method.LIVE

    def _begin(self, event: ev.Reserved) -> list[Effect]:
        self._incarnation = event.incarnation
        self.copied_blocks = event.hit_blocks
        self._lease_s = event.lease_s
        lease = do.SetTimer(LEASE, event.lease_s)
        if self.plan.method is Method.LIVE:
            return [lease, *self._pin()]
        return [lease, *self._freeze()]

    def _pin(self) -> list[Effect]:
        self._pinned = True
        return [do.PinBlocks(self.copied_blocks)]

    def _freeze(self) -> list[Effect]:
        unpin = self._unpin()
        self._pinned = True
        return [*unpin, do.Freeze()]

    def _round_pays(self, event: ev.BlocksPinned) -> bool:
        """Another round: it is more than a block, fewer than the last round copied, and not one too many."""
        left = event.frontier_blocks - self.copied_blocks
        shrinks = self.rounds == 0 or left < self._round_blocks
        return left > 1 and shrinks and self.rounds < self.plan.max_rounds

    def _send_round(self, event: ev.BlocksPinned) -> list[Effect]:
        self.rounds += 1
        self._round_blocks = event.frontier_blocks - self.copied_blocks
        return [do.SendRound(self.rounds, self.copied_blocks, event.frontier_blocks, event.num_tokens)]

    def _stall_too_long(self, event: ev.BlocksPinned) -> bool:
        return not self.plan.force and self._stall_seconds(event) > self.plan.stall_budget_s

    def _stall_seconds(self, event: ev.BlocksPinned) -> float:
        """For what is left, the partial block included."""
        return self._copy_seconds_of(max(0, event.frontier_blocks - self.copied_blocks) + 1)

    def _copy_seconds_of(self, num_blocks: int) -> float:
        """Expected time of a last copy at the rate measured so far; 0 while nothing was measured."""
        if not self.copied_bytes:
            return 0.0
        num_bytes = num_blocks * self.plan.bytes_per_block + self.plan.state_bytes
        return num_bytes * self._copy_seconds / self.copied_bytes

    def _stay_for_stall(self, event: ev.BlocksPinned) -> list[Effect]:
        milliseconds = 1000 * self._stall_seconds(event)
        reason = Reason.TOO_MANY_ROUNDS if self.rounds >= self.plan.max_rounds else Reason.STALL_BUDGET
        return self._call_off(reason, f"the last copy would take {milliseconds:.0f} ms")

    def _freeze_after(self, event: ev.BlocksPinned) -> list[Effect]:
        return self._freeze()

    def _same_round(self, event: ev.RoundDone | ev.RoundFailed) -> bool:
        return event.round == self.rounds

    def _count_round(self, event: ev.RoundDone) -> list[Effect]:
        self.copied_blocks += self._round_blocks
        self.copied_bytes += event.num_bytes
        self._copy_seconds += event.seconds
        return [*self._unpin(), do.SetTimer(LEASE, self._lease_s), *self._pin()]

    def _commit(self, event: ev.Frozen) -> list[Effect]:
        epoch = self.plan.epoch_next
        if self.plan.method is Method.RECOMPUTE:
            return [do.SendCommit(epoch, event.base, 0, 0, 0)]
        last_block = event.num_blocks
        if self.plan.state_bytes and last_block:
            last_block -= 1  # the destination has something to copy in any case
        from_block = min(self.copied_blocks, last_block)
        blocking = self.plan.method is Method.BLOCKING
        last_copy_s = self._lease_s if blocking else 2 * self._copy_seconds_of(event.num_blocks - from_block)
        self._reprieves = int(last_copy_s / self.plan.commit_s)
        return [do.SendCommit(epoch, event.base, event.computed_tokens, from_block, event.num_blocks)]

    # Before Commit was sent: every failure ends here

    def _call_off(self, reason: Reason, detail: str = "") -> list[Effect]:
        """Undo whatever this state may hold, and go on here."""
        self._reason, self._detail = reason, detail
        told = [] if self.state is State.PLANNED else [do.SendCancel(reason)]
        thaw = [do.Unfreeze()] if self.state is State.FREEZING else []
        return [*thaw, *self._unpin(), *told, *self._clear(LEASE)]

    def _failed(self, event: ev.PinFailed | ev.RoundFailed | ev.CancelRequested) -> list[Effect]:
        return self._call_off(event.reason, event.detail)

    def _refused(self, event: ev.ReserveRefused) -> list[Effect]:
        self._reason, self._detail = event.reason, event.detail
        return []

    def _unreachable(self, event: ev.PeerUnreachable) -> list[Effect]:
        return self._call_off(Reason.PEER_UNREACHABLE, event.detail)

    def _too_late(self, event: ev.TimerFired) -> list[Effect]:
        loop = self.state in (State.PINNING, State.FREEZING)
        return self._call_off(Reason.SOURCE_BUSY if loop else Reason.DEADLINE, f"no answer while {self.state}")

    def _is_preempted(self, event: ev.RequestGone) -> bool:
        return event.kind is Gone.PREEMPTED

    def _gone(self, event: ev.RequestGone) -> list[Effect]:
        return self._call_off(Reason(f"request_{event.kind}"))

    # In doubt

    def _same_life(self, event: ev.Committed | ev.Barred) -> bool:
        return event.incarnation == self._incarnation

    def _let_go(self, event: ev.Committed) -> list[Effect]:
        return [do.Release(), *self._unpin(), do.SendClose(), *self._clear(LEASE)]

    def _let_go_by_fence(self, event: ev.FenceStarted) -> list[Effect]:
        # Perhaps it was a replay that started, and a Commit that was delayed has D read only now.
        return [do.Release(), do.SendClose(), *self._clear(ASK), *self._linger()]

    def _resume(self, event: ev.Barred) -> list[Effect]:
        self._reason, self._detail = self._reason or event.reason, self._detail or event.detail
        return [do.Unfreeze(), *self._unpin(), *self._clear(LEASE)]

    def _may_be_copying(self, event: ev.TimerFired) -> bool:
        return deadline(self, event) and self._heard and self._reprieves > 0

    def _put_off(self, event: ev.TimerFired) -> list[Effect]:
        self._heard = False
        self._reprieves -= 1
        return [do.SendQuery(), do.SetTimer(self.state.value, self.plan.commit_s)]

    def _hear(self, event: ev.Unsettled) -> list[Effect]:
        self._heard = True
        return []

    def _withdraw_for(self, event: ev.CancelRequested) -> list[Effect]:
        self._reason, self._detail = event.reason, event.detail
        return [do.SendWithdraw()]

    def _withdraw_unheard(self, event: ev.PeerUnreachable) -> list[Effect]:
        self._reason, self._detail = Reason.PEER_UNREACHABLE, event.detail
        return [do.SendWithdraw()]

    def _withdraw_late(self, event: ev.TimerFired) -> list[Effect]:
        self._reason, self._detail = Reason.DEADLINE, "no answer to Commit"
        return [do.SendWithdraw()]

    def _ask(self, event: object) -> list[Effect]:
        self._reason = self._reason or Reason.OWNER_LOST
        return [do.AskFence(self.plan.epoch_next), do.SetTimer(ASK, self.plan.ask_s)]

    def _raised(self, event: ev.FenceRaised) -> bool:
        return event.epoch > self.plan.epoch_next

    def _resume_under(self, event: ev.FenceRaised) -> list[Effect]:
        # If D committed, it runs under a barred epoch: tell it, rather than let the origin's Dismissal do so later.
        return [do.Unfreeze(event.epoch), do.SendAbort(), *self._clear(ASK), *self._linger()]

    def _unwanted(self, event: ev.OriginFinished) -> list[Effect]:
        self._reason, self._detail = Reason.REQUEST_FINISHED, "the origin does not wait for it any more"
        return [do.Drop(), do.SendAbort(), *self._clear(ASK), *self._linger()]

    def _lose(self, event: ev.TimerFired) -> list[Effect]:
        # Not SendAbort: D may be the owner.
        self._reason, self._detail = Reason.OWNER_LOST, "neither the destination nor the origin answers"
        return [do.Drop(), *self._clear(ASK), *self._linger()]

    def _aborted_in_doubt(self, event: ev.RequestGone) -> list[Effect]:
        self._reason, self._detail = Reason(f"request_{event.kind}"), ""
        return [do.SendAbort(), *self._clear(ASK), *self._linger()]

    # Settled

    def _linger(self) -> list[Effect]:
        """The pins stay until the destination's lease is over for certain."""
        return [] if LEASE in self._armed else [do.SetTimer(LEASE, 0.0)]

    def _unpin_now(self, event: object) -> list[Effect]:
        return [*self._unpin(), *self._clear(LEASE)]

    def _unpin_late(self, event: ev.BlocksPinned | ev.Frozen) -> list[Effect]:
        # The loop had begun when the machine settled. While it lingers, the pins stay with the others.
        return [] if self._pinned else [do.Unpin()]

    def _unpin(self) -> list[Effect]:
        if not self._pinned:
            return []
        self._pinned = False
        return [do.Unpin()]

    def _clear(self, name: str) -> list[Effect]:
        return [do.ClearTimer(name)] if name in self._armed else []


def _unheard(call: Call) -> Callable[[Source, ev.PeerUnreachable], bool]:
    def guard(machine: Source, event: ev.PeerUnreachable) -> bool:
        return event.call is call

    guard.__name__ = str(call)
    return guard


_P = State
_OWNED = (_P.RESERVING, _P.PINNING, _P.COPYING, _P.FREEZING)
_ANSWERS = (
    ev.Reserved,
    ev.ReserveRefused,
    ev.RoundDone,
    ev.RoundFailed,
    ev.PeerUnreachable,
    ev.Forgotten,
    ev.Unsettled,
)
_FENCE_ANSWERS = (ev.FenceStarted, ev.FenceRaised, ev.OriginFinished)

install(
    Source,
    [
        # S owns the request
        rows(_P.PLANNED, ev.Start, _P.RESERVING, [do.SendReserve()]),
        rows(_P.RESERVING, ev.Reserved, _P.PINNING, Source._begin, when=Source._is_live),
        rows(_P.RESERVING, ev.Reserved, _P.FREEZING, Source._begin),
        rows(_P.RESERVING, ev.ReserveRefused, _P.STAYED, Source._refused),
        rows(_P.PINNING, ev.BlocksPinned, _P.COPYING, Source._send_round, when=Source._round_pays),
        rows(_P.PINNING, ev.BlocksPinned, _P.STAYED, Source._stay_for_stall, when=Source._stall_too_long),
        rows(_P.PINNING, ev.BlocksPinned, _P.FREEZING, Source._freeze_after),
        rows(_P.COPYING, ev.RoundDone, _P.PINNING, Source._count_round, when=Source._same_round),
        rows(_P.COPYING, ev.RoundFailed, _P.STAYED, Source._failed, when=Source._same_round),
        rows((_P.PINNING, _P.FREEZING), ev.PinFailed, _P.STAYED, Source._failed),
        rows(_P.FREEZING, ev.Frozen, _P.COMMITTING, Source._commit),
        # … and keeps it if anything fails
        rows(_P.RESERVING, ev.PeerUnreachable, _P.STAYED, Source._unreachable, when=_unheard(Call.RESERVE)),
        rows(_P.COPYING, ev.PeerUnreachable, _P.STAYED, Source._unreachable, when=_unheard(Call.ROUND)),
        rows(_OWNED, ev.TimerFired, _P.STAYED, Source._too_late, when=deadline),
        rows((_P.PLANNED, *_OWNED), ev.CancelRequested, _P.STAYED, Source._failed),
        rows((_P.PLANNED, *_OWNED), ev.RequestGone, _P.STAYED, Source._gone, when=Source._is_preempted),
        rows((_P.PLANNED, *_OWNED), ev.RequestGone, _P.GONE, Source._gone),
        # Nobody knows who owns it
        rows((_P.COMMITTING, _P.WITHDRAWING), ev.Committed, _P.MOVED, Source._let_go, when=Source._same_life),
        rows((_P.COMMITTING, _P.WITHDRAWING), ev.Barred, _P.STAYED, Source._resume, when=Source._same_life),
        rows((_P.COMMITTING, _P.WITHDRAWING), ev.Committed, _P.FENCING, Source._ask),
        rows((_P.COMMITTING, _P.WITHDRAWING), ev.Barred, _P.FENCING, Source._ask),
        rows((_P.COMMITTING, _P.WITHDRAWING), ev.Forgotten, _P.FENCING, Source._ask),
        rows(_P.COMMITTING, ev.CancelRequested, _P.WITHDRAWING, Source._withdraw_for),
        rows(_P.COMMITTING, ev.PeerUnreachable, _P.WITHDRAWING, Source._withdraw_unheard, when=_unheard(Call.COMMIT)),
        rows(_P.COMMITTING, ev.TimerFired, None, Source._put_off, when=Source._may_be_copying),
        rows(_P.COMMITTING, ev.Unsettled, None, Source._hear),
        rows(_P.COMMITTING, ev.TimerFired, _P.WITHDRAWING, Source._withdraw_late, when=deadline),
        rows(_P.WITHDRAWING, ev.PeerUnreachable, _P.FENCING, Source._ask, when=_unheard(Call.WITHDRAW)),
        rows(_P.WITHDRAWING, ev.TimerFired, _P.FENCING, Source._ask, when=deadline),
        rows(_P.FENCING, ev.TimerFired, None, Source._ask, when=timer(ASK)),
        rows(_P.FENCING, ev.FenceStarted, _P.MOVED, Source._let_go_by_fence),
        rows(_P.FENCING, ev.FenceRaised, _P.STAYED, Source._resume_under, when=Source._raised),
        rows(_P.FENCING, ev.OriginFinished, _P.GONE, Source._unwanted),
        rows(_P.FENCING, ev.TimerFired, _P.LOST, Source._lose, when=deadline),
        rows(IN_DOUBT, ev.RequestGone, None, when=Source._is_preempted),
        rows(IN_DOUBT, ev.RequestGone, _P.GONE, Source._aborted_in_doubt),
        # Settled: the pins go back when nobody can be reading
        rows(SETTLED, ev.TimerFired, None, Source._unpin_now, when=timer(LEASE)),
        rows(SETTLED, ev.Committed, None, Source._unpin_now, when=Source._same_life),
        rows(SETTLED, ev.Barred, None, Source._unpin_now, when=Source._same_life),
        rows(SETTLED, ev.BlocksPinned, None, Source._unpin_late, late=True),
        rows(SETTLED, ev.Frozen, None, Source._unpin_late, late=True),
        # What crossed with a change of state
        rows(State, ev.TimerFired, None, late=True),
        *(rows((*IN_DOUBT, *SETTLED), answer, None, late=True) for answer in _ANSWERS),
        *(rows(SETTLED, answer, None, late=True) for answer in _FENCE_ANSWERS),
        rows(_P.FENCING, ev.FenceRaised, None, late=True),
        rows((_P.FENCING, *SETTLED), ev.Committed, None, late=True),
        rows((_P.FENCING, *SETTLED), ev.Barred, None, late=True),
        rows((_P.WITHDRAWING, _P.FENCING, *SETTLED), ev.CancelRequested, None, late=True),
        rows((_P.PINNING, _P.COPYING, _P.FREEZING), ev.PeerUnreachable, None, late=True),
        rows((_P.PINNING, _P.COPYING, _P.FREEZING), ev.Reserved, None, late=True),
        rows((_P.PINNING, _P.COPYING, _P.FREEZING), ev.ReserveRefused, None, late=True),
        rows((_P.PINNING, _P.COPYING, _P.FREEZING), ev.RoundDone, None, late=True),
        rows((_P.PINNING, _P.COPYING, _P.FREEZING), ev.RoundFailed, None, late=True),
        rows(SETTLED, ev.PinFailed, None, late=True),
        rows(SETTLED, ev.RequestGone, None, late=True),
    ],
)
