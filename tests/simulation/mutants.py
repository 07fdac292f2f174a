# SPDX-License-Identifier: Apache-2.0
"""Rules of the protocol, each broken on purpose: what a simulation is worth is which of these it sees."""

from __future__ import annotations

from typing import Any

import msgspec

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.effects import Effect
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine, install, rows
from llumlet.protocol.move.destination import Destination
from llumlet.protocol.move.source import Source, State
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.origin.gate import Arrival, Gate, Verdict
from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.origin.replay import Replay
from llumlet.protocol.recovery import claim, rescue
from llumlet.protocol.recovery.claim import Claim
from llumlet.protocol.recovery.rescue import Rescue


class NaiveGate(Gate):
    """Finding 1: a higher epoch is adopted on sight, and everything of a lower one is dropped from then on."""

    def offer(self, arrival: Arrival) -> Verdict:
        if arrival.epoch < self.highest:
            return Verdict(stale=True)
        return super().offer(arrival)


class NoFence(Gate):
    """The origin answers that nothing has started, and bars nothing."""

    def fence(self, epoch: Epoch) -> Epoch | None:
        raised = super().fence(epoch)
        self._barred.clear()
        return raised


class MergedEpochs(Gate):
    """Finding 2: the fence raises the hop instead of a term of its own."""

    def fence(self, epoch: Epoch) -> Epoch | None:
        if super().fence(epoch) is None:
            return None
        self._barred[-1] = (epoch, epoch.next_hop())
        self._term = epoch.term
        self._raised[epoch] = epoch.next_hop()
        return epoch.next_hop()


class DeposeWithoutBar(Gate):
    """A replay raises the term, but whoever had the request before still counts."""

    def depose(self) -> Epoch:
        bases = dict(self._bases)
        raised = super().depose()
        self._barred.clear()
        self._bases.update(bases)
        return raised


class SameTerm(Gate):
    """The origin forgets to raise the term: who is started anew has the epoch of the one that was lost."""

    def depose(self) -> Epoch:
        highest, bases, barred = self.highest, dict(self._bases), list(self._barred)
        super().depose()
        self._term -= 1
        self._bases, self._barred = bases, barred
        return highest


class EarlyFree(Destination):
    """Finding 7: blocks of an abandoned pull are given back at once."""

    def _let_go(self) -> list[Effect]:
        stop = super()._let_go()
        return [*stop, do.FreeReservation()] if stop else []


class ResumeOnUnknown(Source):
    """Finding 5: "unknown migration" is taken for a no."""

    def _resume_unknown(self, event: ev.Forgotten) -> list[Effect]:
        return [do.Unfreeze(), do.Unpin()]


class NoLinger(Source):
    """Finding 6: pins go back with the fence, although the destination may be reading."""

    def _linger(self) -> list[Effect]:
        return [*self._unpin(), *self._clear("lease")]


class ResumeOnTimeout(Source):
    """Finding 5: a source that gets no answer to Commit goes on."""

    def _resume_timeout(self, event: ev.TimerFired | ev.PeerUnreachable) -> list[Effect]:
        return [do.Unfreeze(), do.Unpin()]


class NoQuarantine(Rescue):
    """Blocks of a copy that was abandoned are given back although its mover may still write them."""

    def _free_now(self, event: rescue.CopyFailed) -> list[rescue.RescueEffect]:
        return [*self._give_up(event), rescue.FreeRoom()]


class Unasked(Rescue):
    """Nobody asks whether the blocks that were read were the request's until then."""

    def _believe(self, event: rescue.CopyDone) -> list[rescue.RescueEffect]:
        self.copied_bytes = event.num_bytes
        return [rescue.EndClaim(rescue.CLAIM_SECONDS)]


class Unkept(Claim):
    """What is read of a request that was taken from here is free as soon as the loop goes on."""

    def _let_go(self, event: claim.LoopWoke) -> list[claim.ClaimEffect]:
        return [claim.EndSilently()]


class Unheeded(Claim):
    """The waking loop does not look whether anything was claimed: it goes on with the request, and frees its blocks."""

    def _ignore(self, event: claim.LoopWoke) -> list[claim.ClaimEffect]:
        return []


class SameEpoch(Replay):
    """A second attempt has the epoch of the first, which may have succeeded."""

    def _raise_term(self) -> None:
        return


class FromSnapshot(Replay):
    """Finding 3: a replay begins from what some engine knew, not from what the client has."""

    def _adopt(self, owner: Owner | None) -> list[words.ReplayEffect]:
        adopt, *rest = super()._adopt(owner)
        assert isinstance(adopt, words.Adopt)
        return [msgspec.structs.replace(adopt, delivered=adopt.delivered[:-1]), *rest]


def _instead(machine: type[Machine[Any, Any, Any]], *groups: object) -> None:
    install(machine, [*groups, machine.TABLE])  # type: ignore[list-item]


_DOUBT = (State.COMMITTING, State.WITHDRAWING)
_instead(ResumeOnUnknown, rows(_DOUBT, ev.Forgotten, State.STAYED, ResumeOnUnknown._resume_unknown))
_instead(
    ResumeOnTimeout,
    rows(State.WITHDRAWING, ev.TimerFired, State.STAYED, ResumeOnTimeout._resume_timeout),
    rows(State.WITHDRAWING, ev.PeerUnreachable, State.STAYED, ResumeOnTimeout._resume_timeout),
)
_R, _C = rescue.State, claim.State
_instead(NoQuarantine, rows(_R.COPYING, rescue.CopyFailed, _R.DRAINING, NoQuarantine._free_now))
_instead(
    Unasked,
    rows(_R.COPYING, rescue.CopyDone, _R.FETCHED, Unasked._believe),
    rows(_R.FETCHED, rescue.ClaimSettled, None),
)
_instead(Unkept, rows(_C.STANDING, claim.LoopWoke, _C.KEPT, Unkept._let_go))
_instead(Unheeded, rows(_C.STANDING, claim.LoopWoke, None, Unheeded._ignore))
