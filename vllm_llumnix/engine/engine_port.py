# SPDX-License-Identifier: Apache-2.0
"""The door of an engine: the verbs that both sides of a move need of it, and the values that they exchange.

`EngineLoop` is vLLM's port, checked by mypy where the shells take it. The shells in `moves` import nothing of vLLM. A
second engine implements `EnginePort`; its duties:

1. Requests and blocks change only between two steps: `call` runs a function there, and awaits its result.
2. Blocks that `call_for_blocks` hands out are written by no step that is still in flight.
3. `freeze` stops scheduling a request. `WatchedRequest.on_drained` is called between steps until no step works on it.
4. A pinned block keeps its bytes until `unpin`, whatever becomes of its request.
5. A request is visible to the engine's scheduler from `admit` on, and not before.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from llumlet.protocol.errors import Reason
from vllm_llumnix.engine.vllm_types import Block, Request

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """References on blocks of the pool, to be given back with `SchedulerPort.unpin`, once."""

    blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True, slots=True)
class Frontier:
    """Copyable part of a running request: full rows of final KV, `[from_block, frontier_blocks)` pinned. `block_ids`
    are the blocks of the rows, one after the other."""

    frontier_blocks: int
    num_tokens: int
    block_ids: list[int]
    output_token_ids: Sequence[int]
    pin: Pin


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRequest:
    """A request that no step in flight will touch any more; every block is pinned, or none if it leaves them behind.
    `num_blocks`: rows; `block_ids`: their blocks. `num_accepted`: drafts of its last step, behind which recurrent
    states are in blocks of their own, `accepted_ids`; none if nothing was accepted."""

    request: Request
    num_tokens: int
    computed_tokens: int
    num_blocks: int
    block_ids: list[int]
    state_ids: list[int]
    output_token_ids: Sequence[int]
    pin: Pin
    num_accepted: int = 0
    accepted_ids: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks held for a request: rows, of which the prefix cache has the first `num_hits` already."""

    num_hits: int = 0
    num_rows: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """Row by row."""
    state_ids: list[int] = dataclasses.field(default_factory=list)
    """Blocks for the latest states, one of each group that has states."""
    num_blocks: int = 0
    """All blocks that are held, of every group."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallOff:
    """Why moves end. `what` happened to this engine; the reasons are those of the moves out of it and into it."""

    at_source: Reason
    at_destination: Reason
    what: str


class WatchedRequest(abc.ABC):
    """A request on its way out, as the loop watches it: see `EnginePort.watch`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_preemptions: int = request.num_preemptions
        self.freezing = False
        self.frozen = False

    @abc.abstractmethod
    def on_drained(self) -> bool:
        """Called between steps from the freeze on, until it returns True: no step in flight works on the request."""

    @abc.abstractmethod
    def on_gone(self, kind: str) -> None:
        """Called once, when the request was "finished", "aborted" or "preempted" by its own engine."""


class ThreadPort(Protocol):
    """The thread of the shells."""

    def post(self, function: Callable[..., None], *args: Any) -> None: ...


class ReservationPort(Protocol):
    """Blocks held for requests that may come. Loop thread only."""

    def grow(self, request: Request, num_tokens: int) -> Reserved: ...

    def cancel(self, request: Request) -> None: ...


class SessionPort(Protocol):
    """Requests whose input comes in parts: parts wait while one is on its way out. Loop thread only."""

    def hold(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...


class RequestPort(Protocol):
    """Operations on the engine's requests and blocks. Loop thread only, but for the properties. `rows`: `BlockRows`."""

    @property
    def rows(self) -> Any: ...

    @property
    def block_size(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def loses_states_by_waiting(self) -> bool:
        """True if a request with states has to start over when a step has left it out."""

    @property
    def reservations(self) -> ReservationPort: ...

    @property
    def sessions(self) -> SessionPort: ...

    def find(self, request_id: str) -> Request: ...

    def why_not_now(self, request: Request) -> tuple[Reason, str] | None: ...

    def frontier(self, request: Request, from_block: int, known_output: int, rows: Any = None) -> Frontier: ...

    def drained(
        self, request: Request, known_output: int, *, with_kv: bool = True, rows: Any = None
    ) -> FrozenRequest | None: ...

    def unfreeze(self, request: Request) -> None: ...

    def start_over(self, request: Request) -> None: ...

    def release(self, request: Request) -> None: ...

    def unpin(self, pin: Pin) -> None: ...

    def touch(self) -> None:
        """Has the status told again: moves have changed. Any thread."""


class EnginePort(Protocol):
    """An engine, as moves see it."""

    @property
    def port(self) -> RequestPort: ...

    @property
    def thread(self) -> ThreadPort: ...

    @property
    def takes_requests(self) -> bool: ...

    # Llumlet thread

    def call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]: ...

    def call_for_blocks(
        self, function: Callable[..., T], *args: Any, behind_outputs: bool = False
    ) -> asyncio.Future[T]: ...

    async def warm_up(self) -> None: ...

    def audit_when_idle(self) -> None: ...

    # Loop thread

    def watch(self, leaving: WatchedRequest) -> None: ...

    def unwatch(self, request_id: str) -> None: ...

    def freeze(self, leaving: WatchedRequest) -> None: ...

    def reserve(
        self, request: Request, queued: bool, use_prefix_cache: bool, computed_tokens: int, rows: Any = None
    ) -> Reserved: ...

    def admit(self, request: Request, computed_tokens: int) -> None: ...
