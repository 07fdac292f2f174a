# SPDX-License-Identifier: Apache-2.0
"""The waiting requests of one engine, and what they add up to."""

from __future__ import annotations

import enum
from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from llumsched.latency.fitting import pairs
from llumsim import PS
from llumsim.engine.requests import EngineRequest

_LOOK_PS: Final = PS
"""Interval of checks for requests that have waited for long."""
_UNALLOCATED: Final = 3
"""Place of the unallocated tokens in a request's share."""


class QueuePlace(enum.Enum):
    """The place of a request in the queue, unless priorities decide it."""

    FIRST = enum.auto()
    IN_TURN = enum.auto()
    LAST = enum.auto()


class Queue:
    """Requests in the order of their first arrival at any engine, or by priority, then arrival."""

    def __init__(self, *, by_priority: bool, ageing_ps: int = 0) -> None:
        self.num_to_decode = 0
        """Requests whose work does not end with their first token."""
        self.to_decode_tokens = 0
        self.prefill_tokens = 0
        """Tokens of which the KV cache is still to be computed."""
        self.unallocated_tokens = 0
        """Tokens of which the blocks are still to be allocated."""
        self.prefill_pairs = 0
        """Pairs of a query and a key in the prefills."""
        self.num_urgent = 0
        self._requests: deque[EngineRequest] | list[EngineRequest] = [] if by_priority else deque()
        self._ageing_ps = ageing_ps if by_priority else 0
        self._look_ps = 0
        self._shares: dict[EngineRequest, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._requests)

    @property
    def head(self) -> EngineRequest:
        return self._requests[0]

    @property
    def first_unallocated_tokens(self) -> int:
        """The head's part of `unallocated_tokens`; 0 for an empty queue."""
        return self._shares[self.head][_UNALLOCATED] if self._requests else 0

    def push(
        self,
        request: EngineRequest,
        num_cached: int,
        num_shared: int,
        place: QueuePlace = QueuePlace.IN_TURN,
    ) -> None:
        """`num_cached`: tokens that the prefix cache holds now; `num_shared`: of them, in blocks that others hold."""
        uncomputed = request.num_tokens - num_cached
        decodes = int((request.max_tokens > 1 or uncomputed == 1) and not request.is_moving)
        uncomputed = uncomputed if uncomputed > 1 else 0
        work = pairs(request.num_tokens - uncomputed, uncomputed)
        unallocated = request.num_tokens - num_shared
        share = decodes, request.num_tokens * decodes, uncomputed, unallocated, work, int(request.is_urgent)
        self._shares[request] = share
        self._add(share, 1)
        if isinstance(self._requests, list):
            insort(self._requests, request, key=attrgetter("order"))
        elif place is QueuePlace.FIRST:
            self._requests.appendleft(request)
        elif place is QueuePlace.LAST:
            self._requests.append(request)
        else:
            turn, index = request.turn, len(self._requests)
            for other in reversed(self._requests):
                if other.turn <= turn:
                    break
                index -= 1
            self._requests.insert(index, request)

    def age(self, now_ps: int) -> None:
        """Raise requests that arrived long enough ago to the best priority in the queue, if priorities count, like
        production's `Ageing`."""
        if not self._ageing_ps or not self._requests or now_ps < self._look_ps:
            return
        self._look_ps = now_ps + _LOOK_PS
        best, latest_ps = self.head.priority, now_ps - self._ageing_ps
        for request in [one for one in self._requests if one.priority > best and one.arrived_ps < latest_ps]:
            self._requests.remove(request)
            request.priority = best
            insort(self._requests, request, key=attrgetter("order"))

    def remove(self, request: EngineRequest) -> None:
        self._requests.remove(request)
        self._add(self._shares.pop(request), -1)

    def _add(self, share: tuple[int, ...], sign: int) -> None:
        self.num_to_decode += sign * share[0]
        self.to_decode_tokens += sign * share[1]
        self.prefill_tokens += sign * share[2]
        self.unallocated_tokens += sign * share[_UNALLOCATED]
        self.prefill_pairs += sign * share[4]
        self.num_urgent += sign * share[5]
