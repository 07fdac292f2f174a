# SPDX-License-Identifier: Apache-2.0
"""The requests sent to instances, and each instance's counters of them.

`account` keeps those that no status shows yet (full mode), `lrs` the running ones (lite mode). Both identify a request
by gateway, id and stage, as two gateways may use the same id. Everything is O(1) per request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import Counters, InFlight

Key = tuple[str, str, InferType]
"""Gateway, id and stage of a request."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request at an instance."""

    gateway_id: str
    request_id: str
    instance_id: str
    infer_type: InferType
    counters: Counters

    @property
    def key(self) -> Key:
        return self.gateway_id, self.request_id, self.infer_type


E = TypeVar("E", bound=Entry)


class Ledger(ABC, Generic[E]):
    """Observes a view, on one event loop; `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.in_flight = InFlight()
        self.keeps = (self.in_flight,)
        self.num_expired = 0
        """Requests dropped because nothing was heard of them in time."""
        self._clock = clock
        self._entries: dict[Key, E] = {}
        self._of_instance: dict[str, dict[Key, E]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @abstractmethod
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
        """Notes a placed request. It replaces an earlier placement for the same stage."""

    def released(self, request_id: str, instance_ids: Collection[str], gateway_id: str = "") -> None:
        """Drops a request at these instances. Idempotent; the request may be unknown."""
        for infer_type in InferType:
            entry = self._entries.get((gateway_id, request_id, infer_type))
            if entry is not None and entry.instance_id in instance_ids:
                self._drop(entry)

    @abstractmethod
    def expire(self) -> None:
        """Drops requests of which nothing was heard in time. To be called periodically."""

    # From the view

    def appeared(self, instance: Instance) -> None:
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        """Does nothing, unless statuses tell about requests."""

    def left(self, instance: Instance) -> None:
        for entry in list(self._of_instance.get(instance.id, {}).values()):
            self._drop(entry)

    def _add(self, entry: E) -> None:
        key = entry.key
        earlier = self._entries.get(key)
        if earlier is not None:
            self._drop(earlier)
        self._entries[key] = entry
        self._of_instance.setdefault(entry.instance_id, {})[key] = entry
        self.in_flight.add(entry.instance_id, entry.counters)

    def _drop(self, entry: E) -> None:
        key = entry.key
        del self._entries[key]
        of_instance = self._of_instance[entry.instance_id]
        del of_instance[key]
        if not of_instance:
            del self._of_instance[entry.instance_id]
        self.in_flight.subtract(entry.instance_id, entry.counters)
