# SPDX-License-Identifier: Apache-2.0
"""Engines that have been heard of on the relay: how to answer them, and whether they live."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from llumlet.protocol.recovery.steps import UNKNOWN, LastSteps
from llumlet.protocol.wire import Health

MAX_OWNERS = 4096
"""Engine processes remembered; beyond that the one that has been silent for longest is forgotten."""
PROBE_SECONDS = 0.8
"""Silence, with two heartbeats a second, after which an engine is asked whether it is there."""
SUSPECT_SECONDS = 1.5
"""Silence after which it is sent nothing new."""
LOST_SECONDS = 4.5
"""Silence after which it counts as lost, although it may only be stopped or cut off."""
FORGOTTEN_SECONDS = 45.0
"""Silence that says nothing any more: it has taken this process for dead after 30 s and sends it no heartbeats, or
another life of it may be there."""


STUCK_SECONDS = 1.5
"""Age of the step of a silent engine above which it is hung there; with a younger step, the engine was cut off."""

ReadSteps = Callable[[str], LastSteps | None]
"""The record of the life of an engine with this incarnation; None if it cannot be read here."""


@dataclasses.dataclass(eq=False, slots=True)
class Owner:
    """An engine process. `identity` is its present address on the ROUTER socket and changes when it reconnects."""

    instance: str
    incarnation: str
    identity: bytes
    llumlet: str = ""
    """gRPC address of its llumlet."""
    digest: str = ""
    """Engines with the same can go on with its requests."""
    last_heard: float = 0.0
    """Its last sign of life, in seconds of this process's monotonic clock."""
    forgiven: float = 0.0
    """Seconds since then in which this process stood still and could hear no engine."""
    health: Health = Health.OK
    """The health of its loop, as of its last heartbeat."""
    hung_since: float = 0.0
    """The time at which it said first that it hangs."""
    dead: str = ""
    """Evidence that the process is gone; it does not come back."""
    dead_since: float = 0.0
    parted: bool = False
    """True if the engine has announced that it has none of our requests and will be silent."""
    last_steps: LastSteps | None = None
    """The last steps of a dead engine, once they were read."""

    def died(self, how: str, now: float) -> None:
        if not self.dead:
            self.dead, self.dead_since = how, now

    def speaks(self, now: float) -> None:
        self.last_heard, self.forgiven = now, 0.0

    def silence(self, now: float) -> float:
        """Seconds for which it could have been heard of, and was not."""
        return now - self.last_heard - self.forgiven

    def says(self, health: Health) -> None:
        if health is Health.HUNG and self.health is not Health.HUNG:
            self.hung_since = self.last_heard
        self.health = health

    def why_lost(self, now: float, patience: float = 0.0, since: float = 0.0) -> str | None:
        """The reason why its requests should continue elsewhere; None while it lives. `patience`: seconds for hangs and
        silence, which can end. What it said about its loop before `since`, when the request came, is ignored."""
        if self.dead:
            return self.dead
        if self.health is Health.HUNG and self.last_heard >= since and now - self.hung_since >= patience:
            return "its loop hangs"
        silent = self.silence(now)
        return f"nothing heard of it for {silent:.1f} s" if silent > LOST_SECONDS + patience else None

    def may_have_cache(self, now: float) -> bool:
        """True if the KV cache of its requests may still be readable: its loop hangs, and its other threads do not."""
        return not self.dead and self.health is Health.HUNG and self.silence(now) <= SUSPECT_SECONDS

    def takes_requests(self, now: float) -> bool:
        """True if it can be sent new requests."""
        return not self.dead and self.health is Health.OK and self.silence(now) <= SUSPECT_SECONDS

    def is_ailing(self, now: float) -> bool:
        """True if it is known to make no progress."""
        return not self.parted and not self.takes_requests(now) and self.silence(now) <= FORGOTTEN_SECONDS

    def may_take_requests(self, now: float) -> bool:
        """True if it is worth trying: it takes requests, or parted without a fault."""
        return self.takes_requests(now) or (self.parted and not self.dead)


class Owners:
    """Owners by name and by socket identity, bounded."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[tuple[str, str], Owner] = OrderedDict()
        self._by_identity: dict[bytes, Owner] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def heard(self, identity: bytes, instance: str, incarnation: str, now: float) -> Owner:
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
        owner.parted = False
        owner.speaks(now)
        return owner

    def expected(self, instance: str, incarnation: str, llumlet: str, now: float) -> Owner:
        """An engine that another one named, and that should be heard of soon."""
        owner = self._by_name.get((instance, incarnation))
        if owner is None:
            owner = self._by_name[instance, incarnation] = Owner(
                instance, incarnation, identity=b"", llumlet=llumlet, last_heard=now
            )
        elif owner.parted:
            owner.parted = False
            owner.speaks(now)
        return owner

    def all(self) -> list[Owner]:
        return list(self._by_name.values())

    def life(self, instance: str, incarnation: str) -> Owner | None:
        return self._by_name.get((instance, incarnation))

    def named(self, instance: str) -> Owner | None:
        """The latest life of an instance."""
        lives = [owner for owner in self._by_name.values() if owner.instance == instance]
        return max(lives, key=lambda owner: owner.last_heard, default=None)

    def at_llumlet(self, llumlet: str) -> Owner | None:
        """The engine heard of last whose llumlet is at this address."""
        lives = [owner for owner in self._by_name.values() if owner.llumlet == llumlet]
        return max(lives, key=lambda owner: owner.last_heard, default=None)

    def at(self, identity: bytes) -> Owner | None:
        """The engine on this connection, if it has identified itself."""
        return self._by_identity.get(identity)

    def _forget(self, owner: Owner) -> None:
        if self._by_identity.get(owner.identity) is owner:
            del self._by_identity[owner.identity]


def steps_of(owner: Owner, now: float, read: ReadSteps, ends: bool = False) -> LastSteps | None:
    """The steps in which `owner` died or hangs. None: it is on its way out, or as far as is known it only is cut off,
    or stands still outside of any step. `ends`: it has just said that it does, if not why.

    On the same machine the engine's record of its steps says it. Of one on another machine nothing can be read: if it
    died, or says itself that it hangs, it may have been in a step of each of its requests.
    """
    if owner.dead:
        if owner.last_steps is None:
            # Once: the next engine that starts there removes the record.
            owner.last_steps = read(owner.incarnation) or UNKNOWN
        return None if owner.last_steps.leaving else owner.last_steps
    hangs = owner.health is Health.HUNG
    steps = read(owner.incarnation)
    if steps is None:
        return UNKNOWN if hangs else None
    stuck = hangs or ends or (bool(steps.under_way) and now - steps.began > STUCK_SECONDS)
    counts = stuck and not steps.leaving and (steps.under_way or steps.anybody)
    return dataclasses.replace(steps, compiling=frozenset()) if counts else None
