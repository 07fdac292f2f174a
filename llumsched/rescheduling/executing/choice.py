# SPDX-License-Identifier: Apache-2.0
"""Which requests to name to a source, where its own choice by rule would not do.

The rules are those of the llumlet. Beyond them, requests that were moved there lately are left out, as is what would go
without the KV cache that it has, and the first alone must be within the limit of the move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from llumlet.contract.types import Mode, RequestInfo
from llumlet.protocol.ids import RequestId
from llumlet.protocol.move.selection import Candidate, Rule, select
from llumsched.rescheduling.planning.moves import Move

_WAITING = (RequestInfo.WAITING, RequestInfo.PREEMPTED)


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
    """Whether a request can be moved, and with the KV cache that it has."""
    return request.movable and (request.moves_as != Mode.RECOMPUTE or request.phase in _WAITING)
