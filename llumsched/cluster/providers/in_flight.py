# SPDX-License-Identifier: Apache-2.0
"""Counters of what was sent to each instance, and who hears of their changes. `account` and `lrs` keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llumsched.scheduling.load import NONE_IN_FLIGHT, Counters, InferType


def counters_of(
    infer_type: InferType, num_tokens: int, uncomputed_tokens: int | None = None, *, prefilled: bool = False
) -> Counters:
    """Of one request. On a neutral instance it is prefill work, until that is done, and decode work."""
    is_prefill = infer_type is not InferType.DECODE and not prefilled
    is_decode = infer_type is not InferType.PREFILL
    return Counters(
        num_requests=1,
        num_prefill_requests=int(is_prefill),
        num_decode_requests=int(is_decode),
        num_uncomputed_prefill_tokens=(num_tokens if uncomputed_tokens is None else uncomputed_tokens) * is_prefill,
        num_decode_tokens=num_tokens * is_decode,
        num_tokens=num_tokens,
    )


class InFlight:
    """By instance id. Only what is not zero is kept."""

    def __init__(self) -> None:
        self._counters: dict[str, Counters] = {}
        self._listeners: list[Callable[[str], None]] = []

    def of(self, instance_id: str) -> Counters:
        return self._counters.get(instance_id, NONE_IN_FLIGHT)

    @property
    def counters(self) -> Mapping[str, Counters]:
        return self._counters

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Called with the id of an instance whose counters changed."""
        self._listeners.append(listener)

    def add(self, instance_id: str, counters: Counters) -> None:
        self._set(instance_id, self.of(instance_id) + counters)

    def subtract(self, instance_id: str, counters: Counters) -> None:
        self._set(instance_id, self.of(instance_id) - counters)

    def _set(self, instance_id: str, counters: Counters) -> None:
        if counters == NONE_IN_FLIGHT:
            self._counters.pop(instance_id, None)
        else:
            self._counters[instance_id] = counters
        for listener in self._listeners:
            listener(instance_id)
