# SPDX-License-Identifier: Apache-2.0
"""Requests that no instance takes now, and the order in which they are tried again.

Each model has its own queue, as one model may have room when another has none. A round asks for a few requests of a
queue, so that the scheduler's work does not grow with the queue.

The order: lower `priority` first; then requests that can still meet their deadline; then the API key that got the
fewest tokens from the queue so far (fairness); then the earliest deadline. Without an objective for the first token,
the deadline is the end of the wait. In the last quarter of its wait a request counts as one of the most urgent
(ageing).

A refusal says nothing about requests that need less (`Waiting.needs_as_much_as`), so a request whose objectives no
instance can meet does not delay them.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from llumlet.process.tasks import cancel
from llumsched.gateway.backends import Backend
from llumsched.gateway.errors import Overloaded
from llumsched.gateway.placement import Placed
from llumsched.gateway.scheduler_client import NoEndpoint, NotInTime
from llumsched.request import Request

_IN_VAIN: Final = 4
"""Refusals in a round after which requests that need at least as much are skipped. As many others, untried for the
longest time, are tried then, since a refusal may be wrong about them."""
_MOST_IN_VAIN: Final = 12
"""Refusals in a round that end its order."""
_REQUEST_TOKENS: Final = 64
"""Tokens counted per request, beside its prompt, for fairness between keys."""
_AGED_SHARE: Final = 0.75
"""Share of its wait after which a request counts as one of the most urgent."""


@dataclass(eq=False, slots=True)
class Waiting:
    asked: Request
    excluded: Collection[Backend]
    shunned: Collection[Backend]
    since_s: float
    """Time when it was first to be placed."""
    until_s: float
    """Deadline for finding any instance."""
    key: str = ""
    """Name of its client's API key."""
    in_time_until_s: float = -math.inf
    """Deadline for finding an instance that meets the objectives; -inf if it does not wait for one."""
    is_shed: bool = False
    """True if it is refused at that deadline rather than placed where it misses its objectives."""
    reason: NoEndpoint | None = None
    """The last refusal."""
    asked_s: float = -math.inf
    """Time when a round last asked for it."""
    place: asyncio.Future[Placed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def deadline_s(self) -> float:
        """Deadline of the first token; without such an objective, the end of the wait."""
        asked = self.asked
        return self.since_s + (asked.ttft_slo_ms - asked.waited_ms) / 1e3 if asked.ttft_slo_ms else self.end_s

    @property
    def end_s(self) -> float:
        """End of the wait, which depends on the last refusal."""
        return self.in_time_until_s if isinstance(self.reason, NotInTime) else self.until_s

    @property
    def num_tokens(self) -> int:
        return self.asked.prompt_num_tokens + _REQUEST_TOKENS

    @property
    def share(self) -> tuple[str, str]:
        """Key and model, between which a full queue is shared."""
        return self.key, self.asked.model

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.end_s

    def has_aged(self, now_s: float) -> bool:
        return now_s >= self.since_s + _AGED_SHARE * (self.end_s - self.since_s)

    def is_late(self, now_s: float) -> bool:
        return self.deadline_s <= now_s

    def needs_as_much_as(self, other: Waiting) -> bool:
        """True if a refusal of the other request implies one of this: its prompt is as long, its objectives are as
        tight, and it may use no further instance. A prompt with another beginning may be cached and thus be in time."""
        mine, its = self.asked, other.asked
        return (
            mine.prompt_num_tokens >= its.prompt_num_tokens
            and (mine.ttft_slo_ms or math.inf) <= (its.ttft_slo_ms or math.inf)
            and (mine.tpot_slo_ms or math.inf) <= (its.tpot_slo_ms or math.inf)
            and (not isinstance(other.reason, NotInTime) or mine.prompt_blocks.startswith(its.prompt_blocks))
            and {*self.excluded, *self.shunned}.issuperset((*other.excluded, *other.shunned))
        )

    def stands_before(self, newcomer: Waiting, now_s: float) -> bool:
        """True if a newcomer is not tried at once because this request, which needs no more, was refused."""
        is_behind = isinstance(self.reason, NotInTime) and self.is_late(now_s)
        return not is_behind and newcomer.needs_as_much_as(self)


@dataclass(eq=False, slots=True)
class _Queue:
    """The waiting requests of one model."""

    waiting: set[Waiting] = field(default_factory=set)
    served: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Tokens of the placed requests by key. A new key begins with the least of the others."""

    def add(self, newcomer: Waiting) -> None:
        keys = {one.key for one in self.waiting}
        if newcomer.key not in keys:
            least = min((self.served[key] for key in keys), default=0)
            self.served[newcomer.key] = max(self.served[newcomer.key], least)
        self.waiting.add(newcomer)

    def in_turn(self, now_s: float) -> Iterator[Waiting]:
        best = min((one.asked.priority for one in self.waiting), default=0)

        def rank(one: Waiting) -> tuple[int, bool]:
            return best if one.has_aged(now_s) else one.asked.priority, one.is_late(now_s)

        ordered = sorted(self.waiting, key=lambda one: (*rank(one), one.deadline_s, one.since_s))
        for _, equals in groupby(ordered, key=rank):
            yield from self._shared(equals)

    def _shared(self, ordered: Iterable[Waiting]) -> Iterator[Waiting]:
        """Reorders requests so that keys take turns by the tokens that they got so far."""
        of_key = defaultdict[str, list[Waiting]](list)
        for one in ordered:
            of_key[one.key].append(one)
        turns = [(self.served[key], number, iter(own)) for number, (key, own) in enumerate(of_key.items())]
        heapq.heapify(turns)
        while turns:
            given, number, own = turns[0]
            if (first := next(own, None)) is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (given + first.num_tokens, number, own))
                yield first


class Queues:
    def __init__(
        self,
        place: Callable[[Waiting], Awaitable[Placed]],
        give_back: Callable[[Placed], None],
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`place` raises NoEndpoint to keep a request waiting; other exceptions fail it. `give_back` takes a place that
        is not needed any more. `interval_s`: time between two rounds."""
        self._place, self._give_back, self._interval_s, self._clock = place, give_back, interval_s, clock
        self._of_model: dict[str, _Queue] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._of_model.values())

    def holds_up(self, newcomer: Waiting) -> bool:
        """True if a newcomer must wait for its turn in the queue."""
        queue, now_s = self._of_model.get(newcomer.asked.model), self._clock()
        return queue is not None and any(one.stands_before(newcomer, now_s) for one in queue.waiting)

    def longest_wait_s(self, model: str) -> float:
        """The longest wait of the present requests for this model, in seconds."""
        now_s, queue = self._clock(), self._of_model.get(model, _Queue())
        return max((now_s - one.since_s for one in queue.waiting), default=0.0)

    def make_room(self, newcomer: Waiting) -> bool:
        """Refuses the last request of the key and model with the most requests, if they have at least two more than the
        newcomer's. Returns True if it did."""
        now_s = self._clock()
        waiting = [one for queue in self._of_model.values() for one in queue.waiting if not one.place.done()]
        num_waiting = Counter(one.share for one in waiting)
        most = max(num_waiting, key=num_waiting.__getitem__, default=newcomer.share)
        if num_waiting[most] < num_waiting[newcomer.share] + 2:
            return False
        last = max(
            (one for one in waiting if one.share == most),
            key=lambda one: (one.asked.priority, one.is_late(now_s), one.deadline_s, one.since_s),
        )
        _fail(last.place, Overloaded("Too many requests of this key wait for an instance.", retry_after_s=1))
        return True

    async def wait(self, waiting: Waiting) -> Placed:
        """Waits for a place. Raises the errors of `place`; NoEndpoint if none came in time; Overloaded if it made room
        for another key."""
        model = waiting.asked.model
        queue = self._of_model.setdefault(model, _Queue())
        queue.add(waiting)
        if model not in self._serving:
            self._serving[model] = asyncio.create_task(self._serve(model, queue))
        try:
            return await waiting.place
        finally:
            queue.waiting.discard(waiting)

    async def close(self) -> None:
        await cancel(*self._serving.values())

    async def _serve(self, model: str, queue: _Queue) -> None:
        try:
            while queue.waiting:
                await self._round(queue)
                await asyncio.sleep(self._interval_s)
        finally:
            del self._of_model[model], self._serving[model]

    async def _round(self, queue: _Queue) -> None:
        now_s = self._clock()
        refused: list[Waiting] = []
        for waiting in list(queue.in_turn(now_s)):
            is_worth_it = len(refused) < _MOST_IN_VAIN and _may_find_a_place(waiting, refused)
            if (is_worth_it or waiting.is_over(now_s)) and not await self._try(queue, waiting, now_s):
                refused.append(waiting)
        if len(refused) >= _IN_VAIN:
            not_asked = [one for one in queue.waiting if one.asked_s < now_s and not one.place.done()]
            for waiting in sorted(not_asked, key=lambda one: one.asked_s)[:_IN_VAIN]:
                await self._try(queue, waiting, now_s)

    async def _try(self, queue: _Queue, waiting: Waiting, now_s: float) -> bool:
        """Tries to place a request. True if its waiting is over."""
        place = waiting.place
        if place.done():
            return True
        waiting.asked_s = now_s
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
                queue.served[waiting.key] += waiting.num_tokens
        return True


def _may_find_a_place(waiting: Waiting, refused: Iterable[Waiting]) -> bool:
    return sum(waiting.needs_as_much_as(one) for one in refused) < _IN_VAIN


def _fail(place: asyncio.Future[Placed], error: Exception) -> None:
    if not place.done():
        place.set_exception(error)
