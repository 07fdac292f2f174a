# SPDX-License-Identifier: Apache-2.0
"""Local realtime state (lite mode): the load of engines that do not report, from the requests sent to them.

Each request and stage has a state. It begins at the dispatch with the prompt's tokens, grows with the gateway's
reports, and ends when the gateway releases it. It also ends

    when its instance leaves;
    when its gateway is lost: it has no keepalive connection and has not been heard for `gateway_ttl_s`;
    when nothing was reported of it for `state_ttl_s`.

A report of an unknown request makes a state, so that a restarted scheduler learns the running requests. A request
released a moment ago does not come back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.in_flight import counters_of
from llumsched.cluster.providers.ledger import Entry, Ledger

_log = logging.getLogger(__name__)
_RELEASED_FOR_S = 10.0
_MOST_RELEASED = 100_000


@dataclass(frozen=True, slots=True)
class Update:
    """A gateway's report of one request."""

    id: str
    instance_id: str
    infer_type: InferType
    gateway_id: str
    num_tokens: int
    """Tokens of prompt and output so far."""
    prefill_done: bool = False


@dataclass(slots=True, eq=False)
class _Reported(Entry):
    num_tokens: int
    heard_s: float
    num_hit_tokens: int = 0
    prefilled: bool = False


@dataclass(slots=True)
class _Gateway:
    since_s: float
    heard_s: float
    num_connections: int = 0
    reports: bool = False
    """True if it has sent a report or kept a connection."""


class RealtimeState(Ledger[_Reported]):
    """A state for each request. `instances`: the known ids."""

    def __init__(
        self, clock: Callable[[], float], instances: Container[str], *, gateway_ttl_s: float, state_ttl_s: float
    ) -> None:
        super().__init__(clock)
        self._instances = instances
        self._gateway_ttl_s = gateway_ttl_s
        self._state_ttl_s = state_ttl_s
        self._gateways: dict[str, _Gateway] = {}
        self._released: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._has_warned = False

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
        """As in `Ledger`, without `urgent`, which gateways' reports to a new scheduler do not tell."""
        self._hear(gateway_id)
        self._released.pop((gateway_id, request_id, instance_id), None)
        self._start(request_id, instance_id, infer_type, num_tokens, gateway_id, num_hit_tokens)

    def released(self, request_id: str, instance_ids: Collection[str], gateway_id: str = "") -> None:
        super().released(request_id, instance_ids, gateway_id)
        for instance_id in instance_ids:
            self._released[gateway_id, request_id, instance_id] = self._clock() + _RELEASED_FOR_S
        while len(self._released) > _MOST_RELEASED:
            self._released.popitem(last=False)

    def reported(self, update: Update) -> str | None:
        """Takes a gateway's report, or returns the reason why not."""
        self._hear(update.gateway_id).reports = True
        state = self._entries.get((update.gateway_id, update.id, update.infer_type))
        if state is None:
            if (update.gateway_id, update.id, update.instance_id) in self._released:
                return "request released"
            if update.instance_id not in self._instances:
                return "endpoint not found"
            state = self._start(update.id, update.instance_id, update.infer_type, update.num_tokens, update.gateway_id)
        if state.instance_id != update.instance_id:
            return "request instance changed"
        state.heard_s = self._clock()
        state.prefilled |= update.prefill_done
        state.num_tokens = max(state.num_tokens, update.num_tokens)
        self._count(state)
        return None

    # From the gateways' keepalive connections

    def connected(self, gateway_id: str) -> None:
        gateway = self._hear(gateway_id)
        gateway.num_connections += 1
        gateway.reports = True

    def disconnected(self, gateway_id: str) -> None:
        self._hear(gateway_id).num_connections -= 1

    def expire(self) -> None:
        now_s = self._clock()
        lost = {
            gateway_id
            for gateway_id, gateway in self._gateways.items()
            if not gateway.num_connections and now_s - gateway.heard_s > self._gateway_ttl_s
        }
        for state in list(self._entries.values()):
            if state.gateway_id in lost or now_s - state.heard_s > self._state_ttl_s:
                self.num_expired += 1
                self._drop(state)
        for gateway_id in lost:
            del self._gateways[gateway_id]
        self._warn_of_silent_gateways(now_s)
        while self._released and next(iter(self._released.values())) <= now_s:
            self._released.popitem(last=False)

    def _hear(self, gateway_id: str) -> _Gateway:
        now_s = self._clock()
        gateway = self._gateways.setdefault(gateway_id, _Gateway(now_s, now_s))
        gateway.heard_s = now_s
        return gateway

    def _warn_of_silent_gateways(self, now_s: float) -> None:
        """Warns once of a gateway that does not report, so that its requests count long after their end."""
        silent = (
            gateway_id
            for gateway_id, gateway in self._gateways.items()
            if not gateway.reports and now_s - gateway.since_s > self._gateway_ttl_s
        )
        if not self._has_warned and (gateway_id := next(silent, None)) is not None:
            self._has_warned = True
            _log.warning(
                "gateway %.100r has requests placed and reports none: each counts until %g s after it was placed. This "
                "scheduler is in lite mode; is the gateway (--enable-full-mode-scheduling)?",
                gateway_id,
                self._state_ttl_s,
            )

    def _start(
        self,
        request_id: str,
        instance_id: str,
        infer_type: InferType,
        num_tokens: int,
        gateway_id: str,
        num_hit_tokens: int = 0,
    ) -> _Reported:
        counters = counters_of(infer_type, num_tokens, num_hit_tokens=num_hit_tokens)
        now_s = self._clock()
        state = _Reported(gateway_id, request_id, instance_id, infer_type, counters, num_tokens, now_s, num_hit_tokens)
        self._add(state)
        return state

    def _count(self, state: _Reported) -> None:
        counters = counters_of(
            state.infer_type, state.num_tokens, prefilled=state.prefilled, num_hit_tokens=state.num_hit_tokens
        )
        if counters != state.counters:
            self.in_flight.add(state.instance_id, counters.minus(state.counters))
            state.counters = counters
