# SPDX-License-Identifier: Apache-2.0
"""Suspects: requests that may have crashed their engine. A suspect is tried, alone at an engine, until it has survived
some tokens there.

Only the requests in the steps under way can have crashed an engine (`steps.LastSteps`); all others continue at once.

    its engine dies                             the request
    in a step, while it is on trial             is guilty: it ends with an error
    in a step, while another one is on trial    continues at once: the other one is to blame
    in a step otherwise                         is a suspect, even if it survived a trial before
    before it was scheduled                     stays what it was

So a request that crashes its engine does so twice, the second time on trial. A request that is a suspect again has to
survive more tokens than before, because some requests crash their engine only now and then.

Two shells use this: the origin in an API server, which reads the engines' records of their steps, and the gateway,
which knows nothing of steps (`steps.UNKNOWN`). A gateway tells the origin how many instances have died with a request
(`attempt_header`); the request is then on trial from the beginning.

A suspect asks for its turn (`ask_turn`); `come` names the requests whose turn has come since.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Hashable
from typing import Generic, TypeVar

from llumlet.protocol.recovery.steps import LastSteps

TRIAL_TOKENS = 4
"""More than are in flight between an engine's model and the client: a request that goes on from what its client has
comes to the step that killed its engine within so many."""
LONGER = 16
"""Factor by which it grows each time."""
MAX_TRIAL_TOKENS = 1024
Engine = TypeVar("Engine", bound=Hashable)
"""A life of an engine, as its shell knows it; compared by identity."""


class Judgement(enum.Enum):
    INNOCENT = enum.auto()
    SUSPECT = enum.auto()
    GUILTY = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class _Case(Generic[Engine]):
    """The record of one suspect, from the first death that it may have caused to its end."""

    request_id: str
    deaths: list[Engine] = dataclasses.field(default_factory=list)
    num_before: int = 0
    """Deaths that a gateway has seen, before the request came here."""
    judgement: Judgement = Judgement.SUSPECT
    """Result of the last death."""
    pending: bool = False
    """True if it has to be tried, or is being tried."""
    delivered: int = 0
    """Tokens that its client had when it became a suspect: the more, the less likely it is to blame."""
    at: Engine | None = None
    """The engine at which it is tried."""
    until: int = 0
    """Number of delivered tokens that ends the trial."""

    @property
    def trial_tokens(self) -> int:
        longer = LONGER ** max(0, len(self.deaths) + self.num_before - 1)
        return min(TRIAL_TOKENS * int(longer), MAX_TRIAL_TOKENS) if self.pending else 0


class Suspects(Generic[Engine]):
    """The suspects of one process. `most` returns how many trials may be under way: no more than engines."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._cases: dict[str, _Case[Engine]] = {}
        self._waiting: dict[str, _Case[Engine]] = {}
        self._trying: dict[str, _Case[Engine]] = {}
        self._come: list[str] = []
        self._cleared: dict[str, Engine] = {}
        """Requests whose engine's death was explained by another one's trial, with that engine. The answer stays after
        the other one has ended."""

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def any_tried(self) -> bool:
        return bool(self._trying)

    @property
    def engines(self) -> frozenset[Engine]:
        """Engines at which a request is on trial."""
        return frozenset(case.at for case in self._trying.values() if case.at is not None)

    def deaths(self, request_id: str) -> list[Engine]:
        """The engines that died with the request in a step, and without another request to blame."""
        case = self._cases.get(request_id)
        return list(case.deaths) if case is not None else []

    def num_before(self, request_id: str) -> int:
        """Number of deaths that a gateway saw before those."""
        case = self._cases.get(request_id)
        return case.num_before if case is not None else 0

    def came_after(self, request_id: str, num_deaths: int, owner: Engine | None) -> None:
        """Notes that a gateway has seen `num_deaths` instances die with this new request. `owner`: the engine that has
        it now; None if that is not known."""
        case = self._cases[request_id] = _Case[Engine](request_id, num_before=num_deaths, pending=owner is not None)
        if owner is not None:
            self._trying[request_id] = case
            self.sent(request_id, owner, 0)

    def judge(self, request_id: str, owner: Engine, steps: LastSteps, delivered: int) -> Judgement:
        """Judges a request whose engine `owner` has died, or hangs, in `steps`. The same question gets the same answer.

        delivered: number of tokens that the client has.
        """
        case = self._cases.get(request_id)
        is_there = case is not None and case.at is owner
        # An engine tries one request at a time. It learns sooner than the origin that a trial is over.
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
            case = self._cases[request_id] = _Case[Engine](request_id)
        case.deaths.append(owner)
        case.pending = True
        case.delivered = delivered
        # An engine without a record does not say which request it tries; other suspects of ours may be there.
        alone = steps.tried(request_id) or not self._is_explained(request_id, owner, steps)
        case.judgement = Judgement.GUILTY if tried and alone else Judgement.SUSPECT
        return case.judgement

    def _is_explained(self, request_id: str, owner: Engine, steps: LastSteps) -> bool:
        """True if another request was on trial there; without the engine's record, another one of ours."""
        others = (case for case in self._trying.values() if case.request_id != request_id)
        return steps.tried_another(request_id) or any(
            case.at is owner and steps.had(case.request_id) for case in others
        )

    def ask_turn(self, request_id: str) -> None:
        """A request that is not suspected gets its turn at once. A suspect waits until an engine is free to try it, and
        meanwhile runs nowhere."""
        case = self._cases.get(request_id)
        if case is None or not case.pending or request_id in self._trying:
            self._come.append(request_id)
            return
        self._waiting[request_id] = case
        self.advance()

    def take_turn(self, request_id: str) -> None:
        """Ends the wait of a suspect that goes on although no engine is free to try it alone."""
        if (case := self._waiting.pop(request_id, None)) is not None:
            self._trying[request_id] = case

    def advance(self) -> None:
        """Gives as many turns as there are engines. Suspects with the fewest tokens come first: one of these is the
        likeliest culprit."""
        while self._waiting and len(self._trying) < max(1, self._most()):
            case = min(self._waiting.values(), key=lambda case: case.delivered)
            del self._waiting[case.request_id]
            self._trying[case.request_id] = case
            self._come.append(case.request_id)

    def come(self) -> list[str]:
        """Requests whose turn has come."""
        come, self._come = self._come, []
        return come

    def tried_at(self, request_id: str) -> Engine | None:
        case = self._trying.get(request_id)
        return case.at if case is not None else None

    def trial_tokens(self, request_id: str) -> int:
        """Tokens that the request has to survive at its next engine; 0 if it is not a suspect."""
        case = self._cases.get(request_id)
        return case.trial_tokens if case is not None else 0

    def sent(self, request_id: str, owner: Engine | None, delivered: int) -> None:
        """Notes that `owner` has the request from now on, or may have it: the call that sends it is under way. None: no
        engine has it."""
        case = self._trying.get(request_id)
        if case is not None:
            case.at, case.until = owner, delivered + case.trial_tokens

    def taken_by(self, request_id: str, owner: Engine) -> None:
        """Notes that `owner` has confirmed that it has the request. Tokens that came before count."""
        case = self._trying.get(request_id)
        if case is not None:
            case.at = owner

    def heard(self, request_id: str, delivered: int) -> None:
        """Notes how many tokens the client has now."""
        case = self._trying.get(request_id)
        if case is not None and case.at is not None and delivered >= case.until:
            self.survived(request_id)

    def survived(self, request_id: str) -> None:
        """Ends the trial of a request that has proved harmless."""
        if (case := self._trying.get(request_id)) is not None:
            case.pending = False
            self.step_back(request_id)

    def step_back(self, request_id: str) -> None:
        """Ends the trial of a request, or its wait for one, without a result: the next suspect gets its turn."""
        self._waiting.pop(request_id, None)
        if (case := self._trying.pop(request_id, None)) is not None:
            case.at = None
            self.advance()

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended."""
        self._cases.pop(request_id, None)
        self._cleared.pop(request_id, None)
        self.step_back(request_id)

    def keep(self, streams: Container[str]) -> None:
        """Forgets all requests but those of these streams."""
        for request_id in [one for one in (*self._cases, *self._cleared) if one not in streams]:
            self.forget(request_id)
