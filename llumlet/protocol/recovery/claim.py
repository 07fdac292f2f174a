# SPDX-License-Identifier: Apache-2.0
"""The holder's half of a rescue: one machine per claim on a request of an engine whose loop is stuck in a model step.

While the model computes, the loop changes nothing of its scheduler: another thread may read a request's block table
there, and nobody frees its blocks. That ends the moment the step returns. So a claim makes the request over at the
holder, and the first thing that the waking loop does is to learn of it (`LoopWoke`), before it lets anybody finish or
free anything: it keeps the blocks for as long as they are read, and ends the request without a word. The request lives
elsewhere by then, under a term that its origin has raised.

    STANDING     nobody has moved: the loop is stuck, and the blocks are what they were
    KEPT         the loop goes on; a pin keeps the blocks for whoever reads them
    READ         nobody reads any more, or not in time; the loop, still stuck, has yet to end the request

Whoever has read asks in the end whether the blocks were the request's until then (`ClaimEnded`). The same claim again
is the same claim: a call may come twice, and the second one first. Two threads feed the machine: its shell holds a lock
around every event.

The step that is stuck may still write the KV of the last token: that position lies behind the computed tokens, and
whoever claims the request computes it again.
"""

from __future__ import annotations

import enum

import msgspec

from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine, install, rows

LEASE = "lease"
LEASE_SECONDS = 10.0
"""Time for which a claim's blocks are kept if nobody ends it. A rescue must take less."""


class State(enum.StrEnum):
    NEW = "new"
    STANDING = "standing"
    KEPT = "kept"
    READ = "read"
    OVER = "over"
    REFUSED = "refused"


# Events


class ClaimRequested(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that continues the request under `epoch` asks for it, in the state that this describes."""

    epoch: Epoch
    in_model: bool
    """The loop waits for its model."""
    problem: tuple[Reason, str] | None = None
    """The reason why the request cannot be taken at this moment."""
    present: Epoch | None = None
    """The epoch under which it is here; None if it cannot be taken."""
    has_cache: bool = False
    """True if it runs and has output, so that the KV cache of its whole prompt is there."""
    claimed: bool = False
    """True if another claim has it in this step."""


class LoopWoke(msgspec.Struct, frozen=True):
    """The model has returned; nothing has been done with what it computed."""


class ClaimEnded(msgspec.Struct, frozen=True):
    """The blocks are not read any more."""


# Effects


class AnswerClaim(msgspec.Struct, frozen=True):
    """The request's blocks, computed tokens and output, as they stand."""


class RefuseClaim(msgspec.Struct, frozen=True):
    reason: Reason
    detail: str


class KeepBlocks(msgspec.Struct, frozen=True):
    """Pin every block of the request, at once."""


class EndSilently(msgspec.Struct, frozen=True):
    """Ends the request here without a message; outputs of its last step are dropped."""


class GiveBack(msgspec.Struct, frozen=True):
    """Undo `KeepBlocks`."""


class AnswerEnd(msgspec.Struct, frozen=True):
    """Tells if the blocks were the request's until now."""

    intact: bool


ClaimEvent = ClaimRequested | LoopWoke | ClaimEnded | TimerFired
ClaimEffect = SetTimer | ClearTimer | AnswerClaim | RefuseClaim | KeepBlocks | EndSilently | GiveBack | AnswerEnd


class Claim(Machine[State, ClaimEvent, ClaimEffect]):
    """Feed it events with `on()`; throw it away when `over`."""

    def __init__(self, lease_s: float = LEASE_SECONDS) -> None:
        super().__init__(State.NEW)
        self._lease_s = lease_s

    @property
    def over(self) -> bool:
        return self.state in (State.OVER, State.REFUSED)

    def _why_not(self, event: ClaimRequested) -> tuple[Reason, str] | None:
        if not event.in_model:
            return Reason.SOURCE_BUSY, "its loop is not in a model step"
        if event.problem is not None:
            return event.problem
        if event.present is None or event.present.term >= event.epoch.term:
            return Reason.BARRED, f"the request is here under another epoch than one before {event.epoch}"
        if not event.has_cache:
            return Reason.NOT_STARTED, "it has no KV cache, or not all of its prompt's"
        if event.claimed:
            return Reason.ALREADY_MIGRATING, "it is claimed already"
        return None

    def _cannot_be(self, event: ClaimRequested) -> bool:
        return self._why_not(event) is not None

    def _refuse(self, event: ClaimRequested) -> list[ClaimEffect]:
        problem = self._why_not(event)
        assert problem is not None
        return [RefuseClaim(*problem)]

    def _grant(self, event: ClaimRequested) -> list[ClaimEffect]:
        return [SetTimer(LEASE, self._lease_s), AnswerClaim()]


_S = State

install(
    Claim,
    [
        rows(_S.NEW, ClaimRequested, _S.REFUSED, Claim._refuse, when=Claim._cannot_be),
        rows(_S.NEW, ClaimRequested, _S.STANDING, Claim._grant),
        rows(_S.STANDING, ClaimRequested, None, [AnswerClaim()]),
        rows(_S.STANDING, LoopWoke, _S.KEPT, [KeepBlocks(), EndSilently()]),
        rows(_S.STANDING, ClaimEnded, _S.READ, [AnswerEnd(intact=True), ClearTimer(LEASE)]),
        rows(_S.STANDING, TimerFired, _S.READ),
        rows(_S.READ, LoopWoke, _S.OVER, [EndSilently()]),
        rows(_S.KEPT, ClaimEnded, _S.OVER, [AnswerEnd(intact=True), GiveBack(), ClearTimer(LEASE)]),
        rows(_S.KEPT, TimerFired, _S.OVER, [GiveBack()]),
        rows((_S.READ, _S.OVER, _S.REFUSED), ClaimEnded, None, [AnswerEnd(intact=False)], late=True),
    ],
)
