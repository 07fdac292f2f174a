# SPDX-License-Identifier: Apache-2.0
"""Explains a decision: the run's masks tell the refusals, the filters give the reasons.

It includes the predictions for the request at each instance with their uncertainty, and further metrics on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from llumsched.cluster.providers import HIT_COLUMN
from llumsched.cluster.providers.step_models import StepModels
from llumsched.foresight.moved_on import MOVED, Forward
from llumsched.latency.fitting import pairs
from llumsched.policy.candidates import Candidates
from llumsched.policy.document import Mode
from llumsched.policy.metrics import BUILT_IN_CONSTANTS, METRICS, Metric, all_metrics, built_in_metrics
from llumsched.policy.pipeline import Decision
from llumsched.policy.reasons import json_number, refusals

USUAL_LOADS: Final[Mapping[Mode, Sequence[str]]] = {
    Mode.FULL: ("kv_cache_usage_ratio_projected", "num_requests", "all_prefills_tokens_num"),
    Mode.LITE: ("num_tokens", "num_requests"),
}
"""Metrics shown if the policy compares none."""


def explain(
    decision: Decision,
    step_models: StepModels | None = None,
    *,
    mode: Mode = Mode.FULL,
    metrics: Sequence[str] = (),
    constants: Mapping[str, float] = BUILT_IN_CONSTANTS,
) -> dict[str, Any]:
    """A decision as JSON, instances by id. The candidates must be unchanged since the run. `step_models`: those behind
    the candidates' columns; None: no predictions. `metrics`: names of further metrics, with these built-in `constants`.
    Raises ValueError for a metric that the mode does not have."""
    stage, candidates = decision.stage, decision.candidates
    compared = {metric.name: metric for metric in stage.metrics}
    further = _named([*(() if compared else USUAL_LOADS[mode]), *metrics], mode, compared, constants)
    columns = {metric.name: candidates.values(metric) for metric in (*compared.values(), *further)}
    ages_s, cluster = candidates["age_s"], candidates.cluster
    hits = candidates[HIT_COLUMN]
    instances = []
    for row in map(int, np.argsort(cluster.order.rank)):
        reasons = _reasons(decision, row)
        hard = any(not refusal["skipped"] for refusal in reasons)
        instances.append(
            {
                "instance_id": cluster.instances[row].id,
                "verdict": "chosen" if row == decision.row else "refused" if hard else "not chosen",
                "metrics": {name: json_number(values[row]) for name, values in columns.items()},
                "refused_by": reasons,
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
            *(_described(metric, is_compared=True) for metric in compared.values()),
            *(_described(metric, is_compared=False) for metric in further),
        ],
        "avoided": sorted(candidates.context.avoid),
        "instances": instances,
    }


def _named(
    names: Iterable[str], mode: Mode, compared: Mapping[str, Metric], constants: Mapping[str, float]
) -> list[Metric]:
    """The named metrics, without duplicates and those compared. Raises ValueError."""
    wanted = [name for name in dict.fromkeys(names) if name not in compared]
    known = built_in_metrics(constants) if METRICS.keys() >= set(wanted) else all_metrics(constants)
    fitting = {name: metric for name, metric in known.items() if (metric.full if mode is Mode.FULL else metric.lite)}
    if unknown := [name for name in wanted if name not in fitting]:
        first = unknown[0]
        wrong = f"is no metric of {mode} mode" if first in known else "is unknown"
        there = {**fitting, **compared}
        raise ValueError(f"metric {first!r} {wrong}; known: {', '.join(sorted(there))}")
    return [fitting[name] for name in wanted]


def _described(metric: Metric, *, is_compared: bool) -> dict[str, Any]:
    return {"name": metric.name, "better": "less" if metric.less_is_better else "more", "compared": is_compared}


def _moved_on(cluster: Forward, row: int) -> dict[str, list[float | str]]:
    """Columns that differ from the report: reported and estimated values."""
    reported = cluster.reported
    return {
        name: [json_number(reported[name][row]), json_number(cluster[name][row])]
        for name in MOVED
        if cluster[name][row] != reported[name][row]
    }


def _predicted(candidates: Candidates, row: int, step_models: StepModels) -> dict[str, Any] | None:
    """Milliseconds; None while unknown. Deviations are relative: those of the model for the prompt's step and for a
    decode with it, and the median error of measured steps."""
    cluster = candidates.cluster
    model = step_models.model_of(cluster.instances[row])
    if model is None:
        return None
    tokens = candidates.context.request.prompt_num_tokens
    decodes = float(cluster["scheduler_running_to_decode_requests_num"][row])
    decode_kv = float(cluster["scheduler_running_to_decode_tokens_num"][row])
    return {
        "ttft_ms": json_number(candidates["predicted_ttft"][row]),
        "tpot_ms": json_number(candidates["predicted_tpot"][row]),
        "ttft_deviation": json_number(model.deviation(tokens, pairs(0, tokens), decodes, decode_kv)),
        "tpot_deviation": json_number(model.deviation(0, 0, decodes + 1, decode_kv + tokens)),
        "step_error": json_number(model.error),
        "num_steps": model.num_steps,
    }


def _reasons(decision: Decision, row: int) -> list[dict[str, Any]]:
    """Refusals of a row. `skipped`: ignored in a fallback pass."""
    return [
        {"filter": one.filter, "reason": one.reason, "skipped": decision.fallback and one.soft}
        for one in refusals(decision.screening, decision.candidates, row)
    ]
