# SPDX-License-Identifier: Apache-2.0
"""Detects if enough of the cluster is known to choose from it.

A new scheduler hears of its instances one by one, over some seconds; choosing from the first three of a thousand would
send these everything. Until their number has not grown for a while it is warming, and gateways use the instances that
they know in turn. The same holds after all instances were lost at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llumsched.cluster.instance import Instance

QUIET_S: Final = 2.0
"""Time without a new instance. Reporters connect again after at most three seconds, most of them within one."""
_MOST_S: Final = 15.0
"""Longest time of warming for a fleet that keeps growing."""


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
