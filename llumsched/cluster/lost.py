# SPDX-License-Identifier: Apache-2.0
"""Instances that fell silent or were cut off, and have not returned.

They are in no view and get no requests, but count as failed for their failure domains during `FAILS_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llumsched.cluster.instance import Instance

FAILS_S: Final = 60.0
"""Time for which a lost instance counts as failed for its failure domain."""
_MOST: Final = 10_000


class Lost:
    """Instances by id, the longest lost first. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._instances: dict[str, tuple[float, Instance]] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._instances

    def add(self, instance: Instance) -> None:
        """Keeps the last state of an instance."""
        self._instances.pop(instance.id, None)
        self._instances[instance.id] = self._clock(), instance
        if len(self._instances) > _MOST:
            del self._instances[next(iter(self._instances))]

    def discard(self, instance_id: str) -> None:
        """Drops an instance that has returned or signed off."""
        self._instances.pop(instance_id, None)

    def within(self, seconds: float) -> tuple[Instance, ...]:
        """Instances lost within the last `seconds`."""
        if not self._instances:
            return ()
        since_s = self._clock() - seconds
        return tuple(instance for lost_s, instance in self._instances.values() if lost_s >= since_s)

    def ages_s(self) -> dict[str, float]:
        """Seconds since each was lost."""
        now_s = self._clock()
        return {instance_id: now_s - lost_s for instance_id, (lost_s, _) in self._instances.items()}
