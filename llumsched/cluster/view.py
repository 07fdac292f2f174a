# SPDX-License-Identifier: Apache-2.0
"""The instances of the cluster as they are known here, and who wants to hear of changes.

A `View` belongs to one event loop. A store writes it (`put_metadata`, `put_status`, `remove`, `lose`), everybody else
reads and observes it. Nothing here waits for the network: what is known may be old, and says how old it is.
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
"""Statuses take milliseconds, and clocks differ by as much."""
_MOST_LATE_S: Final = 30.0
"""A clock that is further behind is wrong, and not the status late."""


@runtime_checkable
class Observer(Protocol):
    """Called on the view's event loop, in the order of the changes. Must not wait, and must not raise.

    An observer may declare three attributes. `after`: objects that must hear of a change before it does. `keeps`:
    objects that it writes, so that whatever is after one of them is after this observer. `hears_statuses` = False:
    `changed` is not called where only the status is newer.
    """

    def appeared(self, instance: Instance) -> None:
        """Hears of an id that was not there, or of a new life of one that was (after `left`)."""

    def changed(self, instance: Instance) -> None:
        """Hears of a newer status, or of other metadata."""

    def left(self, instance: Instance) -> None:
        """Hears of an instance that leaves, as it was last."""


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

    `heard_s` is when the store that feeds the view was last reached: a view that is fed by a lost store stays as it
    was, and grows old.
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
        """Observers that hear of every status."""
        self._faults: set[tuple[str, type[Exception]]] = set()
        """Faults of observers that were told in the log."""
        self.lost = Lost(clock)
        self.heard_s = clock()
        self.connected = True
        """Whether the store can be reached now, as far as is known."""

    # Reading

    def __getitem__(self, instance_id: str) -> Instance:
        return self._instances[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def age_s(self) -> float:
        """Seconds since the store was last heard; 0 while it is connected."""
        return 0.0 if self.connected else self._clock() - self.heard_s

    def observe(self, *observers: Observer) -> Callable[[], None]:
        """Tells observers of all instances there are, and of every change until the returned function is called. Each
        hears of a change after the observers that it depends on, whichever were added first."""
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
        """Takes an instance in, or its new metadata. One of the same id and another incarnation is gone with it."""
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
        """Takes a status that left its instance `age_s` ago. False, and nothing is changed, for one of an instance or a
        life that is not known, or that is not newer than the one that is there. `numbers`: `Instance.numbers`."""
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
        """Takes out an instance that is gone, and has said so."""
        self.lost.discard(instance_id)
        self._take_out(instance_id)

    def lose(self, instance_id: str) -> None:
        """Takes out an instance that is gone without a word. Observers hear what they hear of any that leaves."""
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
        """Tells one observer. If it raises, the others hear of it all the same, and the store goes on."""
        try:
            hear(instance)
        except Exception as error:
            fault = getattr(hear, "__qualname__", repr(hear)), type(error)
            if fault not in self._faults:
                self._faults.add(fault)
                logger.exception("%s of instance %s raised; further ones are not logged", fault[0], instance.id)


def _without_time(metadata: InstanceMetadata) -> InstanceMetadata:
    """Metadata without what a repetition that only keeps an entry alive changes."""
    same = InstanceMetadata()
    same.CopyFrom(metadata)
    same.ClearField("utc_update")
    return same
