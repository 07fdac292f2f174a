# SPDX-License-Identifier: Apache-2.0
"""Policies from YAML: the built-in ones, what flags change in them, and what is said of wrong ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from llumsched.scheduling.filters import FailoverFilter, MetricBasedFilter, StalenessFilter
from llumsched.scheduling.load import Context, InferType, Request
from llumsched.scheduling.pipeline import LoadList, run
from llumsched.scheduling.policy import (
    Mode,
    Overrides,
    Policy,
    PolicyError,
    built_in_policies,
    load_policy,
    parse_policy,
)
from llumsched.scheduling.selectors import Draw, MetricBasedSelector, Order, RoundRobinSelector
from tests.llumsched import scheduling_cases as cases


def described(policy: Policy, infer_type: InferType) -> tuple[list[str], list[str], str]:
    stage = policy.stages[infer_type]
    filters = [one.name for one in (*stage.filters, *stage.group_filters)]
    return [metric.name for metric in stage.metrics], filters[5:], stage.selector.name


@pytest.mark.parametrize("name", built_in_policies())
@pytest.mark.parametrize("mode", Mode)
def test_built_in_policies_place_everything(name: str, mode: Mode) -> None:
    policy = load_policy(name, mode)
    assert policy.name == name
    assert set(policy.stages) == set(InferType)
    for stage in policy.stages.values():
        assert [one.name for one in stage.filters[:5]] == [
            "inferTypeFilter", "modelFilter", "capacityFilter", "retryFilter", "breakerFilter",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("infer_type", "metrics", "threshold"),
    [
        (InferType.NEUTRAL, ["all_prefills_tokens_num", "kv_cache_usage_ratio_projected", "num_requests"], 8192),
        (InferType.PREFILL, ["all_prefills_tokens_num", "num_requests"], 2048),
        (InferType.DECODE, ["kv_cache_usage_ratio_projected", "num_requests"], 1.0),
    ],
)
def test_load_balance(infer_type: InferType, metrics: list[str], threshold: float) -> None:
    policy = load_policy("load-balance", Mode.FULL)
    filters = ["schedulabilityFilter", "stalenessFilter", "metricBasedFilter", "failoverFilter"]
    assert described(policy, infer_type) == (metrics, filters, "metricBasedSelector")
    stage = policy.stages[infer_type]
    assert MetricBasedFilter(stage.metrics[0], threshold) in stage.filters
    assert StalenessFilter(60) in stage.filters
    assert stage.group_filters == (FailoverFilter("instance"),)  # type: ignore[arg-type]


def test_flags_change_a_policy() -> None:
    overrides = Overrides(
        {InferType.NEUTRAL: "num_requests"}, {InferType.NEUTRAL: 5.0}, top_k=3, failover_domain="node", staleness_s=7
    )
    policy = load_policy("load-balance", Mode.FULL, overrides)
    neutral, decode = policy.stages[InferType.NEUTRAL], policy.stages[InferType.DECODE]
    assert MetricBasedFilter(neutral.metrics[0], 5.0) in neutral.filters
    assert neutral.metrics[0].name == "num_requests"
    assert decode.metrics[0].name == "kv_cache_usage_ratio_projected"
    assert StalenessFilter(7) in decode.filters
    assert decode.group_filters == (FailoverFilter("node"),)  # type: ignore[arg-type]
    assert decode.selector == MetricBasedSelector(3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (Overrides({InferType.PREFILL: "num_requests"}), "full.prefill: uses no metric that 'num_requests' could take"),
        (Overrides(thresholds={InferType.NEUTRAL: 5.0}), "full.neutral: has no load threshold to set to 5"),
        (Overrides(thresholds={InferType.PREFILL: 5.0}), "full.prefill: has no load threshold to set to 5"),
        (Overrides(top_k=2), "full: has no metricBasedSelector to set top_k to 2"),
        (Overrides(failover_domain="node"), "full: has no failoverFilter to set domain to node"),
        (Overrides(staleness_s=7), "full: has no stalenessFilter to set seconds to 7"),
    ],
)
def test_a_flag_that_changes_nothing(overrides: Overrides, said: str) -> None:
    text = """
full:
  neutral:
    metrics: [num_requests]
    filters: [{metricBasedFilter: {metric: decode_batch_size, threshold: 3}}]
    selector: roundRobinSelector
lite:
  neutral: {metrics: [num_requests], selector: metricBasedSelector}
