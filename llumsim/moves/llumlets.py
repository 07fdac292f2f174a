# SPDX-License-Identifier: Apache-2.0
"""The llumlet of a modelled instance: it lists, moves and aborts requests, with the messages of
`llumlet.contract.client`. `Connection` is a rescheduler's connection to it, without a network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

from llumlet.contract.bridge import MODES, PHASES, reason_number, rule_of
from llumlet.contract.errors import LlumletUnreachable
from llumlet.contract.types import (
    ListRequestsResponse,
    MigrateEvent,
    MigrateRequest,
    MovePhase,
    MoveProgress,
    MoveSummary,
    Reason,
    RequestInfo,
    word,
)
from llumlet.process.addresses import Address
from llumlet.protocol.errors import Refused
from llumlet.protocol.events import Gone
from llumlet.protocol.ids import RequestId
from llumlet.protocol.move.selection import Candidate, select
from llumsim import PS
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.requests import EngineRequest, Phase
from llumsim.moves.incoming import Arrivals
from llumsim.moves.outgoing import Departures, OutgoingMove

_ENDS: Final = frozenset({MovePhase.MOVED, MovePhase.STAYED, MovePhase.GONE, MovePhase.LOST})


class Llumlet:
    """The llumlet of one instance. `ended`: told of every move whose request's fate is known."""

    def __init__(
        self,
        member: ModelledInstance,
        departures: Departures,
        arrivals: Arrivals,
        ended: Callable[[OutgoingMove], None],
    ) -> None:
        self.member = member
        self.departures = departures
        self.arrivals = arrivals
        self._ended = ended

    def list_requests(self) -> ListRequestsResponse:
        return ListRequestsResponse(
            instance_id=self.member.id,
            incarnation=self.member.metadata.incarnation,
            requests=[self._info(request) for request in self._requests()],
        )

    def _requests(self) -> list[EngineRequest]:
        """All requests of the instance, up to date."""
        engine, now_ps = self.member.engine, self.member.clock.now_ps
        engine.advance(now_ps)
        engine.settle(now_ps)
        return engine.requests

    def _info(self, request: EngineRequest) -> RequestInfo:
        reason, engine = _why_not(request), self.member.engine
        num_tokens = engine.num_tokens(request)
        num_computed = num_tokens - 1 if request.phase is Phase.DECODE else request.num_computed
        return RequestInfo(
            request_id=request.id,
            external_request_id=request.name,
            phase=_phase(request),
            prompt_tokens=request.num_prompt,
            output_tokens=num_tokens - request.num_prompt,
            computed_tokens=num_computed,
            num_blocks=-(-num_computed // engine.config.block_size),
            movable=reason == Reason.REASON_NONE,
            reason=reason,
            priority=request.priority,
        )

    def migrate(self, request: MigrateRequest, destination: Arrivals, report: Callable[[MigrateEvent], None]) -> None:
        """The chosen requests go, as far as slots allow. All that becomes of them is reported, and the summary when the
        fate of each is known."""
        here = {one.id: one for one in self._requests()}
        chosen = list(dict.fromkeys(request.request_ids)) or self._selected(request)
        ends: Counter[str] = Counter()

        def told(progress: MoveProgress) -> None:
            report(MigrateEvent(progress=progress))
            if progress.phase in _ENDS:
                ends[word(MovePhase, progress.phase)] += 1
                if ends.total() == len(chosen):
                    report(MigrateEvent(summary=MoveSummary(selected=len(chosen), **ends)))

        def went_on(move: OutgoingMove) -> None:
            if move.machine.settled:
                self._ended(move)
            told(_progress(move))

        if not chosen:
            report(MigrateEvent(summary=MoveSummary()))
        for name in chosen:
            one = here.get(name)
            reason = _why_not(one) if one is not None else Reason.UNKNOWN_REQUEST
            if one is not None and reason == Reason.REASON_NONE:
                try:
                    self.departures.begin(one, destination, went_on)
                    continue
                except Refused as refused:
                    reason = reason_number(refused.reason)
            told(MoveProgress(request_id=name, phase=MovePhase.STAYED, reason=reason))

    def _selected(self, request: MigrateRequest) -> list[str]:
        """Select by the rule, best first. Sort the batch by arrival first: requests that moved here are at its head."""
        engine = self.member.engine
        running = sorted(engine.running, key=lambda one: one.arrived_ps)
        candidates = [
            Candidate(
                RequestId(one.id),
                running=is_running,
                position=position,
                num_tokens=engine.num_tokens(one),
                priority=one.priority,
                movable=_why_not(one) == Reason.REASON_NONE,
            )
            for is_running, queue in ((True, running), (False, engine.waiting))
            for position, one in enumerate(queue)
        ]
        capacity = engine.config.num_blocks * engine.config.block_size
        return [str(name) for name in select(candidates, rule_of(request), capacity)]

    def abort(self, request: EngineRequest, now_ps: int) -> None:
        """End a request that its client has given up."""
        engine = self.member.engine
        engine.advance(now_ps)
        engine.settle(now_ps)
        if request.is_moving:
            self.departures.gone(request, Gone.ABORTED)
        self.member.post(lambda _: engine.remove(request), now_ps)


class Connection:
    """`llumsched.rescheduling.executing.executor.Llumlet`, to one address."""

    def __init__(
        self, address: Address, llumlets: Mapping[Address, Llumlet], by_id: Mapping[str, Llumlet], hop_s: float
    ):
        self._address = address
        self._llumlets = llumlets
        self._by_id = by_id
        self._hop_s = hop_s

    async def list_requests(self, *, deadline_s: float | None = None) -> ListRequestsResponse:
        await asyncio.sleep(self._hop_s)
        listed = self._llumlet().list_requests()
        await asyncio.sleep(self._hop_s)
        return listed

    async def migrate(
        self, request: MigrateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[MigrateEvent, None]:
        await asyncio.sleep(self._hop_s)
        events: asyncio.Queue[MigrateEvent] = asyncio.Queue()
        source, destination = self._llumlet(), self._by_id.get(request.dst_engine_id)
        if destination is None:
            raise LlumletUnreachable(request.dst_engine_id, "it is gone")
        source.migrate(request, destination.arrivals, events.put_nowait)
        while True:
            event = await events.get()
            yield event
            if event.HasField("summary"):
                return

    async def close(self) -> None:
        return

    def _llumlet(self) -> Llumlet:
        found = self._llumlets.get(self._address)
        if found is None or not found.member.is_alive:
            raise LlumletUnreachable(str(self._address), "nobody listens there")
        return found


def _phase(request: EngineRequest) -> RequestInfo.Phase:
    if request.phase is Phase.WAITING:
        return RequestInfo.PREEMPTED if request.num_preemptions else RequestInfo.WAITING
    return RequestInfo.PREFILL if request.phase is Phase.PREFILL else RequestInfo.DECODE


def _why_not(request: EngineRequest) -> Reason:
    """Why a request is not to be moved now. In production one in its prefill takes along what it has; here it stays."""
    if request.phase is Phase.PREFILL:
        return Reason.PREFILL_RUNNING
    return Reason.ALREADY_MIGRATING if request.is_moving else Reason.REASON_NONE


def _progress(move: OutgoingMove) -> MoveProgress:
    machine, outcome = move.machine, move.machine.outcome
    return MoveProgress(
        migration_id=move.migration_id,
        request_id=move.request.id,
        external_request_id=move.request.name,
        phase=PHASES[machine.state],
        reason=reason_number(outcome.reason if outcome is not None else None),
        detail=outcome.detail if outcome is not None else "",
        mode=MODES[machine.plan.method],
        rounds=machine.rounds,
        context_tokens=move.num_tokens,
        copied_bytes=machine.copied_bytes,
        phase_ms={"copying": move.copying_ps / (PS / 1000)},
    )
