# SPDX-License-Identifier: Apache-2.0
"""The actor behind the production scaler, in place of `llumnix up --autoscale` or an operator's autoscaler: it starts
and stops simulated instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llumsched.cluster.columns import Cluster
from llumsched.scaling.scaler import Advice, Scaler
from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsim import PS
from llumsim.clock import Clock


@dataclass(frozen=True)
class Fleet:
    """Actions on instances, which are known by their numbers."""

    pools: Mapping[str, Sequence[int]]
    """Numbers available to each model."""
    is_there: Callable[[int], bool]
    number_of: Callable[[str], int]
    """The number of an instance by its id."""
    start: Callable[[int], None]
    """Order an instance, which appears after its cold start."""
    stop: Callable[[int], None]
    """Stop an instance as soon as it is empty."""


class ScalingActor:
    """Checks `cluster` at every interval for as long as its clock runs."""

    def __init__(self, clock: Clock, config: ScalingConfig, bounds: Bounds, cluster: Cluster, fleet: Fleet) -> None:
        self._clock, self._cluster, self._fleet = clock, cluster, fleet
        self._scaler = Scaler(config, bounds)
        self._interval_ps = round(config.interval_s * PS)
        self._ordered: set[int] = set()
        """Numbers of instances that are not there yet."""
        self._look_later()

    def _look_later(self) -> None:
        self._clock.at(self._clock.now_ps + self._interval_ps, self._look)

    def _look(self, now_ps: int) -> None:
        self._ordered = {number for number in self._ordered if not self._fleet.is_there(number)}
        for advice in self._scaler.advise(self._cluster, now_ps / PS):
            self._follow(advice)
        self._look_later()

    def _follow(self, advice: Advice) -> None:
        fleet, pool = self._fleet, self._fleet.pools[advice.group.model]
        num_ordered = len(self._ordered.intersection(pool))
        missing = advice.wanted - advice.num_serving - advice.num_starting - num_ordered
        free = [number for number in pool if number not in self._ordered and not fleet.is_there(number)]
        for number in free[: max(missing, 0)]:
            self._ordered.add(number)
            fleet.start(number)
        for instance_id in advice.leave:
            fleet.stop(fleet.number_of(instance_id))
