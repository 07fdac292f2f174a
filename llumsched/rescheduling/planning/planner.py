# SPDX-License-Identifier: Apache-2.0
"""A pass of all policies over a snapshot. Pure.

Failover precedes balancing in any configuration, and takes what it needs of a pass's moves. An instance is never source
and destination in one pass, nor in running moves unless it fails meanwhile.
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
    """A policy's outcome in a pass."""

    policy: str
    num_sources: int
    num_destinations: int
    num_moves: int
    refused: Mapping[str, int]
    """Refused pairs and sources, by reason."""
    error: Exception | None = None
    """An exception of a filter or selector. Moves chosen before it stay: each is valid by itself."""

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
    """A policy's filter results at its turn."""

    policy: ReschedulingPolicy
    candidates: Candidates
    failed: Screening
    sources: Screening
    destinations: Screening

    @property
    def ends(self) -> Ends:
        """The possible sources and destinations by the filters."""
        return Ends(self.sources.passed, self.destinations.passed)


Watch = Callable[[Turn, Draft], None]
"""Called at a policy's turn before its selector. Must change nothing."""


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
    """The moves of one pass. `now_s` is on the history's clock; `view_s`: when the snapshot's view was last fed, if not
    now. `shares`: overlaps of prefix caches, as far as known. `reported`: the cluster as reported, if the snapshot is
    an estimate. `watch` is called at each policy's turn."""
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
