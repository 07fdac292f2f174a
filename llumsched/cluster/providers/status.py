# SPDX-License-Identifier: Apache-2.0
"""Columns of an instance's status under its field names, and the time of its receipt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from google.protobuf.descriptor import FieldDescriptor

from llumlet.contract.types import InstanceStatus
from llumsched.cluster.instance import Instance

_TRUTHS_AND_WORDS: Final = (FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM)
_NO_NUMBERS: Final = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
_MAY_BE_NEGATIVE: Final = frozenset({"profiling_id", "update_id", "step_id"})
_ALL: Final = [
    field for field in InstanceStatus.DESCRIPTOR.fields if not field.is_repeated and field.cpp_type not in _NO_NUMBERS
]
_AMOUNTS: Final = [
    field.name for field in _ALL if field.cpp_type not in _TRUTHS_AND_WORDS and field.name not in _MAY_BE_NEGATIVE
]
_FIELDS: Final = (*_AMOUNTS, *(field.name for field in _ALL if field.name not in _AMOUNTS))
NUM_AMOUNTS: Final = len(_AMOUNTS)
"""Number of the leading numbers of a status that must not be negative."""
numbers_of: Final = attrgetter(*_FIELDS)
"""All numbers of a status, in the order of the columns."""
_NONE_YET: Final = numbers_of(InstanceStatus())


def number_faults(numbers: Sequence[float]) -> list[str]:
    """Faults of numbers that are not finite, or negative amounts. The usual case costs three calls into C: a finite sum
    contains neither infinity nor NaN."""
    if math.isfinite(sum(numbers)) and min(numbers[:NUM_AMOUNTS]) >= 0:
        return []
    return [
        f"{name} is {value}"
        for position, (name, value) in enumerate(zip(_FIELDS, numbers, strict=True))
        if not math.isfinite(value) or (value < 0 and position < NUM_AMOUNTS)
    ]


@dataclass(frozen=True, slots=True)
class StatusColumns:
    columns: Sequence[str] = ("reported", "received_s", "as_of_s", "lost", "carries_kv", *_FIELDS)
    """`reported`: 1 if there is a status; before the first, the rest is 0. `received_s`: by the view's clock.
    `lost`: 1 in a snapshot, of instances that went without a word a while ago.
    `carries_kv`: 1 if requests can leave and come with their KV cache."""

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float]:
        status = instance.status
        if status is None:
            return (0, instance.received_s, instance.as_of_s, 0, 0, *_NONE_YET)
        numbers = instance.numbers or numbers_of(status)
        received_s = instance.received_s
        return (1, received_s, received_s - instance.late_s, 0, not status.kv_unsupported, *numbers)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Keeps no listener: changes come with reports only."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """Requests that move, in the form of a status's columns."""

    requests: float
    tokens: float
    """Tokens of prompt and output of all the requests."""
    waiting: bool = False
    """True if the requests have no KV cache yet; otherwise they decode."""
    urgent: bool = False

    @property
    def negative(self) -> Cargo:
        """The cargo as a change of the instance that it leaves."""
        return Cargo(-self.requests, -self.tokens, self.waiting, self.urgent)

    @property
    def weight(self) -> Mapping[str, float]:
        """Changes of the columns of the instance that it comes to."""
        if self.waiting:
            return {
                "num_waiting_requests": self.requests,
                "num_uncomputed_tokens_all_waiting_prefills": self.tokens,
                "num_unallocated_tokens_all_waiting_requests": self.tokens,
            }
        urgent = self.requests * self.urgent
        return {
            "num_running_requests": self.requests,
            "scheduler_running_to_decode_requests_num": self.requests,
            "scheduler_running_to_decode_tokens_num": self.tokens,
            "num_used_gpu_tokens": self.tokens,
            "num_urgent_requests": urgent,
            "scheduler_running_to_decode_urgent_requests_num": urgent,
        }
