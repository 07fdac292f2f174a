# SPDX-License-Identifier: Apache-2.0
"""A decision in words: the run's own masks say who was refused, the filters themselves say why.

Whatever the policy compares, it is told what is predicted of the request at each instance, and how sure that is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llumsched.cluster.forward import MOVED, Forward
from llumsched.cluster.providers import HIT_COLUMN
from llumsched.cluster.providers.step_models import StepModels
from llumsched.latency.fitting import pairs
from llumsched.policy.candidates import Candidates
from llumsched.policy.filters import GroupFilter
from llumsched.policy.pipeline import Decision


def explain(decision: Decision, step_models: StepModels | None = None) -> dict[str, Any]:
    """A decision as JSON, instances by id. The candidates must not have changed since the run. `step_models`: those of
    which the candidates have the columns; None: nothing is predicted."""
    stage, candidates = decision.stage, decision.candidates
    columns = {metric.name: candidates.values(metric) for metric in stage.metrics}
    ages_s, cluster = candidates["age_s"], candidates.cluster
    reasons, hits = _reasons(decision), candidates[HIT_COLUMN]
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
                "moved_on": _moved_on(cluster, row) if isinstance(cluster, Forward) else None,
                "kv_cache_hit_len": int(hits[row]),
                "predicted": None if step_models is None else _predicted(candidates, row, step_models),
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


def _moved_on(cluster: Forward, row: int) -> dict[str, list[float | str]]:
    """Columns that are not as they were reported: what was reported, and what is taken to be now."""
    reported = cluster.reported
    return {
        name: [number(reported[name][row]), number(cluster[name][row])]
        for name in MOVED
        if cluster[name][row] != reported[name][row]
    }


def _predicted(candidates: Candidates, row: int, step_models: StepModels) -> dict[str, Any] | None:
    """Milliseconds; None before anything is known. Deviations are relative: of what the model says of the step that
    computes the prompt, and of one that decodes with it, for want of steps like these; and by how much half of the
    steps that were measured differ from it."""
    cluster = candidates.cluster
    model = step_models.model_of(cluster.instances[row])
    if model is None:
        return None
    tokens = candidates.context.request.prompt_num_tokens
    decodes = float(cluster["scheduler_running_to_decode_requests_num"][row])
    decode_kv = float(cluster["scheduler_running_to_decode_tokens_num"][row])
    return {
        "ttft_ms": number(candidates["predicted_ttft"][row]),
        "tpot_ms": number(candidates["predicted_tpot"][row]),
        "ttft_deviation": number(model.deviation(tokens, pairs(0, tokens), decodes, decode_kv)),
        "tpot_deviation": number(model.deviation(0, 0, decodes + 1, decode_kv + tokens)),
        "step_error": number(model.error),
        "num_steps": model.num_steps,
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
