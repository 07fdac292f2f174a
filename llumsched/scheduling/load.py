# SPDX-License-Identifier: Apache-2.0
"""What metrics and filters are functions of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from llumlet.types import InstanceStatus
from llumsched.cms.view import Instance


class InferType(StrEnum):
    """What an instance is there for."""

    NEUTRAL = "neutral"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the requests that were sent to an instance and are not in its status (yet).

    A request for a neutral instance is prefill work and decode work, and one request.
    """

    num_requests: int = 0
    num_prefill_requests: int = 0
    num_decode_requests: int = 0
    num_uncomputed_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_tokens: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.num_requests + other.num_requests,
            self.num_prefill_requests + other.num_prefill_requests,
            self.num_decode_requests + other.num_decode_requests,
            self.num_uncomputed_prefill_tokens + other.num_uncomputed_prefill_tokens,
            self.num_decode_tokens + other.num_decode_tokens,
            self.num_tokens + other.num_tokens,
        )

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.num_requests - other.num_requests,
            self.num_prefill_requests - other.num_prefill_requests,
            self.num_decode_requests - other.num_decode_requests,
            self.num_uncomputed_prefill_tokens - other.num_uncomputed_prefill_tokens,
            self.num_decode_tokens - other.num_decode_tokens,
            self.num_tokens - other.num_tokens,
        )


NONE_IN_FLIGHT = Counters()
_NO_STATUS = InstanceStatus()


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of a request before it is placed. Whatever a later policy needs of one (a prefix, a priority, a
    deadline) becomes a field here, and with it an argument of every metric and filter."""

    id: str = ""
    model: str = ""
    """Empty: any."""
    prompt_num_tokens: int = 0
    """0 when it was not counted."""
    avoid: frozenset[str] = frozenset()
    """Ids of instances that had it and failed it; taken again only if nobody else is there."""
    tells_tries: bool = False
    """`avoid` names all of them: the id need not be remembered, and may be a session's that comes again and again."""


@dataclass(frozen=True, slots=True)
class Load:
    """One instance, as a metric or a filter sees it."""

    instance: Instance
    account: Counters = NONE_IN_FLIGHT

    @property
    def status(self) -> InstanceStatus:
        """An empty one before the first has come."""
        return self.instance.status or _NO_STATUS


@dataclass(frozen=True, slots=True)
class Context:
    """What a decision is made with, the same for all instances."""

    now_s: float
    """By the clock of the view. While its store is lost, the time at which it was: instances do not grow stale
    because the store does not tell of them."""
    request: Request = field(default_factory=Request)
    complaints: Mapping[str, str] = field(default_factory=dict)
    """Of the gateway that asks: why not, by instance id."""
    lost: tuple[Instance, ...] = ()
    """Instances that went without a word a while ago. They are no candidates; others may share their domain."""
