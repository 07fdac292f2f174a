# SPDX-License-Identifier: Apache-2.0
"""Requests that may have been the death of their engine: who they are, whose turn it is to be tried, who is to end.

Of an engine that died, only the requests in the steps under way can be why (`step_record`); the others go on elsewhere
at once. The suspects are tried, one at a time at an engine, and a trial is over when the request has survived some
tokens there. That settles most deaths:

    dies in a step, on trial              guilty: it ends, with an error that says so
    dies in a step, another one on trial  that one's doing: goes on at once
    dies in a step otherwise              a suspect, also if it was cleared before: it is tried
    dies while it waits to be scheduled   nothing was learnt: a suspect stays one, others go on at once

So a request whose engine dies of it does that twice, the second time on trial, and whoever was beside it is tried or
goes on, however often that happens. A request that is a suspect once more has to survive more tokens than before: an
engine that dies of it now and then is more likely to do so in a trial.

A gateway may have seen instances die with a request before it came (`attempts`): that is on trial from the beginning.

Whoever asks for a turn gets it at once or later: `come` says whose turn has come since it was last asked.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container

from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.steps import UNKNOWN, LastSteps
from llumlet.protocol.wire import Health

TRIAL_TOKENS = 4
"""More than are in flight between an engine's model and the client: a request that goes on from what its client has
comes to the step that killed its engine within so many."""
LONGER = 16
"""Factor by which it grows each time."""
MAX_TRIAL_TOKENS = 1024
STUCK_SECONDS = 1.5
"""A silent engine whose step is older hangs in it; if it is younger, the engine gets on and was cut off."""

ReadSteps = Callable[[str], LastSteps | None]
"""The record of the life of an engine with this incarnation; None if it cannot be read here."""


def steps_of(owner: Owner, now: float, read: ReadSteps, ends: bool = False) -> LastSteps | None:
    """The steps in which `owner` died or hangs. None: it is on its way out, or as far as is known it only is cut off,
    or stands still outside of any step. `ends`: it has just said that it does, if not why.

    On the same machine the engine's record of its steps says it. Of one on another machine nothing can be read: if it
    died, or says itself that it hangs, it may have been in a step of each of its requests.
    """
    if owner.dead:
        if owner.last_steps is None:
            # Once: the next engine that starts there removes the record.
            owner.last_steps = read(owner.incarnation) or UNKNOWN
        return None if owner.last_steps.leaving else owner.last_steps
    hangs = owner.health is Health.HUNG
    steps = read(owner.incarnation)
    if steps is None:
        return UNKNOWN if hangs else None
    stuck = hangs or ends or (bool(steps.under_way) and now - steps.began > STUCK_SECONDS)
    counts = stuck and not steps.leaving and (steps.under_way or steps.anybody)
    return dataclasses.replace(steps, compiling=frozenset()) if counts else None


class Judgement(enum.Enum):
    INNOCENT = enum.auto()
    SUSPECT = enum.auto()
    GUILTY = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class _Case:
    """What is held against one request, from the first death that it may have caused to its end."""

    request_id: str
    deaths: list[Owner] = dataclasses.field(default_factory=list)
    num_before: int = 0
    """Deaths that a gateway has seen, before the request came here."""
    judgement: Judgement = Judgement.SUSPECT
    """What the last death makes of it."""
    pending: bool = False
    """Whether it has to be tried, or is being tried."""
    delivered: int = 0
    """Tokens that its client had when it became a suspect: how much speaks for it."""
    at: Owner | None = None
    """The engine at which it is tried."""
    until: int = 0
    """Number of delivered tokens that ends the trial."""

    @property
    def trial_tokens(self) -> int:
        longer = LONGER ** max(0, len(self.deaths) + self.num_before - 1)
        return min(TRIAL_TOKENS * int(longer), MAX_TRIAL_TOKENS) if self.pending else 0


class Suspects:
    """The suspects of one API server process. `most` says how many trials may be under way: no more than engines."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._cases: dict[str, _Case] = {}
        self._waiting: dict[str, _Case] = {}
        self._trying: dict[str, _Case] = {}
        self._come: list[str] = []
        self._cleared: dict[str, Owner] = {}
        """Of requests that somebody else's trial has cleared, the engine that died of it: that one ends, and who still
        looks for an engine is judged again."""

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def any_tried(self) -> bool:
        return bool(self._trying)

    def deaths(self, request_id: str) -> list[str]:
        """Names of the engines that died with the request in a step, and nobody else to blame."""
        case = self._cases.get(request_id)
        return [owner.instance for owner in case.deaths] if case is not None else []

    def num_before(self, request_id: str) -> int:
        """Deaths before those."""
        case = self._cases.get(request_id)
        return case.num_before if case is not None else 0

    def came_after(self, request_id: str, num_deaths: int, owner: Owner | None) -> None:
        """A gateway has seen so many instances die with this new request. `owner` has it now, if that is known."""
        case = self._cases[request_id] = _Case(request_id, num_before=num_deaths, pending=owner is not None)
        if owner is not None:
            self._trying[request_id] = case
            self.sent(request_id, owner, 0)

    def judge(self, request_id: str, owner: Owner, steps: LastSteps, delivered: int) -> Judgement:
        """`owner`, which had the request, has died, or hangs, in `steps`. The same question gets the same answer.

        delivered: number of tokens that the client has.
        """
        case = self._cases.get(request_id)
        is_there = case is not None and case.at is owner
        # An engine has one on trial. It knows sooner than the origin that a trial is over, and takes the next one.
        tried = is_there and not steps.tried_another(request_id)
        if case is not None and case.pending and owner in case.deaths:
            return case.judgement
        if not tried and self._is_explained(request_id, owner, steps):
            self._cleared[request_id] = owner
        if not steps.had(request_id) or (not tried and self._cleared.get(request_id) is owner):
            if is_there:
                self.step_back(request_id)
            return Judgement.SUSPECT if case is not None and case.pending else Judgement.INNOCENT
        if case is None:
            case = self._cases[request_id] = _Case(request_id)
        case.deaths.append(owner)
        case.pending = True
        case.delivered = delivered
        # Where the engine does not say whom it has on trial, there may be another one by what is known here.
        alone = steps.tried(request_id) or not self._is_explained(request_id, owner, steps)
        case.judgement = Judgement.GUILTY if tried and alone else Judgement.SUSPECT
        return case.judgement

    def _is_explained(self, request_id: str, owner: Owner, steps: LastSteps) -> bool:
        """Whether somebody else was on trial there; of an engine on another host, somebody of ours."""
        others = (case for case in self._trying.values() if case.request_id != request_id)
        return steps.tried_another(request_id) or any(
            case.at is owner and steps.had(case.request_id) for case in others
        )

    def ask_turn(self, request_id: str) -> None:
        """The turn of who is no suspect comes at once; a suspect's when it may be tried. Until then it is nowhere."""
        case = self._cases.get(request_id)
        if case is None or not case.pending or request_id in self._trying:
            self._come.append(request_id)
            return
        self._waiting[request_id] = case
        self.advance()

    def advance(self) -> None:
        """Let as many be tried as may be. Those first for whom least speaks: a culprit is found early."""
        while self._waiting and len(self._trying) < max(1, self._most()):
            case = min(self._waiting.values(), key=lambda case: case.delivered)
            del self._waiting[case.request_id]
            self._trying[case.request_id] = case
            self._come.append(case.request_id)

    def come(self) -> list[str]:
        """Requests whose turn has come."""
        come, self._come = self._come, []
        return come

    def without_trial(self, addresses: list[str]) -> list[str]:
        """Those among these llumlets at whose engines nobody is on trial from here; all of them, if there is none."""
        taken = {case.at.llumlet for case in self._trying.values() if case.at is not None}
        return [address for address in addresses if address not in taken] or addresses

    def tried_at(self, request_id: str) -> Owner | None:
        case = self._trying.get(request_id)
        return case.at if case is not None else None

    def trial_tokens(self, request_id: str) -> int:
        """How many the request has to survive where it goes now; 0 if it is no suspect."""
        case = self._cases.get(request_id)
        return case.trial_tokens if case is not None else 0

    def sent(self, request_id: str, owner: Owner | None, delivered: int) -> None:
        """`owner` has the request from now on, or may have: nothing is known yet of the call that gave it. None: it
        has not."""
        case = self._trying.get(request_id)
        if case is not None:
            case.at, case.until = owner, delivered + case.trial_tokens

    def taken_by(self, request_id: str, owner: Owner) -> None:
        """`owner` has said that it has it. Its first tokens may have come before, and count."""
        case = self._trying.get(request_id)
        if case is not None:
            case.at = owner

    def heard(self, request_id: str, delivered: int) -> None:
        """The client has so many tokens now."""
        case = self._trying.get(request_id)
        if case is not None and case.at is not None and delivered >= case.until:
            case.pending = False
            self.step_back(request_id)

    def step_back(self, request_id: str) -> None:
        """Ends a trial without a verdict: the next one's turn comes."""
        case = self._trying.pop(request_id, None)
        if case is not None:
            case.at = None
            self.advance()

    def keep(self, streams: Container[str]) -> None:
        """Forget requests that have ended."""
        for request_id in [request_id for request_id in self._cases if request_id not in streams]:
            del self._cases[request_id]
            self._waiting.pop(request_id, None)
            self.step_back(request_id)
        for request_id in [request_id for request_id in self._cleared if request_id not in streams]:
            del self._cleared[request_id]
