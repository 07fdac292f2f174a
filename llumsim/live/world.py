# SPDX-License-Identifier: Apache-2.0
"""The requests of simulated instances, and the world in which these find each other.

Modelled engines count tokens; `SimulatedRequest` knows which ones they are. Requests move among the instances of one
world, which live in one process.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from llumsim.clock import RealClock
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.requests import EngineRequest
from llumsim.moves.links import Network
from llumsim.moves.llumlets import Llumlet

VOCABULARY: Final = 32000
_CONTEXT: Final = 64
"""Tokens that decide the next one."""


def next_token(token_ids: Sequence[int]) -> int:
    """The next token, the same for the same tokens everywhere, so that a move or a replay can be checked."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in token_ids[-_CONTEXT:])) % VOCABULARY


@dataclass(eq=False)
class SimulatedRequest:
    """A client's request, which it follows from instance to instance of one cluster."""

    prompt: list[int]
    in_engine: EngineRequest
    """The request in its owner's engine."""
    owner: str
    output: list[int] = field(default_factory=list)
    moved_through: list[str] = field(default_factory=list)
    finish_reason: str = ""
    """length, abort, or error (its instance died, and no other took it over)."""
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
        """Yield each output token when it is there, until the request ends."""
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
        """Note that `num_output` tokens have come by now."""
        while len(self.output) < num_output:
            self.output.append(next_token([*self.prompt[-_CONTEXT:], *self.output[-_CONTEXT:]]))
            self._news.set()

    def moved(self, in_engine: EngineRequest, owner: str) -> None:
        self.moved_through.append(self.owner)
        self.in_engine, self.owner = in_engine, owner

    def end(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._news.set()


class World:
    def __init__(self) -> None:
        self.network = Network(RealClock())
        self.llumlets: dict[str, Llumlet] = {}
        """Llumlets by instance id; that of an instance that has ended is there until its next life."""
        self.requests: dict[str, SimulatedRequest] = {}
        """Requests that have not ended, by their ids in engines."""

    def at(self, address: str) -> Llumlet | None:
        for llumlet in self.llumlets.values():
            if f"{llumlet.member.metadata.ip}:{llumlet.member.metadata.llumlet_port}" == address:
                return llumlet
        return None

    def owner(self, request_id: str) -> ModelledInstance | None:
        request = self.requests.get(request_id)
        return self.llumlets[request.owner].member if request is not None else None

    def owned(self, arrived: EngineRequest, member: ModelledInstance) -> None:
        """Note the new owner of a request that has moved."""
        request = self.requests.get(arrived.id)
        if request is None:  # its client has left meanwhile
            member.engine.remove(arrived)
        else:
            request.moved(arrived, member.id)

    def finished(self, request: EngineRequest) -> None:
        client = self.requests.pop(request.id, None)
        if client is not None:
            client.told(request.num_output)
            client.end("length")

    def abort(self, request: SimulatedRequest) -> None:
        """End a request that its client has given up, wherever it runs."""
        if self.requests.pop(request.request_id, None) is not None:
            llumlet = self.llumlets[request.owner]
            if llumlet.member.is_alive:
                llumlet.abort(request.in_engine, llumlet.member.clock.now_ps)
            request.end("abort")

    def lost(self, member: ModelledInstance, reason: str) -> None:
        """End the requests of an instance that has ended."""
        for llumlet in self.llumlets.values():
            llumlet.departures.lost(member)
            llumlet.arrivals.lost(member)
        for request in [one for one in self.requests.values() if one.owner == member.id]:
            del self.requests[request.request_id]
            request.end(reason)