"""
    with pytest.raises(PolicyError, match=said) as error:
        parse_policy(text, "test", Mode.FULL, overrides)
    assert len(error.value.faults) == 1


def test_lite_mode_knows_what_was_sent_and_no_more() -> None:
    policy = load_policy("load-balance", Mode.LITE, Overrides({InferType.NEUTRAL: "num_requests"}))
    assert policy.stages[InferType.NEUTRAL].metrics[0].name == "num_requests"
    assert policy.stages[InferType.DECODE].metrics[0].name == "num_tokens"
    with pytest.raises(PolicyError, match="'decode_batch_size' is no metric of lite mode; known: num_req"):
        load_policy("load-balance", Mode.LITE, Overrides({InferType.NEUTRAL: "decode_batch_size"}))


def test_everything_wrong_with_a_policy_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
name: mine
fool: 1
full:
  neutral:
    metrics: [num_request]
    filters: [schedulabilityFilter, nope, {stalenessFilter: {minutes: 1}}, {failoverFilter: {domain: rack}},
              {metricBasedFilter: {metric: num_requests, threshold: much}}]
    selector: {metricBasedSelector: {top_k: 0}}
  decode:
    metrics: []
    selector: best
  encode: {}
"""
    )
    with pytest.raises(PolicyError) as error:
        load_policy(str(path), Mode.FULL)
    said = "\n".join(error.value.faults)
    for fault in (
        "has unknown keys fool; known: full, lite, name",
        "has unknown keys encode; known: decode, neutral, prefill",
        "full.neutral: metric 'num_request' is unknown; known: all_decodes_tokens_num, all_pre",
        "full.neutral: unknown filter 'nope'; known: failoverFilter, metricBasedFilter, schedul",
        "full.neutral: stalenessFilter: it got an unexpected keyword argument 'minutes'",
        "full.neutral: failoverFilter: 'rack' is not a valid FailoverDomain",
        "full.neutral: metricBasedFilter: 'much' is not a number",
        "full.neutral: metricBasedSelector: top_k 0 is not a number from 1 on",
        "full.decode: unknown selector 'best'; known: metricBasedSelector, roundRobinSelector",
    ):
        assert fault in said


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{stalenessFilter: {seconds: -1}}", "stalenessFilter: -1 seconds are not positive"),
        ("{stalenessFilter: {seconds: 0}}", "stalenessFilter: 0 seconds are not positive"),
        ("{stalenessFilter: {seconds: .nan}}", "stalenessFilter: nan is not a finite number"),
        ("{metricBasedFilter: {metric: num_requests, threshold: .nan}}", "metricBasedFilter: nan is not a finite"),
        ("{metricBasedFilter: {metric: num_requests, threshold: .inf}}", "metricBasedFilter: inf is not a finite"),
        ("{metricBasedFilter: {metric: num_requests, threshold: 1, skip_in_fallback: 'false'}}",
         "metricBasedFilter: skip_in_fallback 'false' is neither true nor false"),
        ("{metricBasedFilter: {metric: [num_requests], threshold: 1}}", r"metric \['num_requests'\] is unknown"),
        ("{metricBasedFilter: {threshold: 1}}", "metricBasedFilter: it missing 1 required positional argument"),
        ("{failoverFilter: {domain: [node]}}", r"failoverFilter: \['node'\] is not a valid FailoverDomain"),
        ("{stalenessFilter: {1: 2}}", "stalenessFilter: keywords must be strings"),
    ],
)  # fmt: skip
def test_wrong_settings(entry: str, said: str) -> None:
    text = f"full: {{neutral: {{metrics: [num_requests], filters: [{entry}], selector: metricBasedSelector}}}}"
    for overrides in (Overrides(), Overrides({InferType.NEUTRAL: "decode_batch_size"})):
        with pytest.raises(PolicyError, match=f"full.neutral: {said}"):
            parse_policy(text, "test", Mode.FULL, overrides)


