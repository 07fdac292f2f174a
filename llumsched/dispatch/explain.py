# SPDX-License-Identifier: Apache-2.0
"""A decision in words: the run's own masks say who was refused, the filters themselves say why."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llumsched.policy.filters import GroupFilter
from llumsched.policy.pipeline import Decision


def explain(decision: Decision) -> dict[str, Any]:
    """A decision as JSON, instances by id. The candidates must not have changed since the run."""
    stage, candidates = decision.stage, decision.candidates
    columns = {metric.name: candidates.values(metric) for metric in stage.metrics}
    ages_s, cluster = candidates["age_s"], candidates.cluster
    reasons = _reasons(decision)
    instances = []
    for row in map(int, np.argsort(cluster.order.rank)):
        hard = any(not refusal["skipped"] for refusal in reasons[row])
        instances.append(
            {
                "instance_id": cluster.instances[row].id,
                "verdict": "chosen" if row == decision.row else "refused" if hard else "not chosen",
                "metrics": {name: number(values[row]) for name, values in columns.items()},
                "refused_by": reasons[row],
                "age_s": round(float(ages_s[row]), 3),
            }
        )
    return {
        "infer_type": str(stage.infer_type),
        "chosen": None if decision.row is None else cluster.instances[decision.row].id,
        "fallback": decision.fallback,
        "selector": stage.selector.name,
        "metrics": [
            {"name": metric.name, "better": "less" if metric.less_is_better else "more"} for metric in stage.metrics
        ],
        "avoided": sorted(candidates.context.avoid),
        "instances": instances,
    }


def _reasons(decision: Decision) -> list[list[dict[str, Any]]]:
    """Refusals by row. `skipped`: not held against the instance, in a fallback pass."""
    candidates, screening = decision.candidates, decision.screening
    found: list[list[dict[str, Any]]] = [[] for _ in range(len(candidates))]
    for one, mask in screening.refused:
        for row in map(int, np.flatnonzero(mask)):
            if isinstance(one, GroupFilter):
                reason, skipped = one.reason_among(candidates, screening.failed, row), False
            else:
                reason, skipped = one.reason(candidates, row), decision.fallback and one.skip_in_fallback
            found[row].append({"filter": one.name, "reason": reason, "skipped": skipped})
    return found


def number(value: float) -> float | str:
    """A number for JSON, which knows no infinity."""
    return round(float(value), 6) if math.isfinite(value) else str(float(value))
