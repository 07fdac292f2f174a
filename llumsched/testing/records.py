# SPDX-License-Identifier: Apache-2.0
"""What a simulated instance says of itself: its metadata, its status, its requests. Computed when asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llumlet.types import (
    Health,
    InstanceMetadata,
    InstanceStatus,
    ListRequestsResponse,
    Reason,
    RequestInfo,
)

if TYPE_CHECKING:
    from llumsched.testing.agent import SimulatedAgent

_HUNG_S = 2.0


def metadata_of(agent: SimulatedAgent, created_s: float) -> InstanceMetadata:
    model = agent.engine.model
    fields: dict[str, Any] = {
        "instance_id": agent.id,
        "instance_type": "neutral",
        "backend_type": "simulated",
        "ip": "127.0.0.1",
        "ip_kvs": "127.0.0.1",
        "llumlet_port": agent.port,
        "kvt_port": agent.port,
        "node_id": "simulated-node",
        "unit_id": agent.id,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "utc_create": created_s,
        "block_size": model.block_size,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        "incarnation": agent.incarnation,
        "version": "simulated",
        "model": "simulated",
        "served_models": ["simulated"],
        "max_model_len": model.num_blocks * model.block_size,
        "num_total_blocks": model.num_blocks,
        "bytes_per_block": 1024 * model.block_size,
        "transports": ["simulated"],
        "max_migrations_in": agent.max_moves_in,
        "max_migrations_out": agent.max_moves_out,
        "stall_budget_ms": 100.0,
        "compatibility_digest": "simulated",
    }
    return InstanceMetadata(**(fields | agent.metadata_fields))


def status_of(agent: SimulatedAgent) -> InstanceStatus:
    engine = agent.engine
    model = engine.model
    running, waiting = engine.running, list(engine.waiting)
    prefills = [each for each in running if each.in_prefill]
    uncomputed_waiting = sum(each.num_tokens - each.num_computed for each in waiting)
    uncomputed_running = sum(each.num_tokens - each.num_computed for each in prefills)
    loop_age_s = time.monotonic() - engine.step_began_s if engine.step_began_s is not None else 0.0
    hung = not engine.goes_on.is_set() and loop_age_s > _HUNG_S
    return InstanceStatus(
        instance_id=agent.id,
        incarnation=agent.incarnation,
        schedulable=agent.schedulable,
        timestamp_ms=int(time.time() * 1e3),
        step_id=engine.step_id,
        update_id=engine.update_id,
        recent_waiting_requests=engine.recent_arrivals,
        waiting_requests=[each.external_id for each in waiting],
        scheduler_waiting_to_decode_requests_num=sum(each.max_tokens > 1 for each in waiting),
        num_waiting_requests=len(waiting),
        scheduler_running_to_decode_requests_num=sum(each.max_tokens > 1 for each in running),
        num_running_requests=len(running),
        num_total_gpu_tokens=model.num_blocks * model.block_size,
        num_used_gpu_tokens=(model.num_blocks - engine.free_blocks) * model.block_size,
        num_uncomputed_tokens_scheduler_waiting_prefills=uncomputed_waiting,
        scheduler_waiting_to_decode_tokens_num=sum(each.num_tokens for each in waiting if each.max_tokens > 1),
        num_uncomputed_tokens_scheduler_running_prefills=uncomputed_running,
        num_unallocated_tokens_scheduler_running_prefills=0,
        scheduler_running_to_decode_tokens_num=sum(each.num_tokens for each in running if each.max_tokens > 1),
        num_uncomputed_tokens_all_waiting_prefills=uncomputed_waiting,
        num_unallocated_tokens_all_waiting_requests=uncomputed_waiting,
        num_migrate_in_reqs=agent.moves_in,
        num_migrate_out_reqs=agent.moves_out,
        num_available_migrate_in_slots=max(0, agent.max_moves_in - agent.moves_in),
        num_available_migrate_out_slots=max(0, agent.max_moves_out - agent.moves_out),
        profiling_id=-1,
        num_total_blocks=model.num_blocks,
        num_free_blocks=engine.free_blocks,
        loop_age_ms=loop_age_s * 1e3,
        health=Health.HUNG if hung else Health.OK,
        num_preemptions=engine.num_preemptions,
    )


def listed(agent: SimulatedAgent) -> ListRequestsResponse:
    waiting = set(agent.engine.waiting)
    infos = []
    for each in agent.engine.requests:
        phase = RequestInfo.DECODE
        if each in waiting:
            phase = RequestInfo.PREEMPTED if each.num_preemptions else RequestInfo.WAITING
        elif each.in_prefill:
            phase = RequestInfo.PREFILL
        movable = not each.moving
        infos.append(
            RequestInfo(
                request_id=each.request_id,
                external_request_id=each.external_id,
                phase=phase,
                status=RequestInfo.Phase.Name(phase),
                prompt_tokens=len(each.prompt),
                output_tokens=len(each.output),
                computed_tokens=each.num_computed,
                num_blocks=each.num_blocks,
                movable=movable,
                reason=Reason.REASON_NONE if movable else Reason.ALREADY_MIGRATING,
                arrival_time=each.arrival_s,
            )
        )
    return ListRequestsResponse(instance_id=agent.id, incarnation=agent.incarnation, requests=infos)
