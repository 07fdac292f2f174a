# SPDX-License-Identifier: Apache-2.0
"""The history of moves, so that the next pass does not undo, repeat or exaggerate them.

- A move counts in the load of both ends from its beginning until each has sent a status made after its end.
- Nothing moves back between two instances for the pair's cool-down, and nothing further forwards for one interval.
- A request that moved to balance load stays for its cool-down.
- A request that is too long for a destination is not offered to it again; others are.
- A destination that refused or failed is avoided, twice as long each time. One that a source could not reach is avoided
  by that source, and by all once a second source reports the same.

All times are seconds of one clock. `forget_expired` drops expired entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace

from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.status import Cargo
from llumsched.rescheduling.planning.moves import Move, Purpose
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig

_MOST_DOUBLINGS = 5
_MISFIT_S = 600.0
"""Time for which a request counts as too long for a destination, as requests end."""


@dataclass(slots=True)
class _Unsettled:
    """A move that some instance's load does not show yet."""

    move: Move
    ended_s: float | None = None
    unseen: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Strikes:
    until_s: float
    in_a_row: int


class History:
    def __init__(self, config: ReschedulingConfig) -> None:
        self._config = config
        self._unsettled: dict[int, _Unsettled] = {}
        self._no_return_s: dict[tuple[str, str], float] = {}
        """(source, destination) -> time from which it may be used again."""
        self._requests: dict[str, dict[str, float]] = {}
        """Instance -> request that moved there -> time from which it may move on."""
        self._misfits: dict[str, dict[str, float]] = {}
        """Destination -> request that does not fit it -> time until which this is remembered."""
        self._destinations: dict[str, _Strikes] = {}
        self._sources: dict[str, _Strikes] = {}
        self._links: dict[str, dict[str, float]] = {}
        """Destination -> source that could not reach it -> time from which it may try again."""
        self._dealt: Counter[str] = Counter()
        self._bytes = self._seconds = 0.0

    def copy(self) -> History:
        """An independent copy."""
        return deepcopy(self, {id(self._config): self._config})

    # Asked by the planner

    @property
    def link_bytes_per_s(self) -> float:
        """Speed of recent moves; before the first one, the configured speed."""
        return self._bytes / self._seconds if self._bytes and self._seconds else self._config.link_bytes_per_s

    def pending(self) -> dict[str, Cargo]:
        """Coming (positive) or leaving load by instance that its status does not show yet. Most of it decodes."""
        pending: dict[str, Cargo] = {}
        for entry in self._unsettled.values():
            move = entry.move
            for instance_id, sign in ((move.source, -1.0), (move.destination, 1.0)):
                if instance_id in entry.unseen:
                    known = pending.get(instance_id, Cargo(0.0, 0.0))
                    pending[instance_id] = Cargo(
                        known.requests + sign * move.expected_requests, known.tokens + sign * move.expected_tokens
                    )
        return pending

    def pending_moves(self) -> list[Move]:
        """Moves that are running, or not yet in the status of both ends."""
        return [entry.move for entry in self._unsettled.values()]

    def open_moves(self) -> list[Move]:
        return [entry.move for entry in self._unsettled.values() if entry.ended_s is None]

    def avoided_destinations(self, now_s: float) -> set[str]:
        """Destinations that no source should use now."""
        return {name for name in self._destinations.keys() | self._links.keys() if self._is_avoided(name, now_s)}

    def _is_avoided(self, destination: str, now_s: float) -> bool:
        if self._destinations.get(destination, _NEVER).until_s > now_s:
            return True
        return sum(until_s > now_s for until_s in self._links.get(destination, {}).values()) > 1

    def obstacle(self, source: str, destination: str, now_s: float) -> str:
        """The reason not to use the pair now; "" if there is none."""
        if self._is_avoided(destination, now_s) or self._links.get(destination, {}).get(source, 0.0) > now_s:
            return "destination_avoided"
        if self._no_return_s.get((source, destination), 0.0) > now_s:
            return "pair_cooling"
        return ""

    def source_avoided(self, source: str, now_s: float) -> bool:
        return self._sources.get(source, _NEVER).until_s > now_s

    def cooling_requests(self, instance_id: str, now_s: float) -> set[str]:
        """Requests of the instance that moved there recently."""
        return {request for request, until_s in self._requests.get(instance_id, {}).items() if until_s > now_s}

    def left_out(self, move: Move, now_s: float) -> set[str]:
        """Requests of the source that must not be asked for: they came recently, or do not fit the destination."""
        known = self._misfits.get(move.destination, {})
        misfits = {request for request, until_s in known.items() if until_s > now_s}
        return self.cooling_requests(move.source, now_s) | misfits

    def dealt(self, source: str) -> int:
        """Moves away from a failing source so far, which give the next destination in turn."""
        return self._dealt[source]

    # Told by the executor

    def began(self, number: int, move: Move, now_s: float) -> None:
        self._unsettled[number] = _Unsettled(move, None, {move.source, move.destination})
        self._rest(move, now_s)
        if move.purpose is Purpose.FAILOVER:
            self._dealt[move.source] += 1

    def sized(self, number: int, tokens: float, requests: float) -> None:
        """Notes the actual size of a selection at the source."""
        entry = self._unsettled.get(number)
        if entry is not None:
            entry.move = replace(entry.move, expected_tokens=tokens, expected_requests=requests)

    def ended(self, number: int, now_s: float) -> None:
        entry = self._unsettled.get(number)
        if entry is not None:
            entry.ended_s = now_s
            self._rest(entry.move, now_s)

    def moved(self, destination: str, request_id: str, now_s: float) -> None:
        self._requests.setdefault(destination, {})[request_id] = now_s + self._config.request_cooldown_s

    def does_not_fit(self, destination: str, request_id: str, now_s: float) -> None:
        self._misfits.setdefault(destination, {})[request_id] = now_s + _MISFIT_S

    def copied(self, num_bytes: float, seconds: float) -> None:
        """Measures the copy of one request. Older measurements count less."""
        if num_bytes > 0 and seconds > 0:
            self._bytes, self._seconds = self._bytes * 0.9 + num_bytes, self._seconds * 0.9 + seconds

    def destination_failed(self, destination: str, now_s: float, *, briefly: bool = False) -> None:
        """Notes a destination that refused or did not answer. `briefly`: it is only busy."""
        if briefly:
            until_s = now_s + min(1.0, self._config.avoid_s)
            before = self._destinations.get(destination, _NEVER)
            self._destinations[destination] = _Strikes(max(until_s, before.until_s), before.in_a_row)
        else:
            self._strike(self._destinations, destination, now_s, self._config.avoid_s)

    def link_failed(self, source: str, destination: str, now_s: float) -> None:
        self._links.setdefault(destination, {})[source] = now_s + self._config.avoid_s

    def source_failed(self, source: str, now_s: float) -> None:
        self._strike(self._sources, source, now_s, self._config.avoid_s)

    def source_gave_nothing(self, source: str, now_s: float) -> None:
        """Notes a source of which no request could move, for no fault: it is asked less and less often."""
        self._strike(self._sources, source, now_s, self._config.interval_ms / 1000)

    def succeeded(self, move: Move) -> None:
        self._sources.pop(move.source, None)
        self._destinations.pop(move.destination, None)
        self._links.pop(move.destination, None)

    # Told by the view

    def seen(self, instances: Iterable[Instance]) -> None:
        """Drops what the newest statuses show."""
        if not self._unsettled:
            return
        as_of_s = {instance.id: instance.as_of_s for instance in instances}
        for number, entry in list(self._unsettled.items()):
            if entry.ended_s is None:
                continue
            entry.unseen = {id_ for id_ in entry.unseen if as_of_s.get(id_, entry.ended_s + 1) <= entry.ended_s}
            if not entry.unseen:
                del self._unsettled[number]

    def instance_left(self, instance_id: str) -> None:
        """Forgets an instance: a later one with this id is new."""
        for known in (self._destinations, self._sources, self._links, self._requests, self._misfits, self._dealt):
            known.pop(instance_id, None)

    def forget_expired(self, now_s: float) -> None:
        self._no_return_s = {pair: until_s for pair, until_s in self._no_return_s.items() if until_s > now_s}
        for tables in (self._requests, self._misfits, self._links):
            for key, table in list(tables.items()):
                tables[key] = {name: until_s for name, until_s in table.items() if until_s > now_s}
                if not tables[key]:
                    del tables[key]
        for strikes in (self._destinations, self._sources):
            for name, strike in list(strikes.items()):
                # How often in a row is remembered for as long again.
                if strike.until_s + self._config.avoid_s * 2**strike.in_a_row < now_s:
                    del strikes[name]

    def _rest(self, move: Move, now_s: float) -> None:
        forwards, back = (move.source, move.destination), (move.destination, move.source)
        self._no_return_s[forwards] = now_s + self._config.interval_ms / 1000
        self._no_return_s[back] = now_s + self._config.pair_cooldown_s

    def _strike(self, strikes: dict[str, _Strikes], name: str, now_s: float, first_s: float) -> None:
        before = strikes.get(name, _NEVER)
        until_s = max(now_s + first_s * 2**before.in_a_row, before.until_s)
        strikes[name] = _Strikes(until_s, min(before.in_a_row + 1, _MOST_DOUBLINGS))


_NEVER = _Strikes(0.0, 0)
