# SPDX-License-Identifier: Apache-2.0
"""A pass that starts nothing, in words: its moves, the possible sources and destinations, and the reasons against the
others.

The masks are the pass's own; its filters and selectors give the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from llumsched.cluster.columns import Values
from llumsched.policy.candidates import Candidates
from llumsched.policy.metrics import Metric
from llumsched.policy.pipeline import Screening
from llumsched.policy.reasons import json_number, refusals
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.pairs import ExplainedSelector, PairSelector, Reasons, Unfit
from llumsched.rescheduling.planning.planner import Plan, Turn

_HISTORY: Final = "history"
"""Name for refusals by recent history."""


@dataclass(frozen=True, slots=True)
class _End:
    """Refusals of instances as one end of a move."""

    screening: Screening
    others: Sequence[tuple[str, Reasons]]
    """Refusals beside the filters', with reasons."""

    def of(self, candidates: Candidates, row: int) -> dict[str, Any]:
        said = [(by, reason) for by, reasons in self.others for reason, mask in reasons if mask[row]]
        refused = _filters(self.screening, candidates, row)
        refused += [{"by": by, "reason": reason} for by, reason in said]
        return {"able": not refused, "refused_by": refused}


@dataclass(frozen=True, slots=True)
class _Found:
    """The state at a policy's turn."""

    selector: PairSelector
    load: Values | None
    """Load by the selector's metric, with earlier moves; None if it has no metric."""
    candidates: Candidates
    failed: Screening
    source: _End
    destination: _End

    def instances(self) -> Iterator[dict[str, Any]]:
        """Each instance with its reasons, by id."""
        for row, instance in enumerate(self.candidates.cluster.instances):
            yield {
                "instance_id": instance.id,
                "load": None if self.load is None else json_number(self.load[row]),
                "failed_by": _filters(self.failed, self.candidates, row),
                "source": self.source.of(self.candidates, row),
                "destination": self.destination.of(self.candidates, row),
            }


class PassWatcher:
    """Remembers the state at each policy's turn: a `planner.Watch`."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}
        """States by the policy's name."""

    def __call__(self, turn: Turn, draft: Draft) -> None:
        selector = turn.policy.selector
        metric, name = _metric(selector), selector.name
        load = None if metric is None else metric.values(draft.projected).copy()
        unfit = selector.unfit(draft) if isinstance(selector, ExplainedSelector) else Unfit((), ())
        resting = _resting(draft)
        self._found[turn.policy.name] = _Found(
            selector,
            load,
            turn.candidates,
            turn.failed,
            _End(turn.sources, [(name, unfit.sources), (_HISTORY, resting.sources)]),
            _End(turn.destinations, [(name, unfit.destinations), (_HISTORY, resting.destinations)]),
        )

    def of(self, policy: str) -> _Found | None:
        """The state at a policy's turn; None if one of its filters raised."""
        return self._found.get(policy)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The pass that would be made now."""

    skipped: str = ""
    """The reason why nothing would be planned."""
    plan: Plan = Plan((), ())
    watcher: PassWatcher = field(default_factory=PassWatcher)

    def of_policies(self, only: str = "") -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any]]]]:
        """Each policy's part as JSON, in order, or that of one alone; and the instances, which are made one by one, as
        a thousand take some hundredths of a second."""
        for result in self.plan.results:
            if not only or result.policy == only:
                found = self.watcher.of(result.policy)
                moves = [move.to_dict() for move in self.plan.moves if move.policy == result.policy]
                instances = iter(()) if found is None else found.instances()
                yield result.to_dict() | _described(found) | {"moves": moves}, instances


def _described(found: _Found | None) -> dict[str, Any]:
    metric = None if found is None else _metric(found.selector)
    return {
        "selector": None if found is None else found.selector.name,
        "metric": None if metric is None else metric.name,
    }


def _metric(selector: PairSelector) -> Metric | None:
    return selector.metric if isinstance(selector, ExplainedSelector) else None


def _resting(draft: Draft) -> Unfit:
    """Instances that are avoided for a while."""
    history, ids = draft.history, draft.snapshot.ids
    avoided = history.avoided_destinations(draft.now_s)
    sources = [history.source_avoided(one, draft.now_s) for one in ids]
    destinations = [one in avoided for one in ids]
    return Unfit(
        [("is left alone for a while: it gave nothing, or failed", np.array(sources, np.bool_))],
        [("is left alone for a while: it refused, or failed", np.array(destinations, np.bool_))],
    )


def _filters(screening: Screening, candidates: Candidates, row: int) -> list[dict[str, str]]:
    return [{"by": one.filter, "reason": one.reason} for one in refusals(screening, candidates, row)]
