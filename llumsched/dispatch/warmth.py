# SPDX-License-Identifier: Apache-2.0
"""Whether enough of the cluster is known to choose from it.

A scheduler that has just started hears of its instances one by one, over some seconds: who chose from the first three
of a thousand would send these everything. Until their number has not grown for a while it says that it is warming, and
gateways go round the instances that they know. So it is again after all instances have been lost at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llumsched.cluster.instance import Instance

QUIET_S: Final = 2.0
"""Time without a new instance. Reporters connect again after at most three seconds, most of them within one."""
_MOST_S: Final = 15.0
"""Time after which a fleet that grows all the time is warm all the same."""


class Warmth:
    """Tells warm from cold. Observes a view. `clock`: monotonic seconds. `quiet_s` 0: always warm."""

    hears_statuses: Final = False

    def __init__(self, clock: Callable[[], float], quiet_s: float = QUIET_S) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._num_instances = 0
        self._since_s = self._grew_s = clock()
        self._is_warm = quiet_s == 0.0

    @property
    def is_warming(self) -> bool:
        now_s = self._clock()
        if not self._is_warm and self._num_instances:
            self._is_warm = now_s - self._grew_s >= self._quiet_s or now_s - self._since_s >= _MOST_S
        return not self._is_warm

    def appeared(self, instance: Instance) -> None:
        self._grew_s = self._clock()
        if not self._num_instances:
            self._since_s = self._grew_s
        self._num_instances += 1

    def changed(self, instance: Instance) -> None:
        return

    def left(self, instance: Instance) -> None:
        self._num_instances -= 1
        if not self._num_instances:
            self._is_warm = self._quiet_s == 0.0
