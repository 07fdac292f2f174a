# SPDX-License-Identifier: Apache-2.0
"""Engines that have been heard of on the relay, and how to answer them."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_OWNERS = 4096
"""Engine processes remembered; beyond that the one that has been silent for longest is forgotten."""


@dataclasses.dataclass(eq=False, slots=True)
class Owner:
    """One engine process. `identity` is its present address on the ROUTER socket and changes when it reconnects."""

    instance: str
    incarnation: str
    identity: bytes
    llumlet: str = ""
    """gRPC address of its llumlet."""
    last_heard: float = 0.0
    """In seconds of this process's monotonic clock."""
    steps: int = 0
    """Turns of its loop, as of its last heartbeat: a hung loop does not count on although its threads answer."""


class Owners:
    """Owners by name and by socket identity, bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_name: OrderedDict[tuple[str, str], Owner] = OrderedDict()
        self._by_identity: dict[bytes, Owner] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def heard(self, identity: bytes, instance: str, incarnation: str) -> Owner:
        """A message came from this engine over this connection."""
        name = (instance, incarnation)
        owner = self._by_name.get(name)
        if owner is None:
            owner = self._by_name[name] = Owner(instance, incarnation, identity)
            if len(self._by_name) > MAX_OWNERS:
                self._forget(self._by_name.popitem(last=False)[1])
        elif owner.identity != identity:
            self._forget(owner)
            owner.identity = identity
        self._by_identity[identity] = owner
        self._by_name.move_to_end(name)
        owner.last_heard = self._clock()
        return owner

    def at(self, identity: bytes) -> Owner | None:
        """Who speaks on this connection, if they have said so."""
        return self._by_identity.get(identity)

    def _forget(self, owner: Owner) -> None:
        if self._by_identity.get(owner.identity) is owner:
            del self._by_identity[owner.identity]
