# SPDX-License-Identifier: Apache-2.0
"""The requests sent to an instance that its status does not show yet (full mode).

A request is in the account of its instance from its dispatch until the first of:

    the instance's status names it (waiting, or recent, which includes requests that have ended): from then on the
    same status counts its load, so that it is never counted twice nor missed;
    it is released: the gateway says that it did not arrive, or that it has ended;
    the same gateway dispatches it again under the same id and for the same stage: a retry, which replaces the
    placement;
    its instance left, or came back as a new life;
    its time is over: a request that was aborted on its way never arrives. No status is needed for that, so an idle
    instance, which sends none, does not keep it. While the CMS is lost nothing expires, as what was sent meanwhile
    is all that is known to have changed.

A request can move only after its source's status shows it, so it has left the account by then. A retry at an instance
that still remembers the first try leaves the account at the next status, and is missed until the engine has it, for
some milliseconds.

A status costs as much as it names requests, and only while some are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import counters_of
from llumsched.cluster.providers.ledger import Entry, Ledger

_NAME_CHARACTERS: Final = 128
"""Longest name of a request in a status; engines cut off the rest."""
_MOST_OVERDUE: Final = 100_000


@dataclass(slots=True, eq=False)
class _Sent(Entry):
    deadline_s: float
    kept: bool = True


class Account(Ledger[_Sent]):
    """`staleness_s` 0 counts nothing. `is_blind`: true while no status can come."""

    def __init__(
        self, clock: Callable[[], float], staleness_s: float, is_blind: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(clock)
        self._staleness_s = staleness_s
        self._is_blind = is_blind
        self._by_age: deque[_Sent] = deque()

    def dispatched(
        self,
        request_id: str,
        instance_id: str,
        infer_type: InferType,
        num_tokens: int,
        gateway_id: str = "",
        num_hit_tokens: int = 0,
        *,
        urgent: bool = False,
    ) -> None:
        self.expire()
        if not self._staleness_s:
            return
        now_s = self._clock()
        counters = counters_of(infer_type, num_tokens, num_hit_tokens=num_hit_tokens, urgent=urgent)
        counters = counters._replace(dispatched_ms=round(now_s * 1000))
        sent = _Sent(gateway_id, request_id, instance_id, infer_type, counters, now_s + self._staleness_s)
        self._add(sent)
        self._by_age.append(sent)

    def expire(self) -> None:
        now_s = self._clock()
        most_overdue = _MOST_OVERDUE if self._is_blind() else 0
        while self._by_age:
            sent = self._by_age[0]
            if sent.kept and (sent.deadline_s > now_s or len(self._by_age) <= most_overdue):
                return
            self._by_age.popleft()
            if sent.kept:
                self.num_expired += 1
                self._drop(sent)

    def changed(self, instance: Instance) -> None:
        on_their_way = self._of_instance.get(instance.id)
        if not on_their_way or instance.status is None:
            return
        named = {*instance.status.recent_waiting_requests, *instance.status.waiting_requests}
        if not named:
            return
        for sent in list(on_their_way.values()):
            if sent.request_id[:_NAME_CHARACTERS] in named:
                self._drop(sent)

    def _drop(self, entry: _Sent) -> None:
        entry.kept = False
        super()._drop(entry)
