# SPDX-License-Identifier: Apache-2.0
"""The order for a source: the message for its llumlet, and the requests that it names.

A source chooses requests by the same rules. Requests are named where that would not do: some were moved there lately,
some would leave the KV cache that they have behind, or the first alone would be beyond the limit of the move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from llumlet.contract.types import MigrateRequest, Mode, RequestInfo
from llumlet.protocol.ids import RequestId
from llumlet.protocol.move.selection import Candidate, Rule, Unit, select
from llumsched.cluster.instance import Instance
from llumsched.rescheduling.planning.moves import Move, Purpose

_WAITING = (RequestInfo.WAITING, RequestInfo.PREEMPTED)


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


def choose(
    requests: Sequence[RequestInfo], move: Move, total_tokens: int, cooling: Collection[str]
) -> list[RequestInfo]:
    """The requests to name. `requests`: in the order of the source's queues; `total_tokens`: size of its KV cache."""
    selection = move.selection
    candidates = [
        Candidate(
            RequestId(request.request_id),
            running=request.phase not in _WAITING,
            position=position,
            num_tokens=num_tokens(request),
            priority=request.priority,
            movable=_loses_nothing(request) and request.request_id not in cooling,
        )
        for position, request in enumerate(requests)
    ]
    rule = Rule(selection.unit, selection.order, selection.value)
    limit = math.inf if move.limit_tokens is None else move.limit_tokens
    by_id = {request.request_id: request for request in requests}
    return [by_id[request_id] for request_id in select(candidates, rule, total_tokens, limit)]


def num_tokens(request: RequestInfo) -> int:
    return request.prompt_tokens + request.output_tokens


def _loses_nothing(request: RequestInfo) -> bool:
    """True if a request can be moved with the KV cache that it has."""
    return request.movable and (request.moves_as != Mode.RECOMPUTE or request.phase in _WAITING)
