# SPDX-License-Identifier: Apache-2.0
"""One pass: all policies over one snapshot. Pure: nothing is called, kept or written elsewhere.

Failover comes before balancing, whatever the order of the configuration: sick instances do not wait, and what they need
of a pass's moves is theirs. An instance is never source and destination of one pass, nor of moves that are under way
unless it falls sick meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llumsched.cluster.snapshot import Snapshot
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.pipeline import Screening, screen
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.planning.draft import Draft, Shares, caches_unknown
from llumsched.rescheduling.planning.moves import Move, Purpose
from llumsched.rescheduling.planning.pairs import Ends
from llumsched.rescheduling.planning.policies import ReschedulingPolicy
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy made of a pass."""

    policy: str
    num_sources: int
    num_destinations: int
    num_moves: int
    refused: Mapping[str, int]
    """Pairs and sources that were not chosen, by reason."""
    error: Exception | None = None
    """What a filter or selector raised. What it had chosen by then stays: each move is right by itself."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "policy": self.policy,
            "num_sources": self.num_sources,
            "num_destinations": self.num_destinations,
            "num_moves": self.num_moves,
            "refused": dict(self.refused),
            "error": "" if self.error is None else repr(self.error),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    moves: tuple[Move, ...]
    results: tuple[PolicyResult, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the filters of a policy say when its turn comes."""

    policy: ReschedulingPolicy
    candidates: Candidates
    failed: Screening
    sources: Screening
    destinations: Screening

    @property
    def ends(self) -> Ends:
        """Which instances the filters let be sources and destinations."""
        return Ends(self.sources.passed, self.destinations.passed)


Watch = Callable[[Turn, Draft], None]
"""Called when a policy's turn comes, before its selector is. Must change nothing."""


def nobody_watches(turn: Turn, draft: Draft) -> None:
    pass


def plan(
    snapshot: Snapshot,
    policies: Sequence[ReschedulingPolicy],
    history: History,
    config: ReschedulingConfig,
    now_s: float,
    view_s: float | None = None,
    shares: Shares = caches_unknown,
    reported: Snapshot | None = None,
    watch: Watch = nobody_watches,
) -> Plan:
    """The moves of one pass. `now_s` is by the clock of the history; `view_s` when the view that the snapshot is of was
    last fed, if that is not now. `shares`: what prefix caches have of each other, as far as known. `reported`: the
    cluster as it was reported, if the snapshot has been moved on. `watch` is told of each policy's turn."""
    as_of_s = now_s if view_s is None else view_s
    draft = Draft(snapshot, history, config, now_s, shares)
    results = []
    for policy in sorted(policies, key=_comes_later):
        draft.refused = Counter()
        before = len(draft.moves)
        num_sources = num_destinations = 0
        error = None
        try:
            turn = screened(policy, snapshot, as_of_s, reported)
            watch(turn, draft)
            num_sources, num_destinations = policy.selector.pair(draft, policy.name, turn.ends)
        except Exception as raised:  # noqa: BLE001 - it may be anybody's, and other policies have their turn
            error = raised
        num_moves = len(draft.moves) - before
        results.append(PolicyResult(policy.name, num_sources, num_destinations, num_moves, dict(draft.refused), error))
    return Plan(tuple(draft.moves), tuple(results))


def _comes_later(policy: ReschedulingPolicy) -> bool:
    return policy.selector.purpose is not Purpose.FAILOVER


def screened(policy: ReschedulingPolicy, snapshot: Snapshot, now_s: float, reported: Snapshot | None = None) -> Turn:
    """Runs the policy's filters. `reported` as in `plan`."""
    candidates = Candidates(snapshot, Context(now_s), reported=reported)
    failed = screen(policy.failed, candidates)
    sources, destinations = (
        screen(filters, candidates, failed.failed) for filters in (policy.sources, policy.destinations)
    )
    return Turn(policy, candidates, failed, sources, destinations)
