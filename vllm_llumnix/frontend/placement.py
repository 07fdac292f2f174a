# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets the request of a lost one, and how many are on their way to each.

When an engine dies, all its streams ask at once. Each API server has its own only, and a view of the others' load that
is seconds old; so nobody picks "the best" engine, which all would pick. An API server gives every engine a share of
what it sends that is proportional to the room there, and a hash decides where a share begins: weighted rendezvous
hashing, by which API servers that know nothing of each other spread what they send.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

IN_FLIGHT = 8
"""Attempts of one API server at one engine at a time: enough to keep its helper threads busy."""
SENT_SECONDS = 10.0
"""How long what was sent is counted: what the CMS says of the load is by then newer than that."""
SHUN_SECONDS = 2.0
"""How long an engine that did not take a request is asked after all others."""


class Placement:
    """Of one API server process, on its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._destinations: dict[str, _Destination] = defaultdict(_Destination)

    def choose(self, request_id: str, num_tokens: int, addresses: Sequence[str], room: Mapping[str, int]) -> str:
        """Whom to ask, of at least one. `room` is what is known of the free KV cache by address, in tokens; who is not
        in it counts as one with the usual room."""
        now = self._clock()
        usual = sum(room.values()) / len(room) if room else 1.0

        def key(address: str) -> tuple[bool, float]:
            destination = self._destinations[address]
            sent = destination.num_tokens_since(now - SENT_SECONDS)
            # Of exponential variates divided by the rooms, each is the least with a probability proportional to its
            # room. As soon as something was sent, that outweighs them.
            share = sent + num_tokens * _exponential(address, request_id)
            return now < destination.shunned_until, share / max(1.0, room.get(address, usual))

        return min(addresses, key=key)

    def turn(self, address: str, num_tokens: int) -> Turn:
        """To be entered (`async with`) by who goes to `address` with so many tokens."""
        return Turn(self._destinations[address], num_tokens, self._clock)


class Turn:
    """One request's turn at a destination. Its tokens count there from now on, and while it waits for its turn."""

    def __init__(self, destination: _Destination, num_tokens: int, clock: Callable[[], float]) -> None:
        self._destination = destination
        self._num_tokens = num_tokens
        self._clock = clock
        self._chosen_at = clock()
        self.taken = False
        """To be set when the destination has the request."""

    @property
    def is_stale(self) -> bool:
        """Whether the destination has turned others down since it was chosen: better choose again."""
        return self._destination.shunned_at > self._chosen_at

    def shun(self) -> None:
        """It is no good for any request at the moment."""
        self._destination.shunned_at = now = self._clock()
        self._destination.shunned_until = now + SHUN_SECONDS

    async def __aenter__(self) -> Self:
        self._destination.num_tokens_coming += self._num_tokens
        try:
            await self._destination.places.acquire()
        except BaseException:
            self._destination.num_tokens_coming -= self._num_tokens
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._destination.places.release()
        self._destination.num_tokens_coming -= self._num_tokens
        if self.taken:
            self._destination.note_sent(self._clock(), self._num_tokens)


@dataclasses.dataclass(eq=False, slots=True)
class _Destination:
    places: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(IN_FLIGHT))
    num_tokens_coming: int = 0
    """Of requests that are on their way or wait for their turn."""
    shunned_at: float = -math.inf
    shunned_until: float = -math.inf
    _sent: deque[tuple[float, int]] = dataclasses.field(default_factory=deque)
    _num_tokens_sent: int = 0

    def note_sent(self, now: float, num_tokens: int) -> None:
        self._sent.append((now, num_tokens))
        self._num_tokens_sent += num_tokens

    def num_tokens_since(self, then: float) -> int:
        while self._sent and self._sent[0][0] < then:
            self._num_tokens_sent -= self._sent.popleft()[1]
        return self.num_tokens_coming + self._num_tokens_sent


def _exponential(address: str, request_id: str) -> float:
    """Exponentially distributed with mean 1, and always the same for these two."""
    drawn = hashlib.blake2b(f"{address} {request_id}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(drawn, "big") + 1) / (2**64 + 1))
