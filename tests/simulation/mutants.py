# SPDX-License-Identifier: Apache-2.0
"""Rules of the protocol, each broken on purpose: what a simulation is worth is which of these it sees."""

from __future__ import annotations

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.destination import Destination
from llumlet.protocol.effects import Effect
from llumlet.protocol.gate import Arrival, FenceDecision, Gate, Verdict
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import install, rows
from llumlet.protocol.source import Source, State


class NaiveGate(Gate):
    """Finding 1: a higher epoch is adopted on sight, and everything of a lower one is dropped from then on."""

    def offer(self, arrival: Arrival) -> Verdict:
        if arrival.epoch < self.highest:
            return Verdict(stale=True)
        return super().offer(arrival)


class NoFence(Gate):
    """The origin answers that nothing has started, and bars nothing."""

    def fence(self, epoch: Epoch) -> FenceDecision:
        decision = super().fence(epoch)
        self._barred.clear()
        return decision


class MergedEpochs(Gate):
    """Finding 2: the fence raises the hop instead of a term of its own."""

    def fence(self, epoch: Epoch) -> FenceDecision:
        decision = super().fence(epoch)
        if decision.raised is None:
            return decision
        self._barred[-1] = (epoch, epoch.next_hop())
        self._term = epoch.term
        self._raised[epoch] = epoch.next_hop()
        return FenceDecision(False, False, epoch.next_hop(), decision.delivered)


class DeposeWithoutBar(Gate):
    """A replay raises the term, but whoever had the request before still counts."""

    def depose(self) -> Epoch:
        bases = dict(self._bases)
        raised = super().depose()
        self._barred.clear()
        self._bases.update(bases)
        return raised


class EarlyFree(Destination):
    """Finding 7: blocks of an abandoned pull are given back at once."""

    def _release(self) -> list[Effect]:
        stop = super()._release()
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


def _instead(machine: type[Source], *groups: object) -> None:
    install(machine, [*groups, Source.TABLE])  # type: ignore[list-item]


_DOUBT = (State.COMMITTING, State.WITHDRAWING)
_instead(ResumeOnUnknown, rows(_DOUBT, ev.Forgotten, State.STAYED, ResumeOnUnknown._resume_unknown))
_instead(
    ResumeOnTimeout,
    rows(State.WITHDRAWING, ev.TimerFired, State.STAYED, ResumeOnTimeout._resume_timeout),
    rows(State.WITHDRAWING, ev.PeerUnreachable, State.STAYED, ResumeOnTimeout._resume_timeout),
)
