# SPDX-License-Identifier: Apache-2.0
"""A request in one modelled engine, and the watcher of an engine."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from llumlet.protocol.urgency import is_urgent
from llumsim.engine.blocks import Block


class Phase(enum.Enum):
    WAITING = enum.auto()
    PREFILL = enum.auto()
    """The prompt is being computed and, after a preemption, the output as well."""
    DECODE = enum.auto()
    FROZEN = enum.auto()
    """The request keeps its slot and its blocks and is not scheduled."""
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request and its counts; times are picoseconds. While it decodes, `num_tokens`, `num_blocks` and `last_token_ps`
    lag behind until `Engine.settle`."""

    id: str
    num_prompt: int
    max_tokens: int
    """Output tokens at which the request ends."""
    priority: int = 0
    """Smaller goes first, in engines that heed it."""
    content: Sequence[Hashable] | None = None
    arrived_ps: int = 0
    external_id: str = ""
    """The client's id, if it is not `id`. Several requests may share it."""
    is_urgent: bool = field(init=False)
    """Urgency at arrival: ageing changes the priority later."""
    num_tokens: int = field(init=False)
    """Tokens of prompt and output."""
    num_computed: int = 0
    num_blocks: int = 0
    cached: list[Block] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    is_moving: bool = False
    has_moved: bool = False
    """True from a move until the first token here."""
    first_token_ps: int | None = None
    last_token_ps: int | None = None
    num_preemptions: int = 0
    preempted_ps: int | None = None
    """Time of the preemption, until the next token."""
    preemption_loss_ps: int = 0
    num_recomputed: int = 0
    num_hits: int = 0
    """Tokens found in the prefix cache at the first admission."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt
        self.is_urgent = is_urgent(self.priority)

    @property
    def name(self) -> str:
        """The name in statuses and at the client."""
        return self.external_id or self.id

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_complete(self) -> bool:
        return self.num_tokens - self.num_prompt >= self.max_tokens

    @property
    def turn(self) -> tuple[bool, int]:
        """Sort key without priorities: a request in the middle of its stream goes before one that has yet to begin."""
        return self.preempted_ps is None and self.num_output == 0, self.arrived_ps

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key with priorities."""
        return self.priority, self.arrived_ps, self.id


class Watcher:
    """A listener to an engine's events, called at the step's end. Subclasses override the events that they want."""

    def gap(self, ps: int, count: int) -> None:
        """`count` requests got a token, `ps` after their last."""

    def gaps(self, first_ps: int, growth_ps: int, num_steps: int, count: int) -> None:
        """`count` requests got a token in each of `num_steps` steps, each longer than the one before by `growth_ps`."""

    def stalled(self, request: EngineRequest, ps: int) -> None:
        """A moved request got its first token here, `ps` after its last one at the source."""

    def preempted(self, request: EngineRequest, now_ps: int) -> None:
        """A request lost its place in the batch, and its blocks."""

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        """A request got its last token."""
