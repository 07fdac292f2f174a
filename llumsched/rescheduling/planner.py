# SPDX-License-Identifier: Apache-2.0
"""One pass: all policies over one snapshot. Pure: nothing is called, kept or written elsewhere.

Failover comes before balancing, whatever the order of the configuration: sick instances do not wait, and what they need
of a pass's moves is theirs. An instance is never source and destination of one pass, nor of moves that are under way
unless it falls sick meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from llumsched.rescheduling.balance import balance
from llumsched.rescheduling.config import Config
from llumsched.rescheduling.draft import Draft
from llumsched.rescheduling.failover import fail_over
from llumsched.rescheduling.history import History
from llumsched.rescheduling.moves import Move
from llumsched.rescheduling.snapshot import Snapshot

Policy = Callable[[Draft, str], tuple[int, int]]
"""Adds its moves to the draft; returns the numbers of possible sources and destinations."""

_POLICIES: Final[Mapping[str, Policy]] = {
    "prefill_failover": partial(fail_over, infer_type="prefill"),
    "decode_failover": partial(fail_over, infer_type="decode"),
    "neutral_failover": partial(fail_over, infer_type="neutral"),
    "decode_load": partial(balance, infer_type="decode"),
    "neutral_load": partial(balance, infer_type="neutral"),
}
"""In the order in which they get their turn."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy made of a pass."""

    policy: str
    num_sources: int
    num_destinations: int
    num_moves: int
    refused: Mapping[str, int]
    """Pairs and sources that were not chosen, by reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    moves: tuple[Move, ...]
    results: tuple[PolicyResult, ...]


def plan(snapshot: Snapshot, history: History, config: Config, now_s: float) -> Plan:
    draft = Draft(snapshot, history, config, now_s)
    results = []
    for name, policy in _POLICIES.items():
        if name in config.policies:
            draft.refused = Counter()
            before = len(draft.moves)
            num_sources, num_destinations = policy(draft, name)
            num_moves = len(draft.moves) - before
            results.append(PolicyResult(name, num_sources, num_destinations, num_moves, dict(draft.refused)))
    return Plan(tuple(draft.moves), tuple(results))
