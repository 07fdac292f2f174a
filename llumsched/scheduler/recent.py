# SPDX-License-Identifier: Apache-2.0
"""Shares of the last minute, for display: requests that met their objectives, cached tokens."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from llumsched.contract import Attained

WINDOW_S: Final = 60.0
_MOST_GATEWAYS: Final = 10_000


class Share(NamedTuple):
    part: float = 0
    whole: float = 0

    def __add__(self, other: object) -> Share:
        if not isinstance(other, Share):
            return NotImplemented
        return Share(self.part + other.part, self.whole + other.whole)

    def __sub__(self, other: Share) -> Share:
        return Share(self.part - other.part, self.whole - other.whole)


NOTHING: Final = Share()


class RecentShares:
    """Sums by name over the last minute, to a second. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, dict[str, Share]]] = deque()
        """Sums of each second, the newest last."""

    def add(self, name: str, share: Share) -> None:
        second = int(self._clock())
        self._forget()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}))
        added = self._seconds[-1][1]
        added[name] = added.get(name, NOTHING) + share

    def sums(self) -> dict[str, Share]:
        self._forget()
        found: defaultdict[str, Share] = defaultdict(Share)
        for _, added in self._seconds:
            for name, share in added.items():
                found[name] += share
        return dict(found)

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_S
        while self._seconds and self._seconds[0][0] < oldest:
            self._seconds.popleft()


class Attainment:
    """Requests with objectives that met them, by model, over all gateways."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._recent = RecentShares(clock)
        self._gateways: OrderedDict[str, Mapping[str, Share]] = OrderedDict()
        """Each gateway's report, by model."""

    def told(self, gateway_id: str, models: list[Attained]) -> None:
        """Takes a gateway's counts since its start. The first report of a gateway only sets the base for its later
        ones."""
        now = {one.model: Share(one.num_met, one.num_met + one.num_missed) for one in models}
        before = self._gateways.pop(gateway_id, None)
        if len(self._gateways) >= _MOST_GATEWAYS:
            self._gateways.popitem(last=False)
        self._gateways[gateway_id] = now
        if before is None:
            return
        for model, share in now.items():
            ended = share - before.get(model, NOTHING)
            if ended.whole > 0 and 0 <= ended.part <= ended.whole:
                self._recent.add(model, ended)

    def sums(self) -> dict[str, Share]:
        """Requests of the last minute that met their objectives, and all of them, by model."""
        return self._recent.sums()
