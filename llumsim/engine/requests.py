# SPDX-License-Identifier: Apache-2.0
"""A request as one modelled engine has it, and who is told of it."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from llumlet.protocol.urgency import is_urgent
from llumsim.engine.blocks import Block


class Phase(enum.Enum):
    WAITING = enum.auto()
    PREFILL = enum.auto()
    """Its prompt is being computed, or, after a preemption, its output as well."""
    DECODE = enum.auto()
    FROZEN = enum.auto()
    """Holds its slot and its blocks, and is not scheduled."""
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """Times in picoseconds. While it decodes, `num_tokens`, `num_blocks` and `last_token_ps` are behind:
    `Engine.settle` brings them up to date."""

    id: str
    num_prompt: int
    max_tokens: int
    """Output tokens with which it ends."""
    priority: int = 0
    """Smaller goes first, in engines that heed it."""
    content: Sequence[Hashable] | None = None
    arrived_ps: int = 0
    external_id: str = ""
    """By which its client knows it, if that is not `id`; several may have the same."""
    is_urgent: bool = field(init=False)
    """As it came here: who waits for long gets another priority."""
    num_tokens: int = field(init=False)
    """Tokens of prompt and output."""
    num_computed: int = 0
    num_blocks: int = 0
    cached: list[Block] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    is_moving: bool = False
    has_moved: bool = False
    """Whether it has come from another engine, and has had no token here yet."""
    first_token_ps: int | None = None
    last_token_ps: int | None = None
    num_preemptions: int = 0
    preempted_ps: int | None = None
    """Since when it has had no token because of that."""
    preemption_loss_ps: int = 0
    num_recomputed: int = 0
    num_hits: int = 0
    """Tokens that the prefix cache held when it was admitted first."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt
        self.is_urgent = is_urgent(self.priority)

    @property
    def name(self) -> str:
        """As statuses and clients have it."""
        return self.external_id or self.id

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_complete(self) -> bool:
        return self.num_tokens - self.num_prompt >= self.max_tokens

    @property
    def turn(self) -> tuple[bool, int]:
        """In a queue of first come, first served: who is in the middle of a stream goes before who has yet to begin."""
        return self.preempted_ps is None and self.num_output == 0, self.arrived_ps

    @property
    def order(self) -> tuple[int, int, str]:
        """Its place in the queue of an engine that heeds priorities."""
        return self.priority, self.arrived_ps, self.id


class Watcher:
    """Told of what happens in an engine, at the step's end. A subclass says what it wants to hear."""

    def gap(self, ps: int, count: int) -> None:
        """`count` requests got a token, so long after their last."""

    def gaps(self, first_ps: int, growth_ps: int, num_steps: int, count: int) -> None:
        """In each of so many steps, each longer than the one before by `growth_ps`, `count` requests got a token."""

    def stalled(self, request: EngineRequest, ps: int) -> None:
        """A request that has moved has its first token here, so long after its last one there."""

    def preempted(self, request: EngineRequest, now_ps: int) -> None:
        """A request has lost its place in the batch, and its blocks."""

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        """A request has its last token."""
