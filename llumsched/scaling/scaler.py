# SPDX-License-Identifier: Apache-2.0
"""From the loads of groups to the desired number of instances.

Up: at once, for the present need, or for the need at the time when an instance started now would serve. The growth of
the number of requests is extrapolated by its certain part (the slope less two standard errors), as each wave of
arrivals grows for a while. It is measured over as long as it is extrapolated, at least half a minute, so that slow
ramps stand out from noise.

Down: to the number that was comfortable for all of `settle_s`. Between needed and comfortable nothing changes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llumsched.cluster.columns import Cluster
from llumsched.scaling.leaving import cheapest_first
from llumsched.scaling.load import Group, Load, measure
from llumsched.scaling.scaling_config import Bounds, ScalingConfig

SHORTEST_TREND_S: Final = 30.0
FORGET_S: Final = 600.0
"""Time after which a group without instances is forgotten."""
_FEWEST_SAMPLES: Final = 5
_CERTAIN: Final = 2.0
"""Number of standard errors."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The desired state of a group."""

    group: Group
    wanted: int
    num_serving: int
    num_starting: int
    num_leaving: int
    saturation: float
    """Needed instances per serving one: above 1 there are too few. 0 if none serves, as nothing is known then."""
    reason: str
    """The reason for the desired number."""
    cheapest_first: list[str]
    """Ids of the serving instances that leave first: as many as exceed `wanted`, at least one if any serves."""

    @property
    def leave(self) -> list[str]:
        """Ids of the instances that should leave now."""
        return self.cheapest_first[: max(self.num_serving - self.wanted, 0)]


@dataclass(slots=True)
class _Seen:
    """The history of a group."""

    wanted: int
    begun_s: float
    seen_s: float
    reason: str = "first seen"
    requests: deque[tuple[float, float]] = field(default_factory=deque)
    comfortable: deque[tuple[float, float]] = field(default_factory=deque)


class Scaler:
    """The scaler of a cluster. The times it is given must not decrease."""

    def __init__(self, config: ScalingConfig, bounds: Bounds) -> None:
        self._config, self._bounds = config, bounds
        self._records: dict[Group, _Seen] = {}

    def advise(self, cluster: Cluster, now_s: float) -> list[Advice]:
        """The advice for each group, by model."""
        loads = measure(cluster, self._config, now_s)
        for group, load in loads.items():
            self._look(group, load, now_s)
        for group, record in list(self._records.items()):
            if now_s - record.seen_s > FORGET_S:
                del self._records[group]
        return [
            self._advice(group, record, loads.get(group), cluster) for group, record in sorted(self._records.items())
        ]

    def _look(self, group: Group, load: Load, now_s: float) -> None:
        num_serving = len(load.rows)
        record = self._records.get(group)
        if record is None:
            record = self._records[group] = _Seen(self._bounds.clamp(num_serving), now_s, now_s)
        record.seen_s = now_s
        if not num_serving:  # nothing is known of the load
            record.requests.clear()
            record.comfortable.clear()
            record.begun_s = now_s
            return
        trend_s = max(SHORTEST_TREND_S, self._config.cold_start_s)
        _remember(record.requests, now_s, load.num_requests, trend_s)
        _remember(record.comfortable, now_s, load.comfortable, self._config.settle_s)
        more = max(certain_growth(record.requests), 0.0) * self._config.cold_start_s
        up = self._bounds.clamp(load.needed * (1 + more / max(load.num_requests, 1.0)))
        is_settled = now_s - record.begun_s >= self._config.settle_s
        down = self._bounds.clamp(max(value for _, value in record.comfortable))
        if up > record.wanted:
            record.wanted = up
            grows = "" if self._bounds.clamp(load.needed) >= up else ", growing"
            record.reason = f"{load.reason}{grows}"
        elif not is_settled:
            # Of instances that come one by one after a start of the scheduler, none is too many yet.
            record.wanted = max(record.wanted, self._bounds.clamp(num_serving))
        elif down < record.wanted and up <= down:
            record.wanted, record.reason = down, f"enough for {self._config.settle_s:g} s"

    def _advice(self, group: Group, record: _Seen, load: Load | None, cluster: Cluster) -> Advice:
        if load is None:
            return Advice(group, record.wanted, 0, 0, 0, 0.0, "no instance is known", [])
        num_serving = len(load.rows)
        too_many = max(num_serving - record.wanted, 1)
        return Advice(
            group, record.wanted, num_serving, load.num_starting, load.num_leaving,
            saturation=load.needed / num_serving if num_serving else 0.0,
            reason=record.reason if num_serving else "no instance serves",
            cheapest_first=cheapest_first(cluster, load.rows, too_many),
        )  # fmt: skip


def _remember(values: deque[tuple[float, float]], now_s: float, value: float, seconds: float) -> None:
    values.append((now_s, value))
    while values[0][0] < now_s - seconds:
        values.popleft()


def certain_growth(values: deque[tuple[float, float]]) -> float:
    """Growth per second by least squares, less two standard errors; 0 if there are too few values."""
    if len(values) < _FEWEST_SAMPLES:
        return 0.0
    times, numbers = np.array(values).T
    times = times - times.mean()
    spread = float((times**2).sum())
    if spread == 0:
        return 0.0
    slope = float((times * numbers).sum()) / spread
    residuals = numbers - numbers.mean() - slope * times
    error = math.sqrt(float((residuals**2).sum()) / (len(times) - 2) / spread)
    return slope - _CERTAIN * error
