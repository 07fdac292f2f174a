# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets the request of a lost one, and how many are on their way to each.

When an engine dies, all its streams ask at once. Each API server has its own only, and a view of the others' load that
is seconds old; so nobody picks "the best" engine, which all would pick. An API server gives every engine a share of
what it sends that is proportional to the room there, and a hash decides where a share begins: weighted rendezvous
hashing, by which API servers that know nothing of each other spread what they send. Only for what an engine has cached
of a request it is preferred, and only as long as that outweighs what it was sent beyond others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

IN_FLIGHT = 8
"""Attempts of one API server at one engine at a time: enough to keep its helper threads busy."""
SENT_SECONDS = 10.0
"""How long what was sent is counted: what the CMS says of the load is by then newer than that."""
SHUN_SECONDS = 2.0
"""How long an engine that did not take a request is asked after all others."""
_NOTHING: Mapping[str, int] = {}


class Placement:
    """Requests on their way to engines, of one API server process. `come` says who may go since it was last asked."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = defaultdict(_Engine)
        self._visits: dict[str, _Visit] = {}
        """Visits by request: on its way, or waiting for a place."""
        self._come: list[str] = []

    def ranked(
        self, request_id: str, num_tokens: int, addresses: Sequence[str], room: Mapping[str, int], now: float
    ) -> list[str]:
        """The engines, whom to ask first at the head. `room` is what is known of the free KV cache by address, in
        tokens; who is not in it counts as one with the usual room."""
        usual = sum(room.values()) / len(room) if room else 1.0

        def key(address: str) -> tuple[bool, float]:
            # Of exponential variates divided by the rooms, each is the least with a probability proportional to its
            # room. As soon as something was sent, that outweighs them.
            share = self._num_sent(address, now) + num_tokens * _exponential(address, request_id)
            return self._is_shunned(address, now), share / max(1.0, room.get(address, usual))

        return sorted(addresses, key=key)

    def choose(
        self,
        request_id: str,
        num_tokens: int,
        addresses: Sequence[str],
        room: Mapping[str, int],
        now: float,
        cached: Mapping[str, int] = _NOTHING,
    ) -> str:
        """Whom to ask, of at least one: the first by rank, unless another one has more of the tokens `cached`, by more
        than it was sent beyond the first. So those that begin alike do not all go to who had their prefix first."""
        first = self.ranked(request_id, num_tokens, addresses, room, now)[0]
        sent_to_first = self._num_sent(first, now)

        def saved(address: str) -> int:
            """Tokens that it need not compute, less what it was sent beyond the first."""
            if self._is_shunned(address, now) or room.get(address, num_tokens) < num_tokens:
                return 0
            return cached.get(address, 0) - max(self._num_sent(address, now) - sent_to_first, 0)

        return max([first, *(address for address in addresses if address in cached)], key=saved)

    def _num_sent(self, address: str, now: float) -> int:
        return self._engines[address].num_tokens_since(now - SENT_SECONDS)

    def _is_shunned(self, address: str, now: float) -> bool:
        return now < self._engines[address].shunned_until

    def enter(self, request_id: str, address: str, num_tokens: int, now: float) -> None:
        """The request goes to `address` as soon as there is a place; its tokens count there from now on."""
        engine = self._engines[address]
        self._visits[request_id] = _Visit(address, num_tokens, now)
        engine.num_tokens_coming += num_tokens
        engine.waiting.append(request_id)
        self._let_in(engine)

    def is_stale(self, request_id: str) -> bool:
        """Whether the engine has turned others down since it was chosen: better choose again."""
        visit = self._visits[request_id]
        return self._engines[visit.address].shunned_at > visit.chosen_at

    def address_of(self, request_id: str) -> str:
        """The llumlet to which the request goes."""
        return self._visits[request_id].address

    def shun(self, address: str, now: float) -> None:
        """Has an engine left alone that is no good for any request at the moment."""
        engine = self._engines[address]
        engine.shunned_at = now
        engine.shunned_until = now + SHUN_SECONDS

    def leave(self, request_id: str, *, taken: bool, now: float) -> None:
        """The request is not on its way any more; `taken`: it is there. Leaving without having entered is nothing."""
        visit = self._visits.pop(request_id, None)
        if visit is None:
            return
        engine = self._engines[visit.address]
        engine.num_tokens_coming -= visit.num_tokens
        if request_id in engine.inside:
            engine.inside.remove(request_id)
        else:
            engine.waiting.remove(request_id)
        if taken:
            engine.note_sent(now, visit.num_tokens)
        self._let_in(engine)

    def come(self) -> list[str]:
        """Requests whose turn it is to go where they have been sent."""
        come, self._come = [request_id for request_id in self._come if request_id in self._visits], []
        return come

    def _let_in(self, engine: _Engine) -> None:
        while engine.waiting and len(engine.inside) < IN_FLIGHT:
            request_id = engine.waiting.popleft()
            engine.inside.add(request_id)
            self._come.append(request_id)


@dataclasses.dataclass(frozen=True, slots=True)
class _Visit:
    address: str
    num_tokens: int
    chosen_at: float


@dataclasses.dataclass(eq=False, slots=True)
class _Engine:
    inside: set[str] = dataclasses.field(default_factory=set)
    """Requests that are on their way there."""
    waiting: deque[str] = dataclasses.field(default_factory=deque)
    """Requests for which there is no place yet, the first comer first."""
    num_tokens_coming: int = 0
    """Tokens of both."""
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
