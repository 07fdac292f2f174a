# SPDX-License-Identifier: Apache-2.0
"""What a client holds of a request. Modelled engines count tokens; which ones they are is known here."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from llumsim.engine.requests import EngineRequest

VOCABULARY: Final = 32000
_CONTEXT: Final = 64
"""Tokens that decide the next one."""


def next_token(token_ids: Sequence[int]) -> int:
    """The next token, the same for the same tokens everywhere, so that a move or a replay can be checked."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in token_ids[-_CONTEXT:])) % VOCABULARY


@dataclass(eq=False)
class SimulatedRequest:
    """It follows its request from instance to instance of one cluster."""

    prompt: list[int]
    in_engine: EngineRequest
    """As the engine of its owner has it."""
    owner: str
    output: list[int] = field(default_factory=list)
    moved_through: list[str] = field(default_factory=list)
    finish_reason: str = ""
    """The reason: length, abort, or error (its instance died and nobody took it over)."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return self.in_engine.id

    @property
    def external_id(self) -> str:
        return self.in_engine.name

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

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

    def told(self, num_output: int) -> None:
        """So many tokens have come by now."""
        while len(self.output) < num_output:
            self.output.append(next_token([*self.prompt[-_CONTEXT:], *self.output[-_CONTEXT:]]))
            self._news.set()

    def moved(self, in_engine: EngineRequest, owner: str) -> None:
        self.moved_through.append(self.owner)
        self.in_engine, self.owner = in_engine, owner

    def end(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._news.set()
