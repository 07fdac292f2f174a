# SPDX-License-Identifier: Apache-2.0
"""Lists of the engine's requests, and the selection of requests by a rule."""

from __future__ import annotations

from vllm.v1.request import RequestStatus

from llumlet.contract.bridge import epoch_message, reason_number, rule_of
from llumlet.contract.types import (
    ListRequestsResponse,
    MigrateRequest,
    Mode,
    MoveInfo,
    MovePhase,
    RequestInfo,
)
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import HOME, RequestId
from llumlet.protocol.move.plan import Method
from llumlet.protocol.move.selection import Candidate, select
from vllm_llumnix.engine.compatibility.way import Way, has_kv, mode_of, way_of
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.moves.destination_shell import DestinationShell
from vllm_llumnix.engine.moves.source_moves import SourceMoves
from vllm_llumnix.engine.requests.request_state import BETWEEN_PARTS, residence_of
from vllm_llumnix.engine.vllm_types import Request


class Listing:
    """Read-only views of one engine."""

    def __init__(self, context: EngineContext, departures: SourceMoves) -> None:
        self._identity = context.identity
        self._port = context.loop.port
        self._trials = context.loop.trials
        self._departures = departures
        self._scheduler = context.engine.scheduler

    def way(self, request: Request, asked: Mode) -> Way:
        """Way of this request if its move began now. Raises Refused."""
        way = way_of(request, self._identity, asked)
        if self._port.paused and way.method is not Method.RECOMPUTE:
            if way.insists and has_kv(request):
                raise Refused(Reason.SOURCE_PAUSED, "the source is paused, and keeps its KV cache to itself")
            way = Way(Method.RECOMPUTE, "the source is paused", way.insists)
        residence = residence_of(request)
        if residence is not None and residence.handover_open:
            raise Refused(Reason.HANDOVER_OPEN, "its source has not closed the last hand-over yet")
        is_silent = residence is not None and residence.epoch != HOME and residence.next_index == residence.base
        if is_silent and request.status != BETWEEN_PARTS:
            raise Refused(Reason.NOT_STARTED, "it has not produced a token here yet")
        if self._trials.has(request):
            raise Refused(Reason.NOT_STARTED, "it is on trial here: its last engine may have died of it")
        if (problem := self._port.why_not_now(request)) is not None:
            raise Refused(*problem)
        return way

    def why_not(self, request: Request, asked: Mode = Mode.MODE_UNSPECIFIED) -> Refused | None:
        """Why a move of this request could not begin now; None if it could."""
        try:
            self.way(request, asked)
        except Refused as refused:
            return refused
        return None

    # Selection

    def select(self, asked: MigrateRequest) -> list[str]:
        """The requests that a rule takes, best first. Ids only; whether they can move is checked again on the way."""
        candidates = self._candidates(asked.method)
        return [str(request_id) for request_id in select(candidates, rule_of(asked), self._port.capacity_tokens)]

    def _candidates(self, asked: Mode) -> list[Candidate]:
        waiting = list(self._scheduler.waiting)
        return [
            Candidate(
                request_id=RequestId(request.request_id),
                running=is_running,
                position=position,
                num_tokens=request.num_tokens,
                priority=request.priority,
                movable=request.request_id not in self._departures.moves and self.why_not(request, asked) is None,
            )
            for is_running, queue in ((True, [*self._running(), *self._between_parts()]), (False, waiting))
            for position, request in enumerate(queue)
        ]

    def _running(self) -> list[Request]:
        """Running requests in the order of their arrival; vLLM's list has newcomers of ours at its head."""
        return sorted(self._scheduler.running, key=lambda request: request.arrival_time)

    def _between_parts(self) -> list[Request]:
        """They hold what they would if they ran."""
        return [request for request in self._scheduler.kv_holding_waiting if request.status == BETWEEN_PARTS]

    # Loop thread

    def requests(self, arriving: list[DestinationShell]) -> ListRequestsResponse:
        response = ListRequestsResponse(instance_id=self._identity.instance, incarnation=self._identity.incarnation)
        scheduler = self._scheduler
        queued = [*self._running(), *scheduler.kv_holding_waiting, *scheduler.waiting]
        rest = [request for request in scheduler.requests.values() if request not in queued]
        for request in [*queued, *rest]:
            response.requests.append(self._info(request))
        for move in arriving:
            request = move.request
            if request is not None and move.request_id not in scheduler.requests:
                response.requests.append(self._arriving_info(move, request))
        return response

    def _info(self, request: Request) -> RequestInfo:
        problem = self.why_not(request)
        move = self._departures.moves.get(request.request_id)
        if move is not None:
            problem = Refused(Reason.ALREADY_MIGRATING, "it is on its way")
        info = self._base_info(request)
        info.phase = _phase(request, frozen=move is not None and move.leaving.frozen)
        info.num_blocks = self._port.rows.num_held(request)
        info.movable = problem is None
        if problem is not None:
            info.reason, info.detail = reason_number(problem.reason), problem.detail
        else:
            info.moves_as = mode_of(request, self._identity)
            if info.moves_as == Mode.RECOMPUTE and has_kv(request):
                info.detail = self._identity.kv_unsupported or ""
        if move is not None:
            info.move.CopyFrom(
                MoveInfo(
                    migration_id=move.migration_id,
                    direction=MoveInfo.OUT,
                    phase=move.progress.phase,
                    peer_instance_id=move.to.instance,
                    peer_address=str(move.to.address),
                    transport=move.progress.transport,
                )
            )
        return info

    def _arriving_info(self, move: DestinationShell, request: Request) -> RequestInfo:
        info = self._base_info(request)
        info.phase = RequestInfo.RESERVED
        info.num_blocks = move.blocks.count
        info.reason, info.detail = reason_number(Reason.ALREADY_MIGRATING), "it is on its way here"
        info.move.CopyFrom(
            MoveInfo(
                migration_id=move.migration_id,
                direction=MoveInfo.IN,
                phase=MovePhase.RESERVING,
                peer_instance_id=move.source_instance,
                peer_address=move.source_address,
                transport=move.blocks.transport,
            )
        )
        return info

    def _base_info(self, request: Request) -> RequestInfo:
        residence = residence_of(request)
        epoch = residence.epoch if residence else HOME
        return RequestInfo(
            request_id=request.request_id,
            external_request_id=residence.external_request_id if residence else request.request_id,
            status=request.status.name.lower(),
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            computed_tokens=request.num_computed_tokens - request.num_in_flight_tokens,
            origin=(residence.origin or "") if residence else "",
            epoch=epoch_message(epoch),
            priority=request.priority,
            arrival_time=request.arrival_time,
        )


def _phase(request: Request, *, frozen: bool) -> RequestInfo.Phase:
    if frozen:
        return RequestInfo.FROZEN
    if request.status == RequestStatus.PREEMPTED:
        return RequestInfo.PREEMPTED
    if request.status != RequestStatus.RUNNING:
        return RequestInfo.WAITING
    return RequestInfo.PREFILL if request.is_prefill_chunk or not request.num_output_tokens else RequestInfo.DECODE
