# SPDX-License-Identifier: Apache-2.0
"""The attempts at one request: their evidence about instances and request, and whether another is allowed."""

from __future__ import annotations

import random
from typing import Final

from aiohttp import web

from llumlet.protocol.recovery.retries import backoff_s
from llumsched.causes import Cause
from llumsched.gateway.backends import Backend
from llumsched.gateway.ends import End
from llumsched.gateway.errors import StreamLost
from llumsched.gateway.services import Services
from llumsched.gateway.suspects import TRIAL_S, Case

_OF_THE_INSTANCE: Final = frozenset((401, 403, 404, 429))
"""Refusals caused by an instance (its key, adapters, queue) rather than by the request."""
_OF_THE_REQUEST: Final = frozenset((End.ERROR, End.ABORT))
"""Ends that are the request's fault if two instances report them."""
_MOST_PLACED: Final = 16
"""Largest number of instances tried for one request, including unreachable ones."""
_KEPT_FOR_LOSSES: Final = 0.5
"""Share of the retry budget that only losses may use; second opinions use the rest."""


class Tried:
    def __init__(self, services: Services, request_id: str, *, is_engines_work: bool, pardoned: frozenset[int]) -> None:
        """`is_engines_work`: an answer tells something of the engine core, too. `pardoned`: refusals that are nobody's
        fault, even if others take what was refused."""
        self._services = services
        self._is_engines_work = is_engines_work
        self._pardoned = pardoned
        self.excluded: set[Backend] = set()
        self.num_placed = 0
        self._num_unreached = 0
        """Number of tried instances to which nothing could be sent."""
        self.case = Case[Backend](request_id)
        self.answer: web.Response | None = None
        """An engine's answer, to use if there is no other."""
        self.refused_by: Backend | None = None
        """The instance whose refusal is being checked with another one."""
        self._accused: list[tuple[Backend, StreamLost]] = []
        """Living instances that failed the request. They are at fault if another one takes it."""
        self._reports: list[tuple[End, Backend]] = []
        """Ends that living instances reported and that may be the request's fault."""
        self.reporters: tuple[Backend, ...] = ()
        """The two instances that ended the request in the same way, which proves its own fault."""

    @property
    def _num_attempts(self) -> int:
        """Attempts that count. Unreachable instances do not: when a rack is lost, the fifth one may be the first that
        lives."""
        return self.num_placed - self._num_unreached

    def taken_by(self, backend: Backend) -> None:
        """Notes an answer with status 200, or the beginning of one."""
        if not self._is_engines_work:
            return
        outliers = self._services.backends.outliers
        outliers.succeeded(backend)
        for accused, lost in self._accused:
            outliers.failed(accused, lost.cause, str(lost))
            self._services.backends.settled(accused, is_proven=True)
        self._accused.clear()
        if self.refused_by is not None:
            assert self.answer is not None
            status = self.answer.status
            if status not in self._pardoned:
                outliers.failed(self.refused_by, Cause.REFUSALS, f"it answered {status} to what {backend} took")
            self.refused_by = None

    def is_doubtful(self, status: int, backend: Backend) -> bool:
        """True if the refusal may be the instance's own fault and another one can be asked."""
        outliers = self._services.backends.outliers
        is_doubted = outliers.is_doubted(backend)
        if self.refused_by is not None:
            outliers.confirmed(self.refused_by)
            outliers.confirmed(backend)
            return False
        if status not in _OF_THE_INSTANCE and not is_doubted:
            return False
        return (
            self._num_attempts <= self._services.config.retry_max_count
            and len(self._services.backends) > 1
            and self._services.budget.take(kept=_KEPT_FOR_LOSSES) is not None
        )

    async def lost(self, lost: StreamLost, backend: Backend, lived_s: float) -> None:
        """Notes a loss. `lived_s`: time for which the instance had the request.

        An instance that died or cannot be reached is at fault. A living instance is at fault if another one takes the
        request, or if it does not answer the gateway's own request. The request is at fault if another instance ends it
        in the same way.
        """
        self.excluded.add(backend)
        backends, outliers = self._services.backends, self._services.backends.outliers
        if not lost.was_sent:
            self._num_unreached += 1
            outliers.failed(backend, lost.cause, str(lost))
        elif backend.is_down or backend.is_stalled or await backends.has_died(backend):
            if self._is_engines_work:
                outliers.failed(backend, lost.cause, str(lost))
            self._services.trials.lost(self.case, backend)
        else:
            if self._is_engines_work:
                self._accused.append((backend, lost))
                backends.accuse(backend)
            self._report(lost, backend, lived_s)

    def _report(self, lost: StreamLost, backend: Backend, lived_s: float) -> None:
        if lost.end is End.ABORT and lived_s > TRIAL_S:
            self._reports.clear()  # instances are ended one after the other, and a long request meets several of them
        if lost.end in _OF_THE_REQUEST:
            said = [one for end, one in self._reports if end is lost.end and one is not backend]
            if said:
                self.reporters = said[0], backend
                self.end()
            self._reports.append((lost.end, backend))

    def end(self) -> None:
        """Ends the attempts, so that no further evidence will come."""
        for backend, _ in self._accused:
            self._services.backends.settled(backend, is_proven=False)
        self._accused.clear()

    def pause_before_next(self, lost: StreamLost, *, has_begun: bool) -> float | None:
        """Seconds to wait before the next attempt; None if the limits or the retry budget forbid it. An attempt that no
        engine received is free. `has_begun`: the client has a part of the answer."""
        if self._num_attempts > self._services.config.retry_max_count or self.num_placed >= _MOST_PLACED:
            return None
        wait_s: float | None = 0.0
        if lost.was_sent:
            is_answered = not has_begun and self.answer is not None
            wait_s = self._services.budget.take(0.0 if is_answered else self._services.config.retry_patience_s)
        if wait_s is None:
            self._services.metrics.unbudgeted.inc()
            return None
        return wait_s + backoff_s(self._num_attempts, random.random())