def test_the_other_mode_s_section_is_read_too() -> None:
    full = "full: {neutral: {selector: roundRobinSelector}}\n"
    lite = "lite: {neutral: {metrics: [decode_batch_size], selector: bogus}}"
    with pytest.raises(PolicyError) as error:
        parse_policy(full + lite, "test", Mode.FULL, Overrides())
    metric, selector = error.value.faults
    assert "lite.neutral: metric 'decode_batch_size' is no metric of lite mode" in metric
    assert "lite.neutral: unknown selector 'bogus'" in selector
    assert set(parse_policy(full + "lite:", "test", Mode.FULL, Overrides()).stages) == {InferType.NEUTRAL}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is no YAML"),
        ("!!int x", "is no YAML: invalid literal for int"),
        ("[" * 500, "is no YAML: maximum recursion depth"),
        ("[]", "is not a mapping of name, full, lite"),
        ("lite: {}", "has no section 'full'"),
        ("full: {neutral: 5}", "full.neutral: is not a mapping"),
        ("full: {neutral: {metrics: x, selector: roundRobinSelector}}", "metrics is not a list"),
        ("full: {neutral: {metrics: [[a]], selector: roundRobinSelector}}", "metrics is not a list of names"),
        ("full: {neutral: {metrics: [{a: 1}], selector: roundRobinSelector}}", "metrics is not a list of names"),
        ("full: {neutral: {selector: metricBasedSelector}}", "metricBasedSelector needs a metric"),
        ("full: {neutral: {filters: [{a: 1}], selector: roundRobinSelector}}", "the settings of 'a' are not a mapping"),
        ("full: {neutral: {filters: [{a: 1, b: 2}], selector: roundRobinSelector}}", "unknown filter"),
        ("full: {neutral: {filters: 3, selector: roundRobinSelector}}", "filters is not a list"),
    ],
)
def test_wrong_forms(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        parse_policy(text, "test", Mode.FULL, Overrides())


def test_no_such_policy(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"unknown policy 'flod'; known: load-balance, round-robin, or a \.yaml file"):
        load_policy("flod", Mode.FULL)
    with pytest.raises(PolicyError, match=r"cannot be read"):
        load_policy(str(tmp_path / "gone.yaml"), Mode.FULL)


def test_filters_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.filters]\nnotNamed = tiny_filters:NotNamed\n",
        """
class NotNamed:
    name, skip_in_fallback, marks_failed = "notNamed", False, False

    def __init__(self, prefix):
        self.prefix = prefix

    def refuse(self, load, context):
        return "is named so" if load.instance.id.startswith(self.prefix) else None
""",
        "tiny_filters",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "full: {neutral: {filters: [{notNamed: {prefix: a}}], selector: roundRobinSelector}}"
    stage = parse_policy(text, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    candidates = LoadList([cases.load("a"), cases.load("b")])
    decision = run(stage, candidates, Context(0.0, Request("r", "m")), Draw(random.Random(0)))
    assert decision.row == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class F:\n    name = 'f'\n    def refuse(self, load, context): ...",
         "mine: is no filter, as it lacks skip_in_fallback, marks_failed"),
        ("class F:\n    def refuse_among(self, instances, failed): ...", "mine: is no filter, as it lacks name"),
        ("def F(): ...", "mine: is no filter, as it lacks name, skip_in_fallback, marks_failed, refuse"),
        ("class F:\n    def __init__(self): raise KeyError('tenant')", "mine: KeyError: 'tenant'"),
    ],
)  # fmt: skip
def test_a_filter_of_an_installed_package_that_is_none(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    module = f"no_filter_{request.node.callspec.indices['source']}"
    cases.distribution(tmp_path, f"[llumnix.filters]\nmine = {module}:F\n", source, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyError, match=said):
        parse_policy("full: {neutral: {filters: [mine], selector: roundRobinSelector}}", "test", Mode.FULL, Overrides())


def order(*ids: str) -> Order:
    return Order(sorted(ids), np.array([sorted(ids).index(id) for id in ids], np.intp))


def test_the_best_by_each_metric_in_turn_then_by_id() -> None:
    rows, first = np.arange(4), np.array([2.0, 1.0, 1.0, 1.0])
    draw, ids = Draw(random.Random(0)), order("d", "c", "b", "a")
    assert MetricBasedSelector().choose(rows, [first], ids, draw) == 3
    assert MetricBasedSelector().choose(rows, [first, np.array([0.0, 5.0, 4.0, 9.0])], ids, draw) == 2


def test_any_of_the_best_k() -> None:
    cost, draw = np.array([3.0, 1.0, 2.0, 9.0]), Draw(random.Random(0))
    chosen = {MetricBasedSelector(3).choose(np.arange(4), [cost], order(*"abcd"), draw) for _ in range(60)}
    assert chosen == {0, 1, 2}
    assert {MetricBasedSelector(9).choose(np.array([3]), [cost], order(*"abcd"), draw) for _ in range(9)} == {3}


def test_round_robin_goes_on_though_the_last_has_left() -> None:
    rows, ids, chosen = np.arange(3), order("c", "a", "e"), []
    last: str | None = None
    for _ in range(4):
        row = RoundRobinSelector().choose(rows, [], ids, Draw(random.Random(0), last))
        last = ["c", "a", "e"][row]
        chosen.append(last)
    assert chosen == ["a", "c", "e", "a"]
    assert RoundRobinSelector().choose(rows, [], ids, Draw(random.Random(0), "d")) == 2
