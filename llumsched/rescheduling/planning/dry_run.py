# SPDX-License-Identifier: Apache-2.0
"""A pass that starts nothing, in words: what it would move, who could give and take, and why the others could not.

The masks are those of the pass itself; its filters and selectors say the reasons.
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
"""Who refuses an end that is left alone for a while."""


@dataclass(frozen=True, slots=True)
class _End:
    """What keeps instances from giving, or from taking."""

    screening: Screening
    others: Sequence[tuple[str, Reasons]]
    """Who else refuses some, beside the filters, and why."""

    def of(self, candidates: Candidates, row: int) -> dict[str, Any]:
        said = [(by, reason) for by, reasons in self.others for reason, mask in reasons if mask[row]]
        refused = _filters(self.screening, candidates, row)
        refused += [{"by": by, "reason": reason} for by, reason in said]
        return {"able": not refused, "refused_by": refused}


@dataclass(frozen=True, slots=True)
class _Found:
    """What there was when a policy's turn came."""

    selector: PairSelector
    load: Values | None
    """By the selector's metric, with the moves under way and those of policies before it; None: it has no metric."""
    candidates: Candidates
    failed: Screening
    source: _End
    destination: _End

    def instances(self) -> Iterator[dict[str, Any]]:
        """What there is to say of each instance, by id."""
        for row, instance in enumerate(self.candidates.cluster.instances):
            yield {
                "instance_id": instance.id,
                "load": None if self.load is None else json_number(self.load[row]),
                "failed_by": _filters(self.failed, self.candidates, row),
                "source": self.source.of(self.candidates, row),
                "destination": self.destination.of(self.candidates, row),
            }


class PassWatcher:
    """Remembers what each policy of a pass finds: a `planner.Watch`."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}
        """By the policy's name."""

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
        """What a policy found; None if one of its filters raised."""
        return self._found.get(policy)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a pass would do now."""

    skipped: str = ""
    """The reason why it would plan nothing."""
    plan: Plan = Plan((), ())
    watcher: PassWatcher = field(default_factory=PassWatcher)

    def of_policies(self, only: str = "") -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any]]]]:
        """Each policy's part of it as JSON, in the order of their turns, or that of one alone; and what there is to say
        of each instance, which is made one by one: of a thousand it takes some hundredths of a second."""
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
    """Those that are left alone for a while."""
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
