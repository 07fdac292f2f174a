# SPDX-License-Identifier: Apache-2.0
"""Gateways' complaints about instances, shared with all gateways.

Complaints about an instance's behaviour (errors, refusals, slowness) are believed from one gateway, for all. An
unreachable instance may be the fault of the gateway's machine: it is avoided by that gateway at once, and by all when
more than half of the machines with recently heard gateways agree. At most half of all instances are refused, those with
the most complaints first; unreachable ones are always refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from llumlet.process.addresses import Address
from llumsched.causes import Cause
from llumsched.cluster.instance import Instance

_MOST_GATEWAYS: Final = 10_000
_MOST_REFUSED: Final = 0.5
_DIGITS: Final = 9
"""Significant digits of a sum of shares."""
_OF_THE_WAY: Final = frozenset((Cause.UNREACHABLE, Cause.SILENCE))
"""Causes that may be the network's or the gateway's fault."""


@dataclass(frozen=True, slots=True)
class Complaint:
    cause: Cause
    why: str
    """The reason, for people."""
    since_s: float
    """The beginning, on the clock of `Complaints`."""


@dataclass(slots=True)
class _Complainer:
    host: str
    complaints: Mapping[Address, Complaint]
    until_s: float


class Complaints:
    """Weighs complaints. Observes a view, on one event loop; `clock` in seconds, monotonic."""

    hears_statuses: Final = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gateways: dict[str, _Complainer] = {}
        self._addresses: dict[str, Address] = {}
        self._ids: defaultdict[Address, set[str]] = defaultdict(set)
        """Ids of the instances behind an API server: several with data-parallel ranks."""
        self._refused: dict[str, Mapping[str, str]] = {}
        """Cached results of `of`; "" is any gateway without complaints."""
        self._valid_until_s = float("inf")

    # From gateways

    def complain(self, gateway_id: str, complaints: Mapping[Address, Complaint], ttl_s: float, host: str = "") -> None:
        """Takes all present complaints of a gateway, which replace its earlier ones and expire after `ttl_s`. `host`:
        its machine; "" counts as a machine of its own."""
        known = self._gateways.pop(gateway_id, None)
        if len(self._gateways) >= _MOST_GATEWAYS:
            del self._gateways[next(iter(self._gateways))]
        self._gateways[gateway_id] = _Complainer(host or gateway_id, complaints, self._clock() + ttl_s)
        if known is None or known.complaints != complaints:
            self._changed()

    # From the view

    def appeared(self, instance: Instance) -> None:
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        known, address = self._addresses.get(instance.id), instance.api_server
        if known == address:
            return
        if known is not None:
            self.left(instance)
        self._addresses[instance.id] = address
        self._ids[address].add(instance.id)
        self._changed()

    def left(self, instance: Instance) -> None:
        address = self._addresses.pop(instance.id)
        self._ids[address].discard(instance.id)
        if not self._ids[address]:
            del self._ids[address]
        self._changed()

    # For decisions

    def ids_at(self, address: Address) -> frozenset[str]:
        """Ids of the instances behind this API server."""
        return frozenset(self._ids.get(address, ()))

    def of(self, gateway_id: str) -> Mapping[str, str]:
        """Instances that get none of this gateway's requests, by id, with the reason."""
        if not self._gateways:
            return {}
        if self._clock() >= self._valid_until_s:
            self._changed()
        if gateway_id not in self._gateways:
            gateway_id = ""
        found = self._refused.get(gateway_id)
        if found is None:
            found = self._refused[gateway_id] = self._weigh(gateway_id)
        return found

    def _weigh(self, gateway_id: str) -> Mapping[str, str]:
        now_s = self._clock()
        for known in [one for one, gateway in self._gateways.items() if gateway.until_s <= now_s]:
            del self._gateways[known]
        self._valid_until_s = min((gateway.until_s for gateway in self._gateways.values()), default=float("inf"))
        sizes = Counter(gateway.host for gateway in self._gateways.values())
        by_address = defaultdict(list)
        votes: defaultdict[Address, float] = defaultdict(float)
        for by, gateway in self._gateways.items():
            for address, complaint in gateway.complaints.items():
                if address in self._ids:
                    by_address[address].append((by == gateway_id, complaint))
                    votes[address] += 1 / sizes[gateway.host]
        quorum = len(sizes) / 2
        counted = []
        for address, complaints in by_address.items():
            valid = [
                complaint
                for is_own, complaint in complaints
                if is_own or complaint.cause not in _OF_THE_WAY or round(votes[address], _DIGITS) > quorum
            ]
            if valid:
                oldest = min(valid, key=lambda one: one.since_s)
                counted.append((-round(votes[address], _DIGITS), oldest.since_s, address, oldest))
        refused: dict[str, str] = {}
        num_refused = 0
        for _, _, address, complaint in sorted(counted, key=lambda one: one[:3]):
            ids = self._ids[address]
            if complaint.cause is not Cause.UNREACHABLE:
                if num_refused + len(ids) > _MOST_REFUSED * len(self._addresses):
                    continue
                num_refused += len(ids)
            refused |= dict.fromkeys(ids, f"{complaint.cause}: {complaint.why}")
        return refused

    def _changed(self) -> None:
        self._refused.clear()
