# SPDX-License-Identifier: Apache-2.0
"""An engine's half of a replay: one machine per attempt of an origin to have a lost request start again here.

The origin sends the request with the tokens that its client has received, under an epoch that nobody else has. What can
be in the way is another life of the same request: it may have been here before, or be on its way here, or another
attempt for it may be under way. Outputs name a request, not which of its lives they are of, so there is one life at a
time: a former one (of the same origin, under a lower epoch) is ended and *this attempt refused*, and the next one,
under an epoch of its own, finds it gone. A former attempt that the scheduler has not been given yet just makes way. A
life whose epoch is not lower is left in peace: the call is late, or has come twice.

An attempt that is accepted shows in the heartbeats to its origin before the request is built; the origin can call it
off by id and epoch, and what was called off does not reach the scheduler. From `ADDING` on whoever ends the request
finds it in the scheduler: the loop does what it is asked in order.

    NEW → MAKING_WAY → BUILDING → (FETCHING) → ADDING → ADOPTED
    (called off, another life, no room …) → REFUSED
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine, install, rows

MAX_ADOPTING = 32
"""Attempts at a time: four API servers' (`placement.IN_FLIGHT`), or more when other engines take some."""


class Life(Protocol):
    """An ownership of a request, or an attempt to begin one."""

    @property
    def origin(self) -> str | None: ...
    @property
    def epoch(self) -> Epoch: ...


def require_former(present: Life | None, life: Life) -> None:
    """Raises Refused(handover_open) unless `present` is a life of the same request that `life` comes after."""
    if present is None or present.origin != life.origin:
        raise Refused(Reason.HANDOVER_OPEN, "a request of another API server has this id")
    if present.epoch >= life.epoch:
        raise Refused(Reason.HANDOVER_OPEN, f"the request is here under epoch {present.epoch}")


class State(enum.StrEnum):
    NEW = "new"
    MAKING_WAY = "making_way"
    BUILDING = "building"
    FETCHING = "fetching"
    ADDING = "adding"
    ADOPTED = "adopted"
    REFUSED = "refused"


# Events


class AdoptRequested(msgspec.Struct, frozen=True):
    """Begin."""


class WayMade(msgspec.Struct, frozen=True):
    """No life of the request is here, nor what a former one has put out; the attempt is the latest one."""


class FormerLifeEnded(msgspec.Struct, frozen=True):
    """A former life existed, and is over now."""


class RequestBuilt(msgspec.Struct, frozen=True):
    """The request could be given to the scheduler."""


class CacheFetched(msgspec.Struct, frozen=True):
    """The KV cache is here, in blocks that are held for it."""


class CacheLost(msgspec.Struct, frozen=True):
    """The request comes without it. Nothing is held."""


class RequestAdded(msgspec.Struct, frozen=True):
    """The scheduler has it."""


class AttemptFailed(msgspec.Struct, frozen=True):
    """The last requested effect failed."""

    reason: Reason
    detail: str = ""


class CalledOff(msgspec.Struct, frozen=True):
    """The origin wants nothing of this attempt any more, or a later one has taken its place."""


# Effects


class MakeWay(msgspec.Struct, frozen=True):
    """Bar the moves that bring the request here, end a former life, and see that no other attempt is a later one.

    Answered by WayMade, FormerLifeEnded or AttemptFailed. With WayMade the attempt shows in heartbeats.
    """


class BuildRequest(msgspec.Struct, frozen=True):
    """Has the request built, and tried if it is a suspect. Answered by RequestBuilt or AttemptFailed."""


class FetchCache(msgspec.Struct, frozen=True):
    """Rescue the KV cache. Answered by CacheFetched, CacheLost or AttemptFailed."""


class AddRequest(msgspec.Struct, frozen=True):
    """Gives the request to the scheduler, unless any life of it is there. Answered by RequestAdded or AttemptFailed."""

    with_cache: bool


class FreeCache(msgspec.Struct, frozen=True):
    """Give back the blocks that hold what was fetched."""


class AnswerAdopt(msgspec.Struct, frozen=True):
    """The request is this engine's now."""


