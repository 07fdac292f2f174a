# SPDX-License-Identifier: Apache-2.0
"""What a rescheduler asks of an instance: its requests, and to move some of them. The calls are those of
`llumlet.client`, and so are their messages; nothing is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from llumlet.bridge import PHASES, reason_number, rule_of
from llumlet.errors import LlumletUnreachable
from llumlet.protocol.errors import Refused
from llumlet.protocol.ids import RequestId
from llumlet.protocol.selection import Candidate, select
from llumlet.types import (
    Address,
    ListRequestsResponse,
    MigrateEvent,
    MigrateRequest,
    MovePhase,
    MoveProgress,
    MoveSummary,
    Reason,
    RequestInfo,
)
from llumsched.simulator import PS
from llumsched.simulator.member import Member
from llumsched.simulator.moves_in import Arrivals
from llumsched.simulator.moves_out import Departures, OutgoingMove
from llumsched.simulator.requests import EngineRequest, Phase


class Llumlet:
    """The llumlet of one instance. `ended`: told of every move whose request's fate is known."""

    def __init__(
        self, member: Member, departures: Departures, arrivals: Arrivals, ended: Callable[[OutgoingMove], None]
    ) -> None:
        self.member = member
        self.departures = departures
        self.arrivals = arrivals
        self._ended = ended

    def list_requests(self) -> ListRequestsResponse:
        """Running ones first, as production lists them."""
        engine = self.member.engine
        now_ps = self.member.loop.now_ps
        engine.advance(now_ps)
        engine.settle(now_ps)
        return ListRequestsResponse(
            instance_id=self.member.id,
            incarnation=self.member.metadata.incarnation,
            requests=[self._info(request) for request in (*engine.running, *engine.waiting)],
        )

    def _info(self, request: EngineRequest) -> RequestInfo:
        reason = _why_not(request)
        return RequestInfo(
            request_id=request.id,
            external_request_id=request.id,
            phase=_phase(request),
            prompt_tokens=request.num_prompt,
            output_tokens=self.member.engine.num_tokens(request) - request.num_prompt,
            movable=reason == Reason.REASON_NONE,
            reason=reason,
        )

    def migrate(self, request: MigrateRequest, destination: Arrivals, report: Callable[[MigrateEvent], None]) -> None:
        """The chosen requests go, as far as slots allow; the summary is reported when the fate of all is known."""
        chosen = self._chosen(request)
        summary = MoveSummary(selected=len(chosen))
        num_open = len(chosen)

        def settled(request: EngineRequest, progress: MoveProgress) -> None:
            nonlocal num_open
            num_open -= 1
            match progress.phase:
                case MovePhase.MOVED:
                    summary.moved += 1
                case MovePhase.STAYED:
                    summary.stayed += 1
                case MovePhase.GONE:
                    summary.gone += 1
                case MovePhase.LOST:
                    summary.lost += 1
            report(MigrateEvent(progress=progress))
            if not num_open:
                report(MigrateEvent(summary=summary))

        def done(move: OutgoingMove) -> None:
            outcome = move.machine.outcome
            assert outcome is not None
            self._ended(move)
            settled(
                move.request,
                MoveProgress(
                    request_id=move.request.id,
                    external_request_id=move.request.id,
                    phase=PHASES[outcome.state],
                    reason=reason_number(outcome.reason),
                    context_tokens=move.num_tokens,
                    copied_bytes=move.machine.copied_bytes,
                    phase_ms={"copying": move.copying_ps / (PS / 1000)},
                ),
            )

        if not chosen:
            report(MigrateEvent(summary=summary))
        for one in chosen:
            reason = _why_not(one)
            if reason == Reason.REASON_NONE:
                try:
                    self.departures.begin(one, destination, done)
                    continue
                except Refused as refused:
                    reason = reason_number(refused.reason)
            settled(one, MoveProgress(request_id=one.id, phase=MovePhase.STAYED, reason=reason))

    def _chosen(self, request: MigrateRequest) -> list[EngineRequest]:
        engine = self.member.engine
        now_ps = self.member.loop.now_ps
        engine.advance(now_ps)
        engine.settle(now_ps)
        here = {one.id: one for one in (*engine.running, *engine.waiting)}
        if request.request_ids:
            return [here[name] for name in request.request_ids if name in here]
        waiting = set(engine.waiting)
        candidates = [
            Candidate(
                RequestId(one.id),
                running=one not in waiting,
                position=position,
                num_tokens=engine.num_tokens(one),
                movable=_why_not(one) == Reason.REASON_NONE,
            )
            for position, one in enumerate(here.values())
        ]
        rule = rule_of(request)
        chosen = select(candidates, rule, engine.config.num_blocks * engine.config.block_size)
        return [here[name] for name in chosen]


class Connection:
    """`llumsched.rescheduling.executor.Llumlet`, to one address."""

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
