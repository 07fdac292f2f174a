# SPDX-License-Identifier: Apache-2.0
"""Requests that no instance takes now: who must have its first token soonest is asked for first.

One queue for each model: where there is no place for one, there may be some for another. Of a queue only the first few
are asked for in a round, one after the other, so that a scheduler has no more to do the longer it is. A request whose
deadline is past has no more to lose by waiting: it stands behind all that can still meet theirs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from llumlet.tasks import cancel
from llumsched.gateway.backends import Backend
from llumsched.gateway.placement import Placed
from llumsched.gateway.scheduler_client import NoEndpoint, NotInTime
from llumsched.request import Request

_IN_VAIN: Final = 4
"""Requests in a row for which a round finds no place: the next ones hardly find any."""


@dataclass(eq=False, slots=True)
class Waiting:
    asked: Request
    excluded: Collection[Backend]
    shunned: Collection[Backend]
    since_s: float
    """When it was to be placed first."""
    until_s: float
    """When it waits no longer for there to be an instance."""
    in_time_until_s: float = -math.inf
    """When it waits no longer for one that meets its objectives; never before: it does not wait for that."""
    is_shed: bool = False
    """Whether it is refused then, rather than placed where its objectives are missed."""
    reason: NoEndpoint | None = None
    """Why it was refused last."""
    place: asyncio.Future[Placed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def deadline_s(self) -> float:
        """When it must have its first token."""
        asked = self.asked
        return self.since_s + (asked.ttft_slo_ms - asked.waited_ms) / 1e3 if asked.ttft_slo_ms else math.inf

    def is_over(self, now_s: float) -> bool:
        """Whether it waits no longer, by the reason why it was refused last."""
        return now_s >= (self.in_time_until_s if isinstance(self.reason, NotInTime) else self.until_s)

    def turn(self, now_s: float) -> tuple[int, bool, float, float]:
        """Who has less comes first."""
        return self.asked.priority, self.deadline_s <= now_s, self.deadline_s, self.since_s


class Queues:
    def __init__(
        self,
        place: Callable[[Waiting], Awaitable[Placed]],
        give_back: Callable[[Placed], None],
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`place` raises NoEndpoint for who is to wait on; whatever else it raises ends the waiting. `give_back`: a
        place that nobody wants any more. `interval_s`: between two rounds."""
        self._place, self._give_back, self._interval_s, self._clock = place, give_back, interval_s, clock
        self._of_model: dict[str, set[Waiting]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_model.values()))

    def has(self, model: str) -> bool:
        """Whether requests for this model wait: who comes now has its turn among them."""
        return bool(self._of_model.get(model))

    def longest_wait_s(self, model: str) -> float:
        """How long those have waited who have waited longest for this model."""
        now_s = self._clock()
        return max((now_s - one.since_s for one in self._of_model.get(model, ())), default=0.0)

    async def wait(self, waiting: Waiting) -> Placed:
        """A place. Raises what `place` raises; NoEndpoint if there was none in time."""
        model = waiting.asked.model
        queue = self._of_model.setdefault(model, set())
        queue.add(waiting)
        if model not in self._serving:
            self._serving[model] = asyncio.create_task(self._serve(model, queue))
        try:
            return await waiting.place
        finally:
            queue.discard(waiting)

    async def close(self) -> None:
        await cancel(*self._serving.values())

    async def _serve(self, model: str, queue: set[Waiting]) -> None:
        try:
            while queue:
                await self._round(queue)
                await asyncio.sleep(self._interval_s)
        finally:
            del self._of_model[model], self._serving[model]

    async def _round(self, queue: set[Waiting]) -> None:
        now_s = self._clock()
        in_vain = 0
        for waiting in sorted(queue, key=lambda one: one.turn(now_s)):
            if in_vain < _IN_VAIN or waiting.is_over(now_s):
                in_vain += not await self._try(waiting, now_s)

    async def _try(self, waiting: Waiting, now_s: float) -> bool:
        """Whether its waiting is over."""
        place = waiting.place
        if place.done():
            return True
        try:
            placed = await self._place(waiting)
        except NoEndpoint as error:
            waiting.reason = error
            if not waiting.is_over(now_s):
                return False
            _fail(place, error)
        except Exception as error:  # noqa: BLE001 - who waits for the place is to know
            _fail(place, error)
        else:
            if place.done():
                self._give_back(placed)
            else:
                place.set_result(placed)
        return True


def _fail(place: asyncio.Future[Placed], error: Exception) -> None:
    if not place.done():
        place.set_exception(error)
