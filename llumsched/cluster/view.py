# SPDX-License-Identifier: Apache-2.0
"""The known instances of the cluster, and the observers of their changes.

A `View` belongs to one event loop. A store writes it (`put_metadata`, `put_status`, `remove`, `lose`); all others read
and observe it. Nothing here waits for the network: knowledge may be old, and tells its age.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Final, Protocol, runtime_checkable

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.lost import Lost

logger = logging.getLogger(__name__)
_LEAST_LATE_S: Final = 0.05
"""Smallest delay of a status that counts: transport takes milliseconds, and clocks differ by as much."""
_MOST_LATE_S: Final = 30.0
"""Largest delay of a status that counts: beyond that the clock is wrong."""


@runtime_checkable
class Observer(Protocol):
    """Called on the view's event loop, in the order of the changes. Must not wait, and must not raise.

    An observer may declare three attributes. `after`: objects that must hear of a change before it does. `keeps`:
    objects that it writes, so that whatever is after one of them is after this observer. `hears_statuses` = False:
    `changed` is not called where only the status is newer.
    """

    def appeared(self, instance: Instance) -> None:
        """Called for a new id, or a new life of one (after `left`)."""

    def changed(self, instance: Instance) -> None:
        """Called for a newer status or other metadata."""

    def left(self, instance: Instance) -> None:
        """Called for an instance that leaves, with its last state."""


def in_order(observers: Iterable[Observer]) -> list[Observer]:
    """Sorts observers so that each comes after those that it depends on. Raises graphlib.CycleError."""
    given = list(observers)
    keepers = {id(kept): number for number, one in enumerate(given) for kept in (one, *getattr(one, "keeps", ()))}
    graph = {
        number: [keepers[id(other)] for other in getattr(one, "after", ()) if id(other) in keepers]
        for number, one in enumerate(given)
    }
    return [given[number] for number in TopologicalSorter(graph).static_order()]


class View(Mapping[str, Instance]):
    """Instances by id.

    `heard_s`: when the store was last reached. While the store is lost the view stays and ages.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`wall_clock`: that of the statuses, in seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._instances: dict[str, Instance] = {}
        self._observers: list[Observer] = []
        self._of_statuses: list[Observer] = []
        """Observers of every status."""
        self._faults: set[tuple[str, type[Exception]]] = set()
        """Faults of observers that were logged."""
        self.lost = Lost(clock)
        self.heard_s = clock()
        self.connected = True
        """True if the store can be reached, as far as is known."""

    # Reading

    def __getitem__(self, instance_id: str) -> Instance:
        return self._instances[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def age_s(self) -> float:
        """Seconds since the store was last heard; 0 while connected."""
        return 0.0 if self.connected else self._clock() - self.heard_s

    def observe(self, *observers: Observer) -> Callable[[], None]:
        """Tells observers of all present instances, and of every change until the returned function is called. Each
        hears of a change after the observers that it depends on."""
        added = in_order(observers)
        for one in added:
            for instance in list(self._instances.values()):
                self._tell(one.appeared, instance)
        self._set_observers([*self._observers, *added])
        return lambda: self._set_observers([one for one in self._observers if all(one is not gone for gone in added)])

    def _set_observers(self, observers: Iterable[Observer]) -> None:
        self._observers = in_order(observers)
        self._of_statuses = [one for one in self._observers if getattr(one, "hears_statuses", True)]

    # Writing

    def put_metadata(self, metadata: InstanceMetadata) -> None:
        """Adds an instance, or updates its metadata. Another incarnation of the same id leaves."""
        self.lost.discard(metadata.instance_id)
        known = self._instances.get(metadata.instance_id)
        if known is not None and known.metadata.incarnation != metadata.incarnation:
            self.remove(metadata.instance_id)
            known = None
        if known is None:
            self._keep(Instance(metadata, None, self._clock()), appeared=True)
        elif _without_time(known.metadata) != _without_time(metadata):
            self._keep(replace(known, metadata=metadata))

    def put_status(self, status: InstanceStatus, age_s: float = 0.0, numbers: tuple[float, ...] = ()) -> bool:
        """Takes a status that left its instance `age_s` ago. Returns False, without a change, for an unknown life or a
        status that is not newer. `numbers`: `Instance.numbers`."""
        known = self._instances.get(status.instance_id)
        if known is None or known.metadata.incarnation != status.incarnation:
            return False
        old = known.status
        if old is not None and (status.update_id, status.timestamp_ms) <= (old.update_id, old.timestamp_ms):
            return False
        received_s = self._clock() - age_s
        instance = Instance(known.metadata, status, received_s, self._late_s(status, age_s), numbers)
        self._instances[instance.id] = instance
        for observer in self._of_statuses:
            self._tell(observer.changed, instance)
        return True

    def _late_s(self, status: InstanceStatus, age_s: float) -> float:
        late_s = self._wall_clock() - status.timestamp_ms / 1000 - age_s
        return late_s if _LEAST_LATE_S < late_s < _MOST_LATE_S else 0.0

    def remove(self, instance_id: str) -> None:
        """Removes an instance that has signed off."""
        self.lost.discard(instance_id)
        self._take_out(instance_id)

    def lose(self, instance_id: str) -> None:
        """Removes an instance that was lost. Observers hear `left`."""
        gone = self._take_out(instance_id)
        if gone is not None:
            self.lost.add(gone)

    def _take_out(self, instance_id: str) -> Instance | None:
        gone = self._instances.pop(instance_id, None)
        if gone is not None:
            for observer in self._observers:
                self._tell(observer.left, gone)
        return gone

    def _keep(self, instance: Instance, *, appeared: bool = False) -> None:
        self._instances[instance.id] = instance
        for observer in self._observers:
            self._tell(observer.appeared if appeared else observer.changed, instance)

    def _tell(self, hear: Callable[[Instance], None], instance: Instance) -> None:
        """Tells one observer. If it raises, the others still hear of the change."""
        try:
            hear(instance)
        except Exception as error:
            fault = getattr(hear, "__qualname__", repr(hear)), type(error)
            if fault not in self._faults:
                self._faults.add(fault)
                logger.exception("%s of instance %s raised; further ones are not logged", fault[0], instance.id)


def _without_time(metadata: InstanceMetadata) -> InstanceMetadata:
    """Metadata without the fields that change in repetitions."""
    same = InstanceMetadata()
    same.CopyFrom(metadata)
    same.ClearField("utc_update")
    return same
