# SPDX-License-Identifier: Apache-2.0
"""What is known of a request before it is placed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A request that asks for a place. Whatever a later policy needs of one (a prefix, a priority, a deadline) becomes
    a field here; providers and filters are given all of it."""

    id: str = ""
    model: str = ""
    """The model's name; empty: any."""
    prompt_num_tokens: int = 0
    """Tokens of the prompt; 0 when they were not counted."""
    avoid: frozenset[str] = frozenset()
    """Ids of instances that had it and failed it; taken again only if nobody else is there."""
    tells_tries: bool = False
    """Whether `avoid` names all: the id need not be remembered, and may be a session's that comes again and again."""
