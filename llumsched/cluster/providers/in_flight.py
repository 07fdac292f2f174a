# SPDX-License-Identifier: Apache-2.0
"""Columns of sent requests that no status shows. `account` and `lrs` keep the counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.latency.fitting import pairs


class Counters(NamedTuple):
    """Requests sent to an instance that its status does not show.

    A request for a neutral instance is prefill work, decode work and one request.
    """

    num_requests: int = 0
    num_prefill_requests: int = 0
    num_decode_requests: int = 0
    num_uncomputed_prefill_tokens: int = 0
    num_uncomputed_prefill_pairs: int = 0
    """Pairs of a query and a key: for each of these tokens, the tokens up to it."""
    num_decode_tokens: int = 0
    num_tokens: int = 0
    num_urgent_requests: int = 0
    dispatched_ms: int = 0
    """Sum of their times of dispatch on the scheduler's clock."""

    def plus(self, other: Counters) -> Counters:
        return Counters(*map(add, self, other))

    def minus(self, other: Counters) -> Counters:
        return Counters(*map(sub, self, other))


NONE_IN_FLIGHT = Counters()


def counters_of(
    infer_type: InferType,
    num_tokens: int,
    *,
    prefilled: bool = False,
    num_hit_tokens: int = 0,
    urgent: bool = False,
) -> Counters:
    """Counters of one request. On a neutral instance it is prefill work until that is done, and decode work.
    `num_hit_tokens` of its prompt are in the prefix cache there."""
    uncomputed = max(num_tokens - num_hit_tokens, 0)
    is_prefill = infer_type is not InferType.DECODE and not prefilled
    is_decode = infer_type is not InferType.PREFILL
    return Counters(
        num_requests=1,
        num_prefill_requests=int(is_prefill),
        num_decode_requests=int(is_decode),
        num_uncomputed_prefill_tokens=uncomputed * is_prefill,
        num_uncomputed_prefill_pairs=pairs(num_tokens - uncomputed, uncomputed) * is_prefill,
        num_decode_tokens=num_tokens * is_decode,
        num_tokens=num_tokens,
        num_urgent_requests=int(urgent),
    )


class InFlight:
    """Nonzero counters by instance id. A provider, whose columns have the counters' names with `sent_` in place of
    `num_`."""

    columns: Sequence[str] = tuple(name.replace("num_", "sent_", 1) for name in Counters._fields)

    def __init__(self) -> None:
        self._counters: dict[str, Counters] = {}
        self._listeners: list[Callable[[str], None]] = []

    def of(self, instance_id: str) -> Counters:
        return self._counters.get(instance_id, NONE_IN_FLIGHT)

    @property
    def counters(self) -> Mapping[str, Counters]:
        return self._counters

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float] | None:
        """Counters of a new instance; later changes come through `on_change`."""
        return self.of(instance.id) if before is None else None

    def on_change(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def add(self, instance_id: str, counters: Counters) -> None:
        self._set(instance_id, self.of(instance_id).plus(counters))

    def subtract(self, instance_id: str, counters: Counters) -> None:
        self._set(instance_id, self.of(instance_id).minus(counters))

    def _set(self, instance_id: str, counters: Counters) -> None:
        if counters == NONE_IN_FLIGHT:
            self._counters.pop(instance_id, None)
        else:
            self._counters[instance_id] = counters
        for listener in self._listeners:
            listener(instance_id)