class RefuseAdopt(msgspec.Struct, frozen=True):
    """The attempt shows in heartbeats no more."""

    reason: Reason
    detail: str = ""


AdoptionEvent = (
    AdoptRequested
    | WayMade
    | FormerLifeEnded
    | RequestBuilt
    | CacheFetched
    | CacheLost
    | RequestAdded
    | AttemptFailed
    | CalledOff
)
AdoptionEffect = MakeWay | BuildRequest | FetchCache | AddRequest | FreeCache | AnswerAdopt | RefuseAdopt


class Adoption(Machine[State, AdoptionEvent, AdoptionEffect]):
    """`may_fetch`: the origin names an engine that may have the KV cache, and this engine can fetch it."""

    def __init__(self, may_fetch: bool) -> None:
        super().__init__(State.NEW)
        self._may_fetch = may_fetch
        self._has_cache = False
        self._called_off = False

    @property
    def over(self) -> bool:
        return self.state in (State.ADOPTED, State.REFUSED)

    def _come_again(self, event: FormerLifeEnded) -> list[AdoptionEffect]:
        return [RefuseAdopt(Reason.HANDOVER_OPEN, "a former life of the request was still here; it is ended now")]

    def _fail(self, event: AttemptFailed) -> list[AdoptionEffect]:
        return [*self._free(), RefuseAdopt(event.reason, event.detail)]

    def _mark(self, event: CalledOff) -> list[AdoptionEffect]:
        # What is being done is not stopped for that: whatever it takes is seen to its end, and given back.
        self._called_off = True
        return []

    def _is_called_off(self, event: RequestBuilt | CacheFetched | CacheLost) -> bool:
        return self._called_off

    def _give_up(self, event: RequestBuilt | CacheFetched | CacheLost) -> list[AdoptionEffect]:
        self._has_cache = isinstance(event, CacheFetched)
        return [*self._free(), RefuseAdopt(Reason.BARRED, "its origin has given this attempt up")]

    def _is_fetchable(self, event: RequestBuilt) -> bool:
        return self._may_fetch

    def _add_with_cache(self, event: CacheFetched) -> list[AdoptionEffect]:
        self._has_cache = True
        return [AddRequest(with_cache=True)]

    def _free(self) -> list[AdoptionEffect]:
        return [FreeCache()] if self._has_cache else []


_S = State
_BUSY = (_S.MAKING_WAY, _S.BUILDING, _S.FETCHING, _S.ADDING)

install(
    Adoption,
    [
        rows(_S.NEW, AdoptRequested, _S.MAKING_WAY, [MakeWay()]),
        rows(_S.MAKING_WAY, WayMade, _S.BUILDING, [BuildRequest()]),
        rows(_S.MAKING_WAY, FormerLifeEnded, _S.REFUSED, Adoption._come_again),
        rows(_S.BUILDING, RequestBuilt, _S.REFUSED, Adoption._give_up, when=Adoption._is_called_off),
        rows(_S.BUILDING, RequestBuilt, _S.FETCHING, [FetchCache()], when=Adoption._is_fetchable),
        rows(_S.BUILDING, RequestBuilt, _S.ADDING, [AddRequest(with_cache=False)]),
        rows(_S.FETCHING, CacheFetched, _S.REFUSED, Adoption._give_up, when=Adoption._is_called_off),
        rows(_S.FETCHING, CacheFetched, _S.ADDING, Adoption._add_with_cache),
        rows(_S.FETCHING, CacheLost, _S.REFUSED, Adoption._give_up, when=Adoption._is_called_off),
        rows(_S.FETCHING, CacheLost, _S.ADDING, [AddRequest(with_cache=False)]),
        rows(_S.ADDING, RequestAdded, _S.ADOPTED, [AnswerAdopt()]),
        rows(_BUSY, AttemptFailed, _S.REFUSED, Adoption._fail),
        rows((_S.MAKING_WAY, _S.BUILDING, _S.FETCHING), CalledOff, None, Adoption._mark),
        rows((_S.ADDING, _S.ADOPTED, _S.REFUSED), CalledOff, None, late=True),
    ],
)
