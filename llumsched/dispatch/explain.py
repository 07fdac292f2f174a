# SPDX-License-Identifier: Apache-2.0
"""A decision in words: the run's own masks say who was refused, the filters themselves say why."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llumsched.scheduling.filters import Filter, GroupFilter, refused_among
from llumsched.scheduling.pipeline import Candidates, Decision


def explain(decision: Decision, candidates: Candidates) -> dict[str, Any]:
    """As JSON, instances by id. `candidates` as they were at the run."""
    stage, context = decision.stage, decision.context
    columns = [(metric, candidates.values(metric, context)) for metric in stage.metrics]
    reasons = _reasons(decision, candidates)
    rows = sorted(range(len(candidates)), key=lambda row: candidates.load(row).instance.id)
    instances = []
    for row in rows:
        load = candidates.load(row)
        hard = any(not refusal["skipped"] for refusal in reasons[row])
        instances.append(
            {
                "instance_id": load.instance.id,
                "verdict": "chosen" if row == decision.row else "refused" if hard else "not chosen",
                "metrics": {metric.name: number(values[row]) for metric, values in columns},
                "refused_by": reasons[row],
                "age_s": round(load.instance.age_s(context.now_s), 3),
            }
        )
    return {
        "infer_type": str(stage.infer_type),
        "chosen": None if decision.row is None else candidates.load(decision.row).instance.id,
        "fallback": decision.fallback,
        "selector": stage.selector.name,
        "metrics": [
            {"name": metric.name, "better": "less" if metric.less_is_better else "more"} for metric in stage.metrics
        ],
        "avoided": sorted(context.request.avoid),
        "instances": instances,
    }


def _reasons(decision: Decision, candidates: Candidates) -> list[list[dict[str, Any]]]:
    """By row. `skipped`: not held against the instance, in a fallback pass."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(len(candidates))]
    for one, mask in decision.refused:
        among = _among(one, decision, candidates)
        for row in map(int, np.flatnonzero(mask)):
            load = candidates.load(row)
            if isinstance(one, Filter):
                reason = one.refuse(load, decision.context)
                skipped = decision.fallback and one.skip_in_fallback
            else:
                reason, skipped = among.get(load.instance.id), False
            found[row].append({"filter": one.name, "reason": reason or "", "skipped": skipped})
    return found


def _among(one: Filter | GroupFilter, decision: Decision, candidates: Candidates) -> dict[str, str]:
    if isinstance(one, Filter):
        return {}
    instances = [candidates.load(row).instance for row in range(len(candidates))]
    failed = {instances[row].id for row in np.flatnonzero(decision.failed)}
    return dict(refused_among(one, instances, failed, decision.context.lost))


def number(value: float) -> float | str:
    """JSON knows no infinity."""
    return round(float(value), 6) if math.isfinite(value) else str(float(value))
