# SPDX-License-Identifier: Apache-2.0
"""Asks sources to move requests, all at once, and remembers the outcome.

A pass only starts the calls. A source that is silent for the timeout is left; the moves that it has begun continue, and
its load will show them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.contract.types import (
    ListRequestsResponse,
    MigrateEvent,
    MigrateRequest,
    MovePhase,
    MoveProgress,
    Reason,
    word,
)
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import cancel
from llumsched.cluster.instance import Instance
from llumsched.rescheduling.executing.blame import Blame, blame_for
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.executing.orders import choose, migrate_request, num_tokens
from llumsched.rescheduling.executing.records import MoveRecord, Outcome, Records, RescheduleCounters
from llumsched.rescheduling.planning.moves import Move, Purpose
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig

logger = logging.getLogger(__name__)

LONGEST_MOVE_S: Final = 600.0
"""Longest time of a call that shows progress."""
_SWEEP_S: Final = 1.0
"""Time between two searches for connections to gone instances, which take 2 ms for a thousand."""


class Llumlet(Protocol):
    """The interface used of `llumlet.contract.client.LlumletClient`."""

    async def list_requests(self, *, deadline_s: float | None = None) -> ListRequestsResponse: ...

    def migrate(
        self, request: MigrateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[MigrateEvent, None]: ...

    async def close(self) -> None: ...


Connect = Callable[[Address, Credentials], Llumlet]


def connect(address: Address, credentials: Credentials) -> Llumlet:
    return LlumletClient(address, credentials=credentials)


@dataclass(eq=False)
class _Source:
    """The connection to one source, and its running calls."""

    client: Llumlet
    places: asyncio.Semaphore
    num_calls: int = 0
    named: set[str] = field(default_factory=set)
    """Requests named by running calls; the source's list shows a move only once it has begun."""


