# SPDX-License-Identifier: Apache-2.0
"""What the llumlet says about its engine: load, requests, metadata. And which requests a rule selects.

`status` and `requests` run on the engine's loop, between steps, so that their numbers belong together.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

import vllm_llumnix
from llumlet.types import (
    Address,
    Epoch,
    InstanceMetadata,
    InstanceStatus,
    ListRequestsResponse,
    MigrateRequest,
    MigrationReqPolicy,
    MigrationType,
    MoveInfo,
    MovePhase,
    RequestInfo,
    parse_reason,
)
from vllm_llumnix import hooks
from vllm_llumnix.engine.portability import why_not_portable
from vllm_llumnix.engine.request_state import residence_of, why_not_now
from vllm_llumnix.errors import Reason
from vllm_llumnix.ids import HOME, RequestId
from vllm_llumnix.migration.selection import Candidate, parse_rule, select

if TYPE_CHECKING:
    from vllm_llumnix.engine.arrivals import Arrivals, IncomingMove
    from vllm_llumnix.engine.bypass import Bypass
    from vllm_llumnix.engine.departures import Departures
    from vllm_llumnix.engine.kvconn import KVConnection


class Listing:
    """Read-only views of one engine."""

    def __init__(self, bypass: Bypass, kvconn: KVConnection, departures: Departures) -> None:
        self._bypass = bypass
        self._engine = bypass.engine
        self._kvconn = kvconn
        self._port = kvconn.port
        self._departures = departures
        self._scheduler = bypass.engine.scheduler
        self._updates = 0

    def why_not(self, request: Request) -> tuple[Reason, str] | None:
        """Why a move of this request could not begin now; None if it could."""
        identity = self._bypass.identity
        if identity.unsupported is not None:
            return Reason.NOT_PORTABLE, identity.unsupported
        portable = why_not_portable(
            request,
            model_runner_v2=identity.model_runner_v2,
            device=identity.device,
            spec_decode=identity.spec_decode,
        )
        if portable is not None:
            return Reason.NOT_PORTABLE, portable
        residence = residence_of(request)
        if residence is not None and residence.handover_open:
            return Reason.HANDOVER_OPEN, "its source has not closed the last hand-over yet"
        if residence is not None and residence.epoch != HOME and residence.next_index == residence.base:
            return Reason.NOT_STARTED, "it has not produced a token here yet"
        return why_not_now(request)

    # Selection

    def select(self, asked: MigrateRequest) -> list[str]:
        """The requests that a rule takes, best first. Ids only; whether they can move is checked again on the way."""
        unit = MigrationType.Name(asked.migration_type)
        order = MigrationReqPolicy.Name(asked.migration_req_policy or MigrationReqPolicy.SR)
        value = getattr(asked, asked.WhichOneof("value") or "num_reqs")
        rule = parse_rule(unit, order, value)
        return [str(request_id) for request_id in select(self._candidates(), rule, self._port.capacity_tokens)]

    def _candidates(self) -> list[Candidate]:
        # `running` is not in order of arrival: newcomers are put at its head.
        running = sorted(self._scheduler.running, key=lambda request: request.arrival_time)
        waiting = list(self._scheduler.waiting)
        return [
            Candidate(
                request_id=RequestId(request.request_id),
                running=is_running,
                position=position,
                num_tokens=request.num_tokens,
                movable=request.request_id not in self._departures.moves and self.why_not(request) is None,
            )
            for is_running, queue in ((True, running), (False, waiting))
            for position, request in enumerate(queue)
        ]

    # Loop thread

    def status(self, arrivals: Arrivals) -> InstanceStatus:
        scheduler, pool = self._scheduler, self._port.block_pool
        block_size, capacity = self._port.block_size, self._port.capacity_tokens
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        arriving, leaving = arrivals.pending(), list(self._departures.moves.values())
        num_running, num_waiting = scheduler.get_request_counts()
        self._updates += 1
        # One that settles meanwhile lets go of its request.
        in_tokens = sum(request.num_tokens for move in arriving if (request := move.request) is not None)
        out_tokens = sum(move.request.num_tokens for move in leaving)
        return InstanceStatus(
            instance_id=self._bypass.identity.instance,
            schedulable=scheduler.pause_state == PauseState.UNPAUSED and self._bypass.takes_requests,
            timestamp_ms=int(time.time() * 1000),
            step_id=self._kvconn.steps,
            update_id=self._updates,
            waiting_requests=[request.request_id for request in scheduler.waiting],
            num_waiting_requests=num_waiting,
            num_running_requests=num_running,
            num_total_gpu_tokens=capacity,
            num_used_gpu_tokens=(total - free) * block_size,
            num_migrate_in_reqs=len(arriving),
            num_migrate_out_reqs=len(leaving),
            num_available_migrate_in_slots=arrivals.slots.available_requests,
            num_available_migrate_out_slots=self._departures.slots.available_requests,
            num_available_migrate_in_tokens=_or_all(arrivals.slots.available_tokens, capacity),
            num_available_migrate_out_tokens=_or_all(self._departures.slots.available_tokens, capacity),
            num_migrate_in_tokens=in_tokens,
            num_migrate_out_tokens=out_tokens,
            kv_cache_usage_ratio_migrate_in=in_tokens / capacity,
            kv_cache_usage_ratio_migrate_out=out_tokens / capacity,
            incarnation=self._bypass.identity.incarnation,
            num_total_blocks=total,
            num_free_blocks=free,
            num_pinned_blocks=sum(move.num_pinned_blocks for move in leaving),
            num_reserved_blocks=sum(move.num_blocks for move in arriving),
            num_draining_blocks=arrivals.draining_blocks(),
        )

    def requests(self, arriving: list[IncomingMove]) -> ListRequestsResponse:
        response = ListRequestsResponse(
            instance_id=self._bypass.identity.instance, incarnation=self._bypass.identity.incarnation
        )
        scheduler = self._scheduler
        queued = [*scheduler.running, *scheduler.kv_holding_waiting, *scheduler.waiting]
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
            problem = (Reason.ALREADY_MIGRATING, "it is on its way")
        info = self._base_info(request)
        info.phase = _phase(request, frozen=move is not None and move.frozen)
        info.num_blocks = len(self._port.block_ids(request))
        info.movable = problem is None
        if problem is not None:
            info.reason, info.detail = parse_reason(problem[0]), problem[1]
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

    def _arriving_info(self, move: IncomingMove, request: Request) -> RequestInfo:
        info = self._base_info(request)
        info.phase = RequestInfo.RESERVED
        info.num_blocks = move.num_blocks
        info.reason, info.detail = parse_reason(Reason.ALREADY_MIGRATING), "it is on its way here"
        info.move.CopyFrom(
            MoveInfo(
                migration_id=move.migration_id,
                direction=MoveInfo.IN,
                phase=MovePhase.RESERVING,
                peer_instance_id=move.source_instance,
                peer_address=move.source_address,
                transport=move.transport,
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
            epoch=Epoch(term=epoch.term, hop=epoch.hop),
            priority=request.priority,
            arrival_time=request.arrival_time,
        )

    # Any thread

    def metadata(self, address: Address) -> InstanceMetadata:
        config, engine, vllm_config = self._bypass.config, self._engine, self._engine.vllm_config
        parallel = vllm_config.parallel_config
        now = time.time()
        return InstanceMetadata(
            instance_id=config.instance_id,
            instance_type=config.instance_type,
            backend_type="vllm",
            ip=address.host,
            ip_kvs=address.host,
            llumlet_port=address.port,
            kvt_port=address.port,
            node_id=socket.gethostname(),
            data_parallel_size=config.num_ranks,
            tensor_parallel_size=parallel.tensor_parallel_size,
            dp_rank=engine.engine_index,
            utc_create=self._bypass.started_at,
            utc_update=now,
            block_size=self._port.block_size,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            incarnation=self._bypass.identity.incarnation,
            version=vllm_llumnix.__version__,
            engine_version=vllm.__version__,
            patch_digest=hooks.ready_digest() or "",
            model=vllm_config.model_config.model,
            max_model_len=vllm_config.model_config.max_model_len,
            num_total_blocks=self._port.block_pool.num_gpu_blocks - 1,
            bytes_per_block=self._bypass.bytes_per_block,
            transports=config.transports,
            max_migrations_in=config.max_migrations_in,
            max_migrations_out=config.max_migrations_out,
            stall_budget_ms=config.stall_budget_ms,
            exact=config.exact,
            compatibility_digest=self._bypass.identity.digest,
        )


def _or_all(tokens: int | None, capacity: int) -> int:
    """What no limit leaves available: the whole cache."""
    return capacity if tokens is None else tokens


def _phase(request: Request, *, frozen: bool) -> RequestInfo.Phase:
    if frozen:
        return RequestInfo.FROZEN
    if request.status == RequestStatus.PREEMPTED:
        return RequestInfo.PREEMPTED
    if request.status != RequestStatus.RUNNING:
        return RequestInfo.WAITING
    return RequestInfo.PREFILL if request.is_prefill_chunk or not request.num_output_tokens else RequestInfo.DECODE
