# SPDX-License-Identifier: Apache-2.0
"""A move as the message that a llumlet is sent."""

from __future__ import annotations

from llumlet.contract.types import MigrateRequest, Mode
from llumlet.protocol.move.selection import Unit
from llumsched.cluster.instance import Instance
from llumsched.rescheduling.planning.moves import Move, Purpose


def migrate_request(move: Move, destination: Instance, leader_term: int = 0) -> MigrateRequest:
    """The order for a source. A failover takes what cannot bring its KV cache along as well: another prefill is better
    than an end. To balance, it is not worth one."""
    selection, llumlet = move.selection, destination.llumlet
    request = MigrateRequest(
        src_engine_id=move.source,
        dst_engine_id=move.destination,
        dst_engine_ip=llumlet.host,
        dst_engine_port=llumlet.port,
        migration_type=str(selection.unit),
        migration_req_policy=str(selection.order),
        trigger_policy=move.policy,
        leader_term=leader_term,
        method=Mode.MODE_UNSPECIFIED if move.purpose is Purpose.FAILOVER else Mode.LIVE,
    )
    match selection.unit:
        case Unit.NUM_REQ:
            request.num_reqs = int(selection.value)
        case Unit.TOKEN:
            request.num_tokens = int(selection.value)
        case Unit.RATIO:
            request.kv_cache_usage_ratio = selection.value
    return request
