# SPDX-License-Identifier: Apache-2.0
"""Estimates the number of schedulers that send requests to the cluster.

Statuses name recent arrivals from all schedulers, which otherwise do not know of each other. Gateways distribute
requests evenly, so the ratio of arrivals to own requests is the number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llumsched.cluster.instance import Instance
from llumsched.latency.fading import Fading

_HALF_LIFE_S: Final = 10.0
_FEWEST: Final = 10.0
"""Fewest recent own requests for an estimate."""
_MORE_THAN_CHANCE: Final = 1.25
"""Arrivals per own request up to which this scheduler counts as alone."""


class Senders:
    """Observes a view. `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: dict[str, str] = {}
        """The request that came last to each instance; "" if none was named."""
        self._lately = Fading(_HALF_LIFE_S, 2)
        """Recent requests sent by this scheduler, and by all."""

    @property
    def number(self) -> float:
        """1 if this scheduler is alone. May be fractional."""
        sent, come = self._lately.sums
        return 1.0 if sent < _FEWEST or come < _MORE_THAN_CHANCE * sent else come / sent

    def sent(self) -> None:
        """Notes a request sent by this scheduler."""
        self._lately.add(self._clock(), 1, 0)

    def appeared(self, instance: Instance) -> None:
        self._newest.pop(instance.id, None)
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        if instance.status is None:
            return
        names = instance.status.recent_waiting_requests  # the oldest first
        newest = self._newest.get(instance.id)
        if newest is not None:
            num_new = 0
            for name in reversed(names):
                if name == newest:
                    break
                num_new += 1
            if num_new:
                self._lately.add(self._clock(), 0, num_new)
        self._newest[instance.id] = names[-1] if names else newest or ""

    def left(self, instance: Instance) -> None:
        self._newest.pop(instance.id, None)
