# SPDX-License-Identifier: Apache-2.0
"""A move as the message that a llumlet is sent."""

from __future__ import annotations

from llumlet.types import MigrateRequest
from llumsched.cms.view import Instance
from llumsched.rescheduling.moves import Move, Rule


def migrate_request(move: Move, destination: Instance) -> MigrateRequest:
    selection, llumlet = move.selection, destination.llumlet
    request = MigrateRequest(
        src_engine_id=move.source,
        dst_engine_id=move.destination,
        dst_engine_ip=llumlet.host,
        dst_engine_port=llumlet.port,
        migration_type=str(selection.rule),
        migration_req_policy=str(selection.order),
        trigger_policy=move.policy,
    )
    match selection.rule:
        case Rule.NUM_REQ:
            request.num_reqs = int(selection.value)
        case Rule.TOKEN:
            request.num_tokens = int(selection.value)
        case Rule.RATIO:
            request.kv_cache_usage_ratio = selection.value
    return request
