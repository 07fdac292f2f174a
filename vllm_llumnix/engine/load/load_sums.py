# SPDX-License-Identifier: Apache-2.0
"""Load of one engine as sums over its requests, and the share of one request in them."""

from __future__ import annotations

import enum
import operator
from typing import NamedTuple, Protocol


class Countable(Protocol):
    """Attributes of vLLM's `Request` that are read."""

    request_id: str
    max_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    resumable: bool

    @property
    def num_tokens(self) -> int: ...


class Output(Protocol):
    """Attributes of vLLM's `EngineCoreOutput` that are read."""

    request_id: str
    new_token_ids: list[int]


class Place(enum.Enum):
    """State of a request: what the scheduler does with a request at the moment."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    IDLE = enum.auto()
    """It stands between two parts of its input: in the batch by its place and its blocks, with nothing to do."""


class Load(NamedTuple):
    """Sums over requests, by place; or the share of one request in them.

    To decode: requests whose work does not end with their first token, and which are not about to leave. Prefill
    tokens: those of which the KV cache is still to be computed, of requests that need more than a decode step.
    """

    num_waiting: int = 0
    waiting_to_decode: int = 0
    waiting_to_decode_tokens: int = 0
    waiting_prefill_tokens: int = 0
    waiting_unallocated_tokens: int = 0
    """Tokens whose blocks are still to be allocated: all but those in cached blocks that others hold."""
    num_loading: int = 0
    loading_tokens: int = 0
    num_running: int = 0
    running_to_decode: int = 0
    running_to_decode_tokens: int = 0
    running_prefill_tokens: int = 0
    running_unallocated_tokens: int = 0
    """Prefill tokens that no step has been given yet: their blocks are still to be allocated."""
    prefill_pairs: int = 0
    """Pairs of a query and a key of all prefill tokens, waiting and running: for each, the tokens up to it."""
    num_urgent: int = 0
    urgent_running_to_decode: int = 0

    def plus(self, other: Load) -> Load:
        return Load._make(map(operator.add, self, other))

    def minus(self, other: Load) -> Load:
        return Load._make(map(operator.sub, self, other))


NOTHING = Load()


class Hit(NamedTuple):
    """Leading tokens of a request that the prefix cache held when it began to wait, and is to hold at its turn."""

    cached_tokens: int = 0
    shared_tokens: int = 0
    """Tokens among them in blocks that others hold. The rest is in blocks that count as free."""


NO_HIT = Hit()


class Snapshot(NamedTuple):
    """The load at one moment. `waiting` and `recent` are names of requests, each once, oldest first.

    While what a step has produced is gone through, the sums and the free blocks are those before the step, and what
    has been received since: who is named as recent is counted."""

    version: int
    """Grows with every change."""
    load: Load
    waiting: tuple[str, ...]
    recent: tuple[str, ...]
    num_preemptions: int
    num_gone: int
    """Requests that ran and are gone, ended or elsewhere, since the start; and their tokens."""
    gone_tokens: int
    num_free_blocks: int
    first_waiting_tokens: int
    """Tokens, of `waiting_unallocated_tokens`, of who is first in the queue."""


def share_of(
    place: Place, request: Countable, hit: Hit = NO_HIT, *, moving: bool = False, urgent: bool = False
) -> Load:
    num_tokens = request.num_tokens
    if place is Place.LOADING:
        return Load(num_loading=1, loading_tokens=num_tokens, num_urgent=int(urgent))
    if place is Place.IDLE:
        return Load(num_running=1, num_urgent=int(urgent))
    # Tokens of a step in flight are still work.
    final_tokens = request.num_computed_tokens - request.num_in_flight_tokens
    decodes = int(request.max_tokens > 1 and not moving)
    if place is Place.WAITING:
        computed = max(final_tokens, hit.cached_tokens)
        uncomputed = num_tokens - computed
        decodes |= int(uncomputed == 1 and not moving)
        return Load(
            num_waiting=1,
            waiting_to_decode=decodes,
            waiting_to_decode_tokens=num_tokens * decodes,
            waiting_prefill_tokens=uncomputed if uncomputed > 1 else 0,
            waiting_unallocated_tokens=num_tokens - max(final_tokens, hit.shared_tokens),
            prefill_pairs=pairs(computed, uncomputed) if uncomputed > 1 else 0,
            num_urgent=int(urgent),
        )
    uncomputed = num_tokens - final_tokens
    return Load(
        num_running=1,
        running_to_decode=decodes,
        running_to_decode_tokens=num_tokens * decodes,
        running_prefill_tokens=uncomputed if uncomputed > 1 else 0,
        running_unallocated_tokens=max(0, num_tokens - request.num_computed_tokens) if uncomputed > 1 else 0,
        prefill_pairs=pairs(final_tokens, uncomputed) if uncomputed > 1 else 0,
        num_urgent=int(urgent),
        urgent_running_to_decode=decodes * urgent,
    )


def pairs(begin: int, number: int) -> int:
    """Pairs of a query and a key, of so many tokens from position `begin` on: for each, the tokens up to it."""
    return number * begin + number * (number + 1) // 2
