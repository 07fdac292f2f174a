# SPDX-License-Identifier: Apache-2.0
"""The load model of a simulated engine: continuous batching over a paged KV cache, in real or scaled time.

A step decodes one token of each running request and computes a chunk of waiting prompts. It takes `step_s`, and
`decode_s` for each decoded and `prefill_s` for each computed prompt token. A request that needs a block when none is
free preempts the one that came last, which gives up its cache and waits in front. No prefix cache.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

VOCABULARY: Final = 32000
_ARRIVALS_S: Final = 10.0
"""Time for which an id stays among the recent arrivals."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    num_blocks: int = 1024
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    step_s: float = 0.010
    decode_s: float = 0.0001
    prefill_s: float = 0.00002
    speed: float = 1.0
    """Simulated seconds in a second."""


def next_token(token_ids: Sequence[int]) -> int:
    """The next token, the same for the same tokens everywhere, so that a move or a replay can be checked."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in token_ids[-64:])) % VOCABULARY


@dataclass(eq=False)
class SimulatedRequest:
    """What a client holds: it follows the request from instance to instance, within one process."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    external_id: str = ""
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_blocks: int = 0
    arrival_s: float = field(default_factory=time.time)
    arrival_order: float = field(default_factory=time.monotonic)
    owner: str = ""
    moved_through: list[str] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: str = ""
    """The reason: length, abort, or error (its instance died and nobody took it over)."""
    moving: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_tokens - (1 if self.output else 0)

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    async def tokens(self) -> AsyncIterator[int]:
        """Each output token when it is there; ends with the request."""
        told = 0
        while True:
            while told < len(self.output):
                told += 1
                yield self.output[told - 1]
            if self.finished:
                return
            self._news.clear()
            await self._news.wait()

    async def done(self) -> str:
        """Wait for the end; returns the finish reason."""
        async for _ in self.tokens():
            pass
        return self.finish_reason

    def emit(self) -> None:
        self.output.append(next_token([*self.prompt[-64:], *self.output[-64:]]))
        if len(self.output) >= self.max_tokens:
            self.finish_reason = "length"
        self._news.set()

    def end(self, reason: str) -> None:
        if not self.finish_reason:
            self.finish_reason = reason
        self._news.set()


class SimulatedEngine:
    """An engine that runs while `run` does. `changed` is called with each change of the load."""

    def __init__(self, model: EngineModel, changed: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.running: list[SimulatedRequest] = []
        self.waiting: deque[SimulatedRequest] = deque()
        self.free_blocks = model.num_blocks
        self.reserved: dict[str, int] = {}
        """Blocks of requests on their way in, by migration id."""
        self.num_preemptions = 0
        self.step_id = 0
        self.update_id = 0
        self.goes_on = asyncio.Event()
        """Set while the engine makes steps; cleared while it stands still."""
        self.goes_on.set()
        self.step_began_s: float | None = None
        self._arrivals: deque[tuple[float, str]] = deque()
        self._changed = changed
        self._work = asyncio.Event()

    @property
    def requests(self) -> list[SimulatedRequest]:
        return [*self.running, *self.waiting]

    @property
    def recent_arrivals(self) -> list[str]:
        """External ids of the last ten seconds."""
        while self._arrivals and self._arrivals[0][0] < time.monotonic() - _ARRIVALS_S:
            self._arrivals.popleft()
        return [external_id for _, external_id in self._arrivals]

    def add(self, request: SimulatedRequest) -> None:
        self._arrivals.append((time.monotonic(), request.external_id))
        self.waiting.append(request)
        self.note_change()

    def admit(self, request: SimulatedRequest, num_blocks: int) -> None:
        """Takes in a request that moved with its KV cache, in blocks that are taken already."""
        request.num_blocks = num_blocks
        self.running.append(request)
        self.note_change()

    def take_out(self, request: SimulatedRequest) -> bool:
        """Forget a request and free its blocks. False if it is not here."""
        queue = next((queue for queue in (self.running, self.waiting) if request in queue), None)
        if queue is None:
            return False
        queue.remove(request)
        self.free_blocks += request.num_blocks
        request.num_blocks = 0
        self.note_change()
        return True

    def note_change(self) -> None:
        self.update_id += 1
        self._work.set()
        self._changed()

    async def run(self) -> None:
        while True:
            if not self.requests:
                self._work.clear()
                await self._work.wait()
            await self.goes_on.wait()
            self.step_began_s = time.monotonic()
            decoding, prefills = self._schedule()
            await asyncio.sleep(self._duration_s(len(decoding), sum(prefills.values())))
            await self.goes_on.wait()
            self._finish_step(decoding, prefills)
            self.step_began_s = None

    def _duration_s(self, decoded: int, prefilled: int) -> float:
        model = self.model
        return (model.step_s + decoded * model.decode_s + prefilled * model.prefill_s) / model.speed

    def _schedule(self) -> tuple[list[SimulatedRequest], dict[SimulatedRequest, int]]:
        """The requests that decode in this step, and how many prompt tokens of whom are computed."""
        for request in self.requests:
            if request.finished:  # aborted at its origin, which is another instance
                self.take_out(request)
        budget = self.model.max_num_batched_tokens
        decoding: list[SimulatedRequest] = []
        prefills: dict[SimulatedRequest, int] = {}
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            if not request.in_prefill:
                if self._grow(request, request.num_tokens):
                    decoding.append(request)
                    budget -= 1
            elif budget > 0:
                prefills[request] = min(request.num_tokens - request.num_computed, budget)
                budget -= prefills[request]
        while self.waiting and budget > 0 and len(self.running) < self.model.max_num_seqs:
            request = self.waiting[0]
            needed = self.blocks_of(request.num_tokens)
            if needed > self.free_blocks:
                break
            self.waiting.popleft()
            self.free_blocks -= needed
            request.num_blocks = needed
            self.running.append(request)
            prefills[request] = min(request.num_tokens - request.num_computed, budget)
            budget -= prefills[request]
            self.note_change()
        return decoding, prefills

    def _finish_step(self, decoding: list[SimulatedRequest], prefills: dict[SimulatedRequest, int]) -> None:
        self.step_id += 1
        for request, computed in prefills.items():
            if request in self.running:
                request.num_computed += computed
                if request.num_computed >= request.num_tokens:
                    self._emit(request)
        for request in decoding:
            # Moved or aborted while the step ran: its token is thrown away.
            if request in self.running and not request.finished:
                request.num_computed = request.num_tokens
                self._emit(request)
        self.note_change()

    def _emit(self, request: SimulatedRequest) -> None:
        request.emit()
        if request.finished:
            self.take_out(request)

    def _grow(self, request: SimulatedRequest, num_tokens: int) -> bool:
        """Makes room for the KV of so many tokens; False if the request itself had to give way."""
        while request.num_blocks < self.blocks_of(num_tokens):
            if self.free_blocks > 0:
                self.free_blocks -= 1
                request.num_blocks += 1
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self.free_blocks += request.num_blocks
        request.num_blocks = request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        self.note_change()

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.model.block_size)
