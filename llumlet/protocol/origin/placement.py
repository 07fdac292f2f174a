# SPDX-License-Identifier: Apache-2.0
"""Distributes the requests of a lost engine over others, and limits how many are on their way to each.

When an engine dies, all its streams look for another at once. An API server knows only its own and has loads that are
seconds old, so picking "the best" engine would send all to the same. Instead each engine gets a share proportional to
its room, and a hash decides where a share begins (weighted rendezvous hashing), so that independent API servers spread
their requests. An engine with cached tokens of a request is preferred only while these outweigh its surplus of sent
tokens.
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
"""Time for which sent requests count, until the CMS's load includes them."""
SHUN_SECONDS = 2.0
"""Time for which an engine that refused a request is asked last."""
_NOTHING: Mapping[str, int] = {}


class Placement:
    """Requests on their way to engines, of one API server process. `come` names those that may go since the last
    call."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = defaultdict(_Engine)
        self._visits: dict[str, _Visit] = {}
        """Visits by request: on its way, or waiting for a place."""
        self._come: list[str] = []

    def ranked(
        self, request_id: str, num_tokens: int, addresses: Sequence[str], room: Mapping[str, int], now: float
    ) -> list[str]:
        """The engines in the order in which to ask. `room`: known free KV cache tokens by address; an unknown engine
        counts as having the usual room."""
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
        """Chooses an engine, of at least one: the first by rank, unless another has more of the tokens `cached` by more
        than its surplus of sent tokens. So requests with a common prefix do not all go to its first holder."""
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
        """True if the engine has refused others since it was chosen, so that a new choice is better."""
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
        """Requests that may go to their chosen engines now."""
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
