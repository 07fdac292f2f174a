# SPDX-License-Identifier: Apache-2.0
"""Selects the requests of a move by rule.

A rule is a unit, a value and an order: "requests worth 2,048 tokens, shortest first". The order selects and sorts
requests; the value is a budget in the unit. A request is taken while the total stays within the budget and skipped if
it does not fit. If none fits, the first one is taken alone, since otherwise a long request could never move.

Urgent requests stay while others that could move run there: these make room for them. Waiting requests lose nothing by
a move, and are taken whatever their priority.

`num_tokens`: what the request's KV cache holds or will hold, each token of prompt and output counted once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import msgspec

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import RequestId
from llumlet.protocol.urgency import is_urgent

ALL = -1
"""Value of NUM_REQ: every request, waiting ones included, whatever the order says."""
_MOST = 1 << 62
"""The largest value: messages have 64 bits for it."""


class Unit(enum.StrEnum):
    """The unit of the value."""

    NUM_REQ = "NUM_REQ"
    TOKEN = "TOKEN"
    RATIO = "RATIO"
    """Share of the instance's KV cache, 0 to 1."""


class Order(enum.StrEnum):
    LCR = "LCR"
    """Last come, running."""
    FCR = "FCR"
    """First come, running."""
    LR = "LR"
    """Longest running."""
    SR = "SR"
    """Shortest running."""
    FCW = "FCW"
    """First come, waiting."""
    FCWSR = "FCWSR"
    """First come, waiting; only if none waits, shortest running."""
    LP = "LP"
    """Lowest priority running, which is the largest number; of equals the longest."""


class Candidate(msgspec.Struct, frozen=True):
    """A request as its engine's queues hold it. `position` counts from the head of its queue, running or waiting."""

    request_id: RequestId
    running: bool
    position: int
    num_tokens: int
    movable: bool = True
    """Portable, not moving already, and with nothing in the way at this moment."""
    priority: int = 0
    """Lower numbers come first, as in vLLM."""


class Rule(msgspec.Struct, frozen=True):
    """Raises ValueError when built with a value that its unit does not allow."""

    unit: Unit
    order: Order
    value: float

    def __post_init__(self) -> None:
        if fault := value_fault(self.unit, self.value):
            raise ValueError(f"{self.unit} {fault}")

    @property
    def is_all(self) -> bool:
        return self.unit is Unit.NUM_REQ and self.value == ALL


def value_fault(unit: Unit, value: float) -> str:
    """The fault of a value in this unit, to follow its name; "" if there is none."""
    if unit is Unit.RATIO:
        return "" if 0 < value <= 1 else f"{value:g} is not in (0, 1]"
    if not math.isfinite(value) or value != int(value):
        return f"{value:g} is not a whole number"
    if value >= _MOST:
        return f"{value:g} is too large"
    if value >= 1 or (unit is Unit.NUM_REQ and value == ALL):
        return ""
    least = f"neither positive nor {ALL} (all)" if unit is Unit.NUM_REQ else "not positive"
    return f"{value:.0f} is {least}"


def parse_rule(unit: str, order: str, value: float) -> Rule:
    """Raises Refused(invalid_request) for a word or a value that does not exist."""
    try:
        return Rule(Unit(unit), Order(order), value)
    except ValueError as error:
        raise Refused(Reason.INVALID_REQUEST, str(error)) from error


def select(
    candidates: Sequence[Candidate], rule: Rule, capacity_tokens: int, limit_tokens: float = math.inf
) -> list[RequestId]:
    """The requests to move, in order. `capacity_tokens` is the size of the KV cache. Nothing movable: empty. One that
    goes alone because nothing fits is shorter than `limit_tokens`."""
    movable = [candidate for candidate in candidates if candidate.movable]
    if rule.is_all:
        asked = in_order(movable, rule.order)
        seen = {candidate.request_id for candidate in asked}
        rest = [candidate for candidate in movable if candidate.request_id not in seen]
        return [candidate.request_id for candidate in asked + sorted(rest, key=_by_queue)]
    return take(in_order(movable, rule.order), rule, capacity_tokens, limit_tokens)


def take(
    ordered: Sequence[Candidate], rule: Rule, capacity_tokens: int, limit_tokens: float = math.inf
) -> list[RequestId]:
    """Greedily within the budget; the first below the limit alone if none fits."""
    budget = int(capacity_tokens * rule.value) if rule.unit is Unit.RATIO else int(rule.value)
    taken: list[RequestId] = []
    for candidate in ordered:
        cost = 1 if rule.unit is Unit.NUM_REQ else candidate.num_tokens
        if cost <= budget:
            budget -= cost
            taken.append(candidate.request_id)
    return taken or [candidate.request_id for candidate in ordered if candidate.num_tokens < limit_tokens][:1]


def in_order(candidates: Sequence[Candidate], order: Order) -> list[Candidate]:
    """Requests that the order looks at, in its sequence. Ties: first come, then the request id."""
    waiting = sorted((c for c in candidates if not c.running), key=_by_queue)
    running = [c for c in candidates if c.running]
    running = [c for c in running if not is_urgent(c.priority)] or running
    match order:
        case Order.FCW:
            return waiting
        case Order.FCWSR:
            return waiting or sorted(running, key=_BY[Order.SR])
        case _:
            return sorted(running, key=_BY[order])


def _by_queue(candidate: Candidate) -> tuple[int, int, str]:
    return (candidate.running, candidate.position, candidate.request_id)


_BY: dict[Order, Callable[[Candidate], tuple[int | str, ...]]] = {
    Order.LCR: lambda c: (-c.position, c.request_id),
    Order.FCR: lambda c: (c.position, c.request_id),
    Order.LR: lambda c: (-c.num_tokens, c.position, c.request_id),
    Order.SR: lambda c: (c.num_tokens, c.position, c.request_id),
    Order.LP: lambda c: (-c.priority, -c.num_tokens, c.position, c.request_id),
}
