# SPDX-License-Identifier: Apache-2.0
"""Emptying an engine that is about to end: everything it runs, guests included, is moved to other instances.

The API server decides when: it calls `report` through vLLM's utility path, several times a second, from its shutdown on
(`frontend.server_drain`); if there are several, each does, and ends when the engine is empty and its own streams have
ended. From the first call the engine takes in nothing from elsewhere, and each request is moved as soon as
it can be, to the destination that has got the fewest so far. Who is refused stays, decodes on, and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import Any

from llumlet.contract.bridge import reason_of
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import (
    DrainProgress,
    DrainRequest,
    MigrateRequest,
    Mode,
    MovePhase,
    MoveProgress,
    reason_word,
)
from llumlet.process.addresses import Address
from llumlet.process.tasks import Tasks
from llumlet.protocol.errors import MigrationError, Reason, Refused
from vllm_llumnix.config import END_SECONDS, drain_limit
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.moves.migrations import Migrations
from vllm_llumnix.engine.moves.source_calls import Target

logger = logging.getLogger("vllm.llumnix")

TURN_SECONDS = 0.1
REPORT_SECONDS = 0.5
"""Between two looks of an operator. The API server waits for longer before it ends the engine."""
RETRY_SECONDS = 1.0
"""Before a request is offered again to a destination that refused it, and a silent destination is asked again."""
FOR_GOOD = frozenset(
    {Reason.INCOMPATIBLE_ENGINE, Reason.REQUEST_TOO_LONG, Reason.SAME_INSTANCE, Reason.TRANSPORT_UNAVAILABLE}
)
"""Refusals that a destination would repeat."""


class Drain:
    """The drain of one engine. Once begun, it ends with the process."""

    def __init__(self, context: EngineContext, migrations: Migrations) -> None:
        self._context = context
        self._loop = context.loop
        self._migrations = migrations
        self._began: float | None = None
        self._addresses: list[str] = []
        self._named = False
        """Destinations named by an operator: no others are sought."""
        self._seconds = 0.0
        self._destinations: dict[str, Target] = {}
        self._given: Counter[str] = Counter()
        """Requests by the destination that has them, or is about to."""
        self._num_moved = 0
        self._num_recomputed = 0
        """Requests among them that went with their tokens alone."""
        self._stayed: Counter[str] = Counter()
        """Refused attempts by reason."""
        self._not_before: dict[tuple[str, str], float] = {}
        """The time at which a request may be offered to a destination again."""
        self._num_streams: dict[int, int] = {}
        """Number of streams by API server."""
        self._num_cut: dict[int, int] = {}
        """Streams that an API server ended early; it has drained."""
        self._tasks = Tasks()

    def check(self, asked: DrainRequest) -> None:
        """Raises Refused for a drain that this instance cannot begin."""
        here = self._context.identity.instance
        if asked.engine_id and asked.engine_id != here:
            raise Refused(Reason.WRONG_INSTANCE, f"this is {here}, not {asked.engine_id}")
        if str(self._context.address) in asked.destinations:
            raise Refused(Reason.SAME_INSTANCE, "the instance cannot be drained to itself")
        if self._context.config.num_ranks > 1:
            detail = "data-parallel ranks end together: send SIGTERM to `vllm serve`"
            raise Refused(Reason.INVALID_REQUEST, detail)
        if drain_limit(self._loop.engine.vllm_config) == 0.0:
            detail = (
                "several API servers are given no time to drain: start the instance with --llumlet-peers or "
                f"--llumlet-cms, or with more than {END_SECONDS} s of --shutdown-timeout"
            )
            raise Refused(Reason.INVALID_REQUEST, detail)

    def ask(self, addresses: list[str], seconds: float) -> None:
        """Starts a drain for an operator, whose wishes go before the API server's settings."""
        self._addresses, self._seconds, self._named = addresses, seconds, bool(addresses)

    # Loop thread

    def report(
        self, client_index: int, peers: list[str], seconds: float, num_streams: int, num_cut: int | None
    ) -> dict[str, Any]:
        """Called by an API server: who could take requests, the streams it holds, and in the end how many it has cut.

        Returns how long the drain may take in seconds (0: there is none) and what is still here.
        """
        self._num_streams[client_index] = num_streams
        if num_cut is not None:
            self._num_cut[client_index] = num_cut
        self._seconds = self._seconds or seconds
        new = [] if self._named else [peer for peer in peers if peer not in self._addresses]
        self._addresses += new
        if self._began is None and self._seconds > 0:
            self._began = time.monotonic()
            self._loop.draining = True
            self._loop.thread.post(self._begin)
        elif self._began is not None and new:
            self._loop.thread.post(self._seek, new)
        return {
            "seconds": self._seconds,
            "num_requests": len(self._loop.engine.scheduler.requests),
            "num_moving": self._migrations.num_moving,
            "num_moved": self._num_moved,
        }

    # Llumlet thread

    @property
    def ended(self) -> bool:
        """True if no API server drains any more."""
        return bool(self._num_cut) and self._num_cut.keys() == self._num_streams.keys()

    @property
    def asked(self) -> bool:
        """True if the end is decided: another signal to the API server would cut it short."""
        return self._seconds > 0

    def progress(self) -> DrainProgress:
        return DrainProgress(
            elapsed_s=time.monotonic() - self._began if self._began is not None else 0.0,
            timeout_s=self._seconds,
            num_streams=sum(self._num_streams.values()),
            num_requests=len(self._loop.engine.scheduler.requests),
            num_moving=self._migrations.num_moving,
            num_moved=self._num_moved,
            num_recomputed=self._num_recomputed,
            refusals=self._stayed,
            done=self.ended,
            num_cut=sum(self._num_cut.values()),
        )

    def _begin(self) -> None:
        logger.info("llumlet: draining to %s", ", ".join(self._addresses) or "nobody: requests run to their end")
        self._tasks.spawn(self._run())
        self._seek(self._addresses)

    def _seek(self, addresses: list[str]) -> None:
        for address in addresses:
            self._tasks.spawn(self._find(Address.parse(address)))

    def close(self) -> None:
        self._tasks.cancel()

    async def _run(self) -> None:
        while True:
            for request_id in await self._loop.call(self._migrations.movable):
                if self._migrations.num_moving >= self._context.config.max_migrations_out:
                    break
                self._offer(request_id)
            await asyncio.sleep(TURN_SECONDS)

    async def _find(self, address: Address) -> None:
        """Asks until the instance there says who it is."""
        while True:
            try:
                client = self._context.peers.at(address)
                found = await client.get_instance_metadata()
            except LlumletCallFailed as error:
                logger.info("llumlet: nothing can be moved to %s: %s", address, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                if found.instance_id != self._context.identity.instance:
                    self._destinations[str(address)] = Target(found.instance_id, address, client)
                return

    def _offer(self, request_id: str) -> None:
        now = time.monotonic()
        willing = [name for name in self._destinations if self._not_before.get((request_id, name), 0.0) <= now]
        if not willing:
            return
        name = min(willing, key=lambda name: (self._given[name], name))
        # Nothing is gained by a request that stays: a longer stall, or a prefill, is better than an end.
        asked = MigrateRequest(trigger_policy="drain", force=True)
        try:
            move = self._migrations.begin(request_id, self._destinations[name], asked, lambda _: None)
        except MigrationError:  # changed since the loop was asked, or as many are on their way as may be: next turn
            return
        self._given[name] += 1
        move.done.add_done_callback(lambda done: self._settled(request_id, name, done.result()))

    def _settled(self, request_id: str, name: str, outcome: MoveProgress) -> None:
        if outcome.phase == MovePhase.MOVED:
            self._num_moved += 1
            self._num_recomputed += outcome.mode == Mode.RECOMPUTE
            return
        self._given[name] -= 1
        if outcome.phase == MovePhase.STAYED:
            self._stayed[reason_word(outcome.reason)] += 1
            wait = math.inf if reason_of(outcome.reason) in FOR_GOOD else RETRY_SECONDS
            self._not_before[request_id, name] = time.monotonic() + wait
