# SPDX-License-Identifier: Apache-2.0
"""Which requests to name to a source, where its own choice by rule would not do.

The rules are those of the llumlet: in order, as many as fit the budget, and the first alone if none fits. Beyond them,
requests that were moved there lately are left out, and the whole never exceeds the limit of the move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from llumlet.types import Mode, RequestInfo
from llumsched.rescheduling.moves import ALL, Move, Order, Rule


def choose(
    requests: Sequence[RequestInfo], move: Move, total_tokens: int, cooling: Collection[str]
) -> list[RequestInfo]:
    """`requests` in the order of the source's queues; `total_tokens` is the size of its KV cache."""
    selection = move.selection
    movable = [request for request in requests if _loses_nothing(request) and request.request_id not in cooling]
    ordered = _in_order(movable, selection.order)
    if selection.rule is Rule.NUM_REQ and selection.value == ALL:
        return ordered + [request for request in movable if request not in ordered]
    budget = total_tokens * selection.value if selection.rule is Rule.RATIO else selection.value
    most = move.limit_tokens if move.limit_tokens is not None else float("inf")
    taken: list[RequestInfo] = []
    for request in ordered:
        cost = 1 if selection.rule is Rule.NUM_REQ else num_tokens(request)
        if cost <= budget:
            budget -= cost
            taken.append(request)
    return taken or [request for request in ordered if num_tokens(request) < most][:1]


def _loses_nothing(request: RequestInfo) -> bool:
    """Whether it can be moved, and with the KV cache that it has."""
    return request.movable and (request.moves_as != Mode.RECOMPUTE or request.phase in _WAITING)


def num_tokens(request: RequestInfo) -> int:
    return request.prompt_tokens + request.output_tokens


def _in_order(requests: list[RequestInfo], order: Order) -> list[RequestInfo]:
    waiting = [request for request in requests if request.phase in _WAITING]
    running = [request for request in requests if request.phase not in _WAITING]
    match order:
        case Order.FCW:
            return waiting
        case Order.FCWSR:
            return waiting or sorted(running, key=num_tokens)
        case Order.FCR:
            return running
        case Order.LCR:
            return running[::-1]
        case _:
            return sorted(running, key=_LENGTH[order])


_WAITING = (RequestInfo.WAITING, RequestInfo.PREEMPTED)
_LENGTH: dict[Order, Callable[[RequestInfo], int]] = {
    Order.SR: num_tokens,
    Order.LR: lambda request: -num_tokens(request),
}
