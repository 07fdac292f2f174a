# SPDX-License-Identifier: Apache-2.0
"""What is told of a decision: which metrics, beside those that decide."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.dispatch.explain import USUAL_LOADS, explain
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.policy.metrics import all_metrics
from llumsched.policy.pipeline import run
from llumsched.policy.selectors import Draw
from tests.llumsched import cases

BUSY = cases.instance("busy", num_used_gpu_tokens=5_000, num_running_requests=3, num_waiting_requests=1)
IDLE = cases.instance("idle")


def told(policy: str, *metrics: str, mode: Mode = Mode.FULL) -> dict[str, Any]:
    stage = load_policy(policy, mode).stages[InferType.NEUTRAL]
    decision = run(stage, cases.candidates(BUSY, IDLE), Draw(random.Random(0)))
    return explain(decision, mode=mode, metrics=metrics)


def names(stage: dict[str, Any], *, compared: bool) -> list[str]:
    return [metric["name"] for metric in stage["metrics"] if metric["compared"] is compared]


def test_explain_shows_requested_metrics() -> None:
    stage = told("load-balance", "num_waiting_requests", "freeness", "num_requests", "freeness")
    assert "num_requests" in names(stage, compared=True)
    assert names(stage, compared=False) == ["num_waiting_requests", "freeness"]
    assert {metric["name"]: metric["better"] for metric in stage["metrics"]}["freeness"] == "more"
    busy, idle = (one["metrics"] for one in stage["instances"])
    assert (busy["num_waiting_requests"], idle["num_waiting_requests"]) == (1.0, 0.0)
    assert (busy["freeness"], idle["freeness"]) == (1_250.0, 10_000.0)
    assert stage["chosen"] == "idle"


@pytest.mark.parametrize("policy", ["round-robin", "random"])
@pytest.mark.parametrize("mode", Mode)
def test_of_a_policy_that_compares_nothing_the_usual_loads_are_told(mode: Mode, policy: str) -> None:
    stage = told(policy, mode=mode)
    assert names(stage, compared=True) == []
    assert names(stage, compared=False) == list(USUAL_LOADS[mode])
    assert names(told(policy, "num_requests", mode=mode), compared=False) == list(USUAL_LOADS[mode])
    assert [one["metrics"]["num_requests"] for one in stage["instances"]] == [4.0, 0.0]
    assert names(told("load-balance", mode=mode), compared=False) == []


@pytest.mark.parametrize(("constants", "headroom"), [({}, 0.5), ({"priority_headroom": 0.2}, 0.2)])
def test_room_beside_urgent_requests_is_told_as_it_is_set_though_the_policy_does_not_heed_it(
    constants: dict[str, float], headroom: float
) -> None:
    policy = load_policy("load-balance", Mode.FULL, Overrides(constants=constants, optional=frozenset(constants)))
    urgent = cases.candidates(cases.instance("urgent", num_urgent_requests=1))
    decision = run(policy.stages[InferType.NEUTRAL], urgent, Draw(random.Random(0)))
    [one] = explain(decision, metrics=["virtual_usage"], constants=policy.built_in_constants)["instances"]
    assert one["metrics"]["virtual_usage"] == headroom


def test_every_metric_of_the_mode_can_be_asked_for() -> None:
    known = [name for name, metric in all_metrics().items() if metric.full]
    assert set(told("load-balance", *known)["instances"][0]["metrics"]) == set(known)


@pytest.mark.parametrize(
    ("mode", "metric", "said"),
    [
        (Mode.FULL, "num_request", "metric 'num_request' is unknown; known: all_decodes_tokens_num, "),
        (Mode.FULL, "num_tokens", "metric 'num_tokens' is no metric of full mode; known: all_decodes_tokens_num, "),
        (
            Mode.LITE,
            "decode_batch_size",
            "is no metric of lite mode; known: kv_cache_hit_len, num_requests, num_tokens",
        ),
    ],
)
def test_a_metric_that_is_none_is_refused_with_those_that_are(mode: Mode, metric: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        told("load-balance", "num_requests", metric, mode=mode)