@dataclass(eq=False)
class Executor:
    view: Mapping[str, Instance]
    config: ReschedulingConfig
    history: History
    records: Records
    counters: RescheduleCounters
    credentials: Credentials = NONE
    ended: Callable[[], None] = lambda: None
    """Callback after each move."""
    refused: Callable[[int], None] = lambda _: None
    """Called with the term of orders that a source refused as a former leader's."""
    clock: Callable[[], float] = time.monotonic
    connect: Connect = connect
    _numbers: Iterable[int] = field(default_factory=itertools.count)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _sources: dict[Address, _Source] = field(default_factory=dict)
    _swept_s: float = -math.inf

    def start(self, moves: Iterable[Move], term: int = 0) -> tuple[int, ...]:
        """Begins moves and returns their numbers. Moves whose instances have left are skipped. `term`: of the leader
        that planned them; 0 without other reschedulers."""
        begun = []
        for move in moves:
            if move.source in self.view and move.destination in self.view:
                number = next(iter(self._numbers))
                self.history.began(number, move, self.clock())
                record = MoveRecord(number, move, time.time())
                self.counters.began(move)
                self.records.began(record)
                ends = self.view[move.source], self.view[move.destination]
                task = asyncio.create_task(self._move(record, *ends, term))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                begun.append(number)
        return tuple(begun)

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Ends the calls; the moves that llumlets have begun continue."""
        await cancel(*self._tasks)
        for source in self._sources.values():
            await source.client.close()
        self._sources.clear()

    async def _move(self, record: MoveRecord, source: Instance, destination: Instance, term: int) -> None:
        began_s = self.clock()
        try:
            await self._call(record, source, destination, term)
        except TimeoutError:
            self._timed_out(record, f"no sign of life for {self.config.grpc_timeout_s:g} s")
        except LlumletUnreachable as failure:
            if failure.timed_out:
                self._timed_out(record, str(failure))
            else:
                self._failed(record, failure)
        except LlumletCallFailed as failure:
            self._failed(record, failure)
            if isinstance(failure, LlumletError) and failure.reason is Reason.NOT_LEADER:
                self.refused(term)
        except Exception as error:
            record.outcome, record.error = Outcome.FAILED, f"internal: {error!r}"
            self.history.source_failed(record.move.source, self.clock())
            logger.exception("%s: failed", _title(record))
        finally:
            record.seconds = self.clock() - began_s
            if record.outcome is Outcome.OPEN:  # closed meanwhile
                record.outcome, record.error = Outcome.FAILED, record.error or "the rescheduler ended"
            self.history.ended(record.number, self.clock())
            self.counters.ended(record)
            self.records.changed(record)
            self.ended()

    async def _call(self, record: MoveRecord, instance: Instance, destination: Instance, term: int) -> None:
        source = self._connect(instance.llumlet)
        source.num_calls += 1
        request = migrate_request(record.move, destination, term)
        try:
            async with source.places:
                if not await self._name_requests(record, source, instance, request):
                    record.outcome = Outcome.NOTHING
                    self.history.source_gave_nothing(record.move.source, self.clock())
                    return
                events = source.client.migrate(request, deadline_s=LONGEST_MOVE_S)
                await self._follow(record, events)
        finally:
            source.named.difference_update(request.request_ids)
            source.num_calls -= 1
            await self._disconnect_gone()

    async def _name_requests(
        self, record: MoveRecord, source: _Source, instance: Instance, request: MigrateRequest
    ) -> bool:
        """Replaces the rule by names where the source's own choice would not do. False if there is nothing to move."""
        move = record.move
        left_out = self.history.left_out(move, self.clock())
        if move.purpose is Purpose.FAILOVER or (move.limit_tokens is None and not left_out):
            return True
        total_tokens = instance.status.num_total_gpu_tokens if instance.status else 0
        listed = await source.client.list_requests(deadline_s=self.config.grpc_timeout_s)
        # No more than the slots that were counted for it: the others are for other moves of the source.
        chosen = choose(listed.requests, move, total_tokens, left_out | source.named)[
            : max(math.ceil(move.expected_requests), 1)
        ]
        for name in ("migration_type", "migration_req_policy", "value"):
            request.ClearField(name)
        request.request_ids.extend(one.request_id for one in chosen)
        source.named.update(request.request_ids)
        self.history.sized(record.number, sum(map(num_tokens, chosen)), len(chosen))
        return bool(chosen)

    async def _follow(self, record: MoveRecord, events: AsyncGenerator[MigrateEvent, None]) -> None:
        async with aclosing(events):
            while True:
                async with asyncio.timeout(self.config.grpc_timeout_s):
                    event = await anext(events, None)
                if event is None:
                    raise LlumletUnreachable(record.move.source, "the answer ended before its summary")
                if event.WhichOneof("event") == "summary":
                    record.num_selected, record.num_lost = event.summary.selected, event.summary.lost
                    break
                self._progress(record, event.progress)
        self._conclude(record)

    def _conclude(self, record: MoveRecord) -> None:
        blamed = {blame_for(reason) for reason in record.refusals}
        if record.num_moved:
            record.outcome = Outcome.MOVED
        else:
            record.outcome = Outcome.STAYED if record.num_selected else Outcome.NOTHING
            logger.info("%s: no request moved: %s", _title(record), dict(record.refusals))
        if record.num_moved and blamed <= {Blame.REQUEST, Blame.PAIRING}:
            self.history.succeeded(record.move)
        elif not record.num_moved and blamed <= {Blame.REQUEST}:
            self.history.source_gave_nothing(record.move.source, self.clock())

    def _progress(self, record: MoveRecord, progress: MoveProgress) -> None:
        move, now_s = record.move, self.clock()
        phase = word(MovePhase, progress.phase)
        name = record.name_of(progress.request_id, progress.external_request_id)
        if record.requests.get(name) == phase:
            return
        record.requests[name] = phase
        if progress.phase == MovePhase.MOVED:
            record.num_moved += 1
            record.moved_tokens += progress.context_tokens
            record.copied_bytes += progress.copied_bytes
            self.history.copied(progress.copied_bytes, progress.phase_ms.get("copying", 0.0) / 1000)
            if move.purpose is not Purpose.FAILOVER:
                self.history.moved(move.destination, progress.request_id, now_s)
        elif progress.phase == MovePhase.LOST:
            self.history.link_failed(move.source, move.destination, now_s)
        elif progress.phase == MovePhase.STAYED:
            reason = word(Reason, progress.reason)
            record.refusals[reason] += 1
            self._blame(move, blame_for(reason), now_s, progress.request_id)
        self.records.changed(record)

    def _blame(self, move: Move, blame: Blame, now_s: float, request_id: str = "") -> None:
        match blame:
            case Blame.DESTINATION:
                self.history.destination_failed(move.destination, now_s)
            case Blame.DESTINATION_BUSY:
                self.history.destination_failed(move.destination, now_s, briefly=True)
            case Blame.LINK:
                self.history.link_failed(move.source, move.destination, now_s)
            case Blame.PAIRING:
                self.history.does_not_fit(move.destination, request_id, now_s)
            case Blame.REQUEST:
                pass

    def _timed_out(self, record: MoveRecord, error: str) -> None:
        record.outcome, record.error = Outcome.TIMEOUT, error
        if record.requests:
            # It had begun: whether the source hangs or waits for its destination is not known.
            self.history.link_failed(record.move.source, record.move.destination, self.clock())
        else:
            self.history.source_failed(record.move.source, self.clock())
        logger.warning("%s: timed out: %s", _title(record), error)

    def _failed(self, record: MoveRecord, failure: LlumletCallFailed) -> None:
        record.outcome, record.error = Outcome.FAILED, str(failure)
        reason = failure.word if isinstance(failure, LlumletError) else ""
        if reason in _ENDED:
            # They ended between the list and the call, or this process's leadership has.
            record.outcome = Outcome.STAYED
            self.history.source_gave_nothing(record.move.source, self.clock())
            return
        blame = blame_for(reason) if reason else Blame.REQUEST
        if blame in (Blame.DESTINATION, Blame.DESTINATION_BUSY, Blame.LINK) and reason not in _OF_THE_CALL:
            self._blame(record.move, blame, self.clock())
        else:
            self.history.source_failed(record.move.source, self.clock())
        logger.warning("%s: failed: %s", _title(record), failure)

    def _connect(self, address: Address) -> _Source:
        known = self._sources.get(address)
        if known is None:
            places = asyncio.Semaphore(self.config.connection_pool_size)
            known = self._sources[address] = _Source(self.connect(address, self.credentials), places)
        return known

    async def _disconnect_gone(self) -> None:
        """Closes connections to gone instances. The others are kept for later calls."""
        now_s = self.clock()
        if now_s - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now_s
        present = {instance.llumlet for instance in self.view.values()}
        idle = [address for address, source in self._sources.items() if not source.num_calls]
        for source in [self._sources.pop(address) for address in idle if address not in present]:
            await source.client.close()


_ENDED: Final = frozenset({"unknown_request", "request_finished", "not_leader"})
_OF_THE_CALL: Final = frozenset({"shutting_down", "unauthenticated", "wrong_instance"})
"""Reasons that concern the source if they answer a whole call."""


def _title(record: MoveRecord) -> str:
    move = record.move
    return f"move {record.number} ({move.policy}) {move.source} -> {move.destination}, {move.selection}"
