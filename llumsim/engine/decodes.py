# SPDX-License-Identifier: Apache-2.0
"""The requests of an engine of which every step computes one token.

None of them keeps a count of its own: each has its `base` plus the number of steps (`ticks`) that all have made. What
they add up to, when the first of them ends, and when blocks run short, follows from that without looking at each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from llumsim.engine.requests import EngineRequest, Phase


class Decodes:
    def __init__(self, block_size: int) -> None:
        self.ticks = 0
        self.late: list[EngineRequest] = []
        """Requests whose last token is older than the last step."""
        self._block_size = block_size
        self._base: dict[EngineRequest, int] = {}
        self._base_tokens = 0
        self.num_urgent = 0
        self._phases = [0] * block_size
        """Number of requests that need another block at a tick, by the tick modulo the block size."""
        self._ends: list[tuple[int, int, EngineRequest]] = []
        """Heap: the tick at which each has its last token. Of those that left, it goes when its turn comes."""
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self._base)

    def __contains__(self, request: EngineRequest) -> bool:
        return request in self._base

    @property
    def requests(self) -> list[EngineRequest]:
        return list(self._base)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, prompt and output."""
        return self._base_tokens + len(self._base) * self.ticks

    def tokens_of(self, request: EngineRequest) -> int | None:
        """Tokens of one request; None if it is not among them."""
        base = self._base.get(request)
        return None if base is None else base + self.ticks

    def enter(self, request: EngineRequest, last_end_ps: int) -> None:
        """Add a request between two steps, of which the last ended then. All its tokens but one are computed."""
        base = request.num_tokens - self.ticks
        request.phase = Phase.DECODE
        self._base[request] = base
        self._base_tokens += base
        self.num_urgent += request.is_urgent
        self._phases[(1 - base) % self._block_size] += 1
        self._num_entered += 1
        heapq.heappush(self._ends, (self._end_of(request), self._num_entered, request))
        if request.last_token_ps != last_end_ps:
            self.late.append(request)

    def leave(self, request: EngineRequest, last_end_ps: int) -> None:
        """Remove a request between two steps: it keeps its own counts again."""
        base = self._base.pop(request)
        self._base_tokens -= base
        self.num_urgent -= request.is_urgent
        self._phases[(1 - base) % self._block_size] -= 1
        request.num_tokens = base + self.ticks
        request.num_computed = request.num_tokens - 1
        request.num_blocks = -(-request.num_computed // self._block_size)
        if request in self.late:
            self.late.remove(request)
        else:
            request.last_token_ps = last_end_ps

    def num_ticks_left(self) -> int:
        """Ticks until the first request has its last token."""
        ends = self._ends
        while not self._is_current(*ends[0]):
            heapq.heappop(ends)
        return ends[0][0] - self.ticks

    def ended(self, order: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Requests that have their last token, in this order. They are still among the others."""
        found: list[EngineRequest] = []
        while self._ends and self._ends[0][0] <= self.ticks:
            tick, number, request = heapq.heappop(self._ends)
            if self._is_current(tick, number, request) and request not in found:
                found.append(request)
        if len(found) > 1:
            found.sort(key=order.index)
        return found

    def _is_current(self, tick: int, number: int, request: EngineRequest) -> bool:
        return request in self._base and self._end_of(request) == tick

    def _end_of(self, request: EngineRequest) -> int:
        return request.num_prompt + request.max_tokens - self._base[request]

    def blocks_needed(self, begin: int, num_steps: int) -> int:
        """Blocks that they will take in so many steps from that tick on."""
        size, phases = self._block_size, self._phases
        if num_steps == 1:
            return phases[begin % size]
        rounds, rest = divmod(num_steps, size)
        begin %= size
        some = sum(phases[begin : begin + rest]) + sum(phases[: max(begin + rest - size, 0)])
        return rounds * len(self._base) + some

    def num_steps_with(self, num_free: int, begin: int, most: int) -> int:
        """Steps from that tick on, `most` at most, for which so many free blocks are enough."""
        if self.blocks_needed(begin, most) <= num_free:
            return most
        number = num_free // len(self._base) * self._block_size
        left = num_free - self.blocks_needed(begin, number)
        while (needed := self._phases[(begin + number) % self._block_size]) <= left:
            left -= needed
            number += 1
        return number
