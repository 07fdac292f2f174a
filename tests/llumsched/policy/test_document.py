# SPDX-License-Identifier: Apache-2.0
"""Policies from YAML: the built-in ones, what flags change in them, and what is said of wrong ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.columns import IdOrder
from llumsched.cluster.providers.in_flight import Counters
from llumsched.policy import raised
from llumsched.policy.document import Mode, Overrides, Policy, load_policy, parse_policy
from llumsched.policy.filters import FailoverFilter, MetricBasedFilter, StalenessFilter
from llumsched.policy.pipeline import run
from llumsched.policy.reader import PolicyError, built_in_policies
from llumsched.policy.selectors import Draw, MetricBasedSelector, RoundRobinSelector, WeightedSelector
from tests.llumsched import cases


def described(policy: Policy, infer_type: InferType) -> tuple[list[str], list[str], str]:
    stage = policy.stages[infer_type]
    filters = [one.name for one in stage.filters]
    return [metric.name for metric in stage.metrics], filters[5:], stage.selector.name


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for mode in Mode for name in built_in_policies(mode)])
def test_built_in_policies_place_everything(name: str, mode: Mode) -> None:
    policy = load_policy(name, mode)
    assert policy.name == name
    assert set(policy.stages) == set(InferType)
    for stage in policy.stages.values():
        assert [one.name for one in stage.filters.singles[:5]] == [
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
    assert StalenessFilter(10) in stage.filters
    assert stage.filters.groups == (FailoverFilter("instance"),)  # type: ignore[arg-type]


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
    assert decode.filters.groups == (FailoverFilter("node"),)  # type: ignore[arg-type]
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
        (Overrides(constants={"tpot_slo": 40}), "full: has no constant tpot_slo to set to 40"),
        (Overrides(constants={"priority_headroom": 0.3}), "full: has no constant priority_headroom to set to 0.3"),
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


CONSTANTS = """
define:
  constants: {reserve: 512, share: 0.5}
  metrics: {room: {value: num_total_gpu_tokens * share - reserve, better: more}}
  filters: {reserveFilter: {refuse: room < reserve}}
full: {neutral: {metrics: [room], filters: [reserveFilter], selector: metricBasedSelector}}
"""


@pytest.mark.parametrize(
    ("constants", "room"), [({}, 1536 / 2 - 512), ({"reserve": 100.0}, 1536 / 2 - 100), ({"share": 1.0}, 1536 - 512)]
)
def test_constants_are_numbers_in_formulas_and_flags_change_them(constants: dict[str, float], room: float) -> None:
    policy = parse_policy(CONSTANTS, "test", Mode.FULL, Overrides(constants=constants))
    stage = policy.stages[InferType.NEUTRAL]
    (metric,) = stage.metrics
    candidates = cases.candidates(cases.instance("one", num_total_gpu_tokens=1536))
    assert candidates.values(metric).tolist() == [room]
    (refuses,) = (one for one in stage.filters.singles if one.name == "reserveFilter")
    assert refuses.refuse(candidates).tolist() == [room < constants.get("reserve", 512)]


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ("{reserve: much}", "define.constants.reserve: 'much' is not a number"),
        ("{reserve: .nan}", "define.constants.reserve: nan is not a finite number"),
        ("{reserve: true}", "define.constants.reserve: True is not a number"),
        ("{prompt_num_tokens: 1}", "define.constants.prompt_num_tokens: has a name that is in use already"),
        ("{num_requests: 1}", "define.constants.num_requests: has a name that is in use already"),
        ("{1st: 1}", "define.constants.1st: is no name that a formula could use"),
        ("[reserve]", "define.constants: is not a mapping of names"),
    ],
)
def test_a_constant_that_is_none(constants: str, said: str) -> None:
    text = (
        f"define: {{constants: {constants}}}\nfull: {{neutral: {{metrics: [num_requests], selector: randomSelector}}}}"
    )
    with pytest.raises(PolicyError) as error:
        parse_policy(text, "test", Mode.FULL, Overrides())
    assert any(said in fault for fault in error.value.faults), error.value.faults


def test_lite_mode_knows_what_was_sent_and_no_more() -> None:
    policy = load_policy("load-balance", Mode.LITE, Overrides({InferType.NEUTRAL: "num_requests"}))
    assert policy.stages[InferType.NEUTRAL].metrics[0].name == "num_requests"
    assert policy.stages[InferType.DECODE].metrics[0].name == "num_tokens"
    with pytest.raises(PolicyError, match="is no metric of lite mode; known: kv_cache_hit_len, num_requests, num_t"):
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
        "has unknown keys fool; known: define, full, lite, name, rescheduling",
        "has unknown keys encode; known: decode, neutral, prefill",
        "full.neutral: metric 'num_request' is unknown; known: all_decodes_tokens_num, all_pre",
        "full.neutral: unknown filter 'nope'; known: failoverFilter, failoverMigrationSrcFilter, metric",
        "full.neutral: stalenessFilter: it got an unexpected keyword argument 'minutes'",
        "full.neutral: failoverFilter: 'rack' is not a valid FailoverDomain",
        "full.neutral: metricBasedFilter: 'much' is not a number",
        "full.neutral: metricBasedSelector: top_k 0 is not a number from 1 on",
        "full.decode: unknown selector 'best'; known: metricBasedSelector, randomSelector",
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
        ("[]", "is not a mapping of define, full, lite, name, rescheduling"),
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
    with pytest.raises(
        PolicyError, match=r"'flod'; known: load-balance, prefix-cache, random, round-robin, slo, virtual-usage, "
    ):
        load_policy("flod", Mode.FULL)
    with pytest.raises(PolicyError, match=r"cannot be read"):
        load_policy(str(tmp_path / "gone.yaml"), Mode.FULL)


def test_filters_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.filters]\nnotNamed = tiny_filters:NotNamed\n",
        """
import numpy as np

class NotNamed:
    name, skip_in_fallback, marks_failed = "notNamed", False, False

    def __init__(self, prefix):
        self.prefix = prefix

    def refuse(self, candidates):
        return np.array([one.id.startswith(self.prefix) for one in candidates.cluster.instances])

    def reason(self, candidates, row):
        return "is named so"
""",
        "tiny_filters",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "full: {neutral: {filters: [{notNamed: {prefix: a}}], selector: roundRobinSelector}}"
    stage = parse_policy(text, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    decision = run(stage, cases.candidates(cases.instance("a"), cases.instance("b")), Draw(random.Random(0)))
    assert decision.row == 1


_RAISING = """
import numpy as np

class F:
    name, skip_in_fallback, marks_failed = "mine", False, False

    def refuse(self, candidates):
        {refuse}

    def reason(self, candidates, row):
        return ""
"""
_MINE = "full: {neutral: {filters: [mine], selector: roundRobinSelector}}"


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ("return candidates['none']", "raises with 0 instances: UnknownColumn"),
        ("return candidates['priority'][:1] / 0 > [0] if candidates['priority'][0] else 0", "raises with 0 instances"),
        ("return np.zeros(len(candidates) and 2, bool)", "raises with 1 instances: ValueError"),
        ("return candidates['priority']", "raises with 1 instances: TypeError: its mask is of float64"),
    ],
)
def test_filter_that_raises_is_refused_when_it_is_loaded(
    refuse: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    module = f"raising_{request.node.callspec.indices['refuse']}"
    source = _RAISING.format(refuse=refuse)
    cases.distribution(tmp_path, f"[llumnix.filters]\nmine = {module}:F\n", source, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyError, match=f"mine: {said}"):
        parse_policy(_MINE, "test", Mode.FULL, Overrides())


def test_filter_that_raises_in_a_decision_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = "return np.zeros(len(candidates), bool) if len(candidates) < 4 else candidates['none']"
    cases.distribution(tmp_path, "[llumnix.filters]\nmine = late:F\n", _RAISING.format(refuse=refuse), "late")
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = parse_policy(_MINE, "test", Mode.FULL, Overrides())
    before = raised.counts["Filter mine"]
    many = cases.candidates(*(cases.instance(name) for name in "abcd"))
    for _ in range(3):
        assert run(policy.stages[InferType.NEUTRAL], many, Draw(random.Random(0))).row == 0
    assert caplog.text.count("Filter mine raises, and refuses nobody when it does") == 1
    assert raised.counts["Filter mine"] == before + 3
    assert policy.parts.intersection(raised.lately()) == {"Filter mine"}


def test_constants_that_are_too_large_are_faults() -> None:
    text = f"define: {{constants: {{a: 1{400 * '0'}, b: .inf}}}}\nfull: {{neutral: {{selector: randomSelector}}}}"
    with pytest.raises(PolicyError) as error:
        parse_policy(text, "test", Mode.FULL, Overrides())
    assert len(error.value.faults) == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class F:\n    name = 'f'\n    def refuse(self, candidates): ...",
         "mine: is no filter, as it lacks skip_in_fallback, marks_failed, reason"),
        ("class F:\n    def refuse_among(self, candidates, failed): ...",
         "mine: is no filter, as it lacks name, reason_among"),
        ("def F(): ...", "mine: is no filter, as it lacks name, skip_in_fallback, marks_failed, refuse, reason"),
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


def order(*ids: str) -> IdOrder:
    return IdOrder(sorted(ids), np.array([sorted(ids).index(id) for id in ids], np.intp))


def test_the_best_by_each_metric_in_turn_then_by_id() -> None:
    rows, first = np.arange(4), np.array([2.0, 1.0, 1.0, 1.0])
    draw, ids = Draw(random.Random(0)), order("d", "c", "b", "a")
    assert MetricBasedSelector().choose(rows, {"x": first}, ids, draw) == 3
    assert MetricBasedSelector().choose(rows, {"x": first, "y": np.array([0.0, 5.0, 4.0, 9.0])}, ids, draw) == 2


def test_any_of_the_best_k() -> None:
    cost, draw = np.array([3.0, 1.0, 2.0, 9.0]), Draw(random.Random(0))
    chosen = {MetricBasedSelector(3).choose(np.arange(4), {"x": cost}, order(*"abcd"), draw) for _ in range(60)}
    assert chosen == {0, 1, 2}
    assert {MetricBasedSelector(9).choose(np.array([3]), {"x": cost}, order(*"abcd"), draw) for _ in range(9)} == {3}


def test_round_robin_goes_on_though_the_last_has_left() -> None:
    rows, ids, chosen = np.arange(3), order("c", "a", "e"), []
    last: str | None = None
    for _ in range(4):
        row = RoundRobinSelector().choose(rows, {}, ids, Draw(random.Random(0), last))
        last = ["c", "a", "e"][row]
        chosen.append(last)
    assert chosen == ["a", "c", "e", "a"]
    assert RoundRobinSelector().choose(rows, {}, ids, Draw(random.Random(0), "d")) == 2


def test_a_weighted_sum_of_what_is_brought_to_one_scale() -> None:
    costs = {"ms": np.array([10.0, 20.0, 30.0]), "share": np.array([0.9, 0.1, 0.5])}
    draw, ids, rows = Draw(random.Random(0)), order(*"abc"), np.arange(3)
    assert WeightedSelector({"ms": 3.0, "share": 1.0}).choose(rows, costs, ids, draw) == 0
    assert WeightedSelector({"ms": 1.0, "share": 1.0}).choose(rows, costs, ids, draw) == 1
    assert WeightedSelector({"ms": 1.0, "share": 9.0}).choose(rows, costs, ids, draw) == 1
    assert WeightedSelector({"ms": 1.0, "share": 1.0}).choose(np.array([0, 2]), costs, ids, draw) == 0
    endless = {"ms": np.array([np.inf, 7.0, np.inf])}
    assert WeightedSelector({"ms": 1.0}).choose(rows, endless, ids, draw) == 1
    assert WeightedSelector({"ms": 1.0}).choose(np.array([2, 0]), endless, ids, draw) == 0
    assert {WeightedSelector({"ms": 1.0}, 2).choose(rows, costs, ids, draw) for _ in range(40)} == {0, 1}


DEFINING = """
name: mine
define:
  metrics:
    free_tokens: {value: num_total_gpu_tokens - num_used_gpu_tokens, better: more}
    room: {value: free_tokens - prompt_num_tokens, better: more}
  filters:
    roomFilter: {refuse: room < 100, said: no room now, skip_in_fallback: true}
    oldFilter: {refuse: age_s > 5 or num_waiting_requests >= 3 and not reported}
full:
  neutral:
    metrics: [room, num_requests]
    filters: [roomFilter, oldFilter]
    selector: {weightedSelector: {weights: {room: 1, num_requests: 0.5}}}
"""


def test_a_file_defines_metrics_by_formulas_and_filters_by_conditions() -> None:
    stage = parse_policy(DEFINING, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    seen = cases.candidates(
        cases.instance("a", num_used_gpu_tokens=9_000),
        cases.instance("b", num_used_gpu_tokens=4_000),
        cases.instance("c", num_used_gpu_tokens=1_000, received_s=-6.0),
        prompt_num_tokens=950,
    )
    assert seen.values(stage.metrics[0]).tolist() == [50, 5_050, 8_050]
    decision = run(stage, seen, Draw(random.Random(0)))
    assert (decision.row, decision.fallback) == (1, False)
    refused = {one.name: mask.tolist() for one, mask in decision.screening.refused}
    assert refused["roomFilter"] == [True, False, False]
    assert refused["oldFilter"] == [False, False, True]
    (room,) = [one for one in stage.filters.singles if one.name == "roomFilter"]
    assert room.reason(seen, 0).startswith("no room now (num_total_gpu_tokens is 10000, num_used_gpu_tokens is 9000,")
    full = cases.candidates(cases.instance("a", num_used_gpu_tokens=9_000), prompt_num_tokens=950)
    assert run(stage, full, Draw(random.Random(0))).fallback


def test_a_file_heeds_what_the_request_says_of_itself() -> None:
    text = """
define:
  filters:
    reserveFilter: {refuse: priority >= 0 and num_used_gpu_tokens > 5000, said: kept for the urgent}
full: {neutral: {metrics: [num_requests], filters: [reserveFilter], selector: {metricBasedSelector: {}}}}
"""
    stage = parse_policy(text, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    full = cases.instance("a", num_used_gpu_tokens=9_000)
    rows = [
        run(stage, cases.candidates(full, priority=priority), Draw(random.Random(0))).row for priority in (-1, 0, 5)
    ]
    assert rows == [0, None, None]


@pytest.mark.parametrize(
    ("define", "said"),
    [
        ("metrics: {x: {value: tokens * 2}}", "define.metrics.x: there is no column 'tokens'; known: age_s"),
        ("metrics: {x: {value: 2 ** 99}}", "'2 \\*\\* 99' uses Pow, which formulas do not have"),
        ("metrics: {x: {value: num_free_blocks.real}}", "uses Attribute"),
        ("metrics: {x: {value: __import__('os')}}", "calls what is none of abs, max, min"),
        ("metrics: {x: {value: 'max(num_free_blocks)'}}", "calls max with 1 arguments"),
        ("metrics: {x: {value: 1 +}}", "'1 \\+' is no formula: invalid syntax"),
        ("metrics: {x: {}}", "None is no formula"),
        ("metrics: {x: {value: 1, better: up}}", "better 'up' is neither less nor more"),
        ("metrics: {num_requests: {value: 1}}", "define.metrics.num_requests: has a name that is in use already"),
        ("metrics: {num_free_blocks: {value: 1}}", "has a name that is in use already"),
        ("metrics: {a-b: {value: 1}}", "is no name that a formula could use"),
        ("metrics: {x: 3}", "is not a mapping of better, is_share, value"),
        ("filters: {x: {refuse: y}}", "define.filters.x: there is no column 'y'"),
        ("filters: {x: {refuse: 1, skip_in_fallback: maybe}}", "skip_in_fallback 'maybe' is neither true nor false"),
        ("filters: {x: {refuse: 1, limit: 3}}", "define.filters.x: has unknown keys limit"),
        ("[]", "define: is not a mapping of constants, metrics, filters"),
    ],
)
def test_wrong_definitions(define: str, said: str) -> None:
    text = f"define:\n  {define}\nfull: {{neutral: {{selector: roundRobinSelector}}}}"
    with pytest.raises(PolicyError, match=said):
        parse_policy(text, "test", Mode.FULL, Overrides())


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("{weightedSelector: {weights: {decode_batch_size: 1}}}", "weighs 'decode_batch_size', which is none of the"),
        ("{weightedSelector: {weights: {num_requests: -1}}}", "weights below 0 turn a metric round"),
        ("{weightedSelector: {weights: 3}}", "weights 3 are not a mapping"),
        ("{weightedSelector: {weights: {num_requests: much}}}", "'much' is not a number"),
        ("{weightedSelector: {}}", "missing 1 required positional argument: 'weights'"),
        ("mySelector", "unknown selector 'mySelector'; known: metricBasedSelector, randomSelector, roundRobinSelector"),
    ],
)
def test_wrong_selectors(selector: str, said: str) -> None:
    text = f"full: {{neutral: {{metrics: [num_requests], selector: {selector}}}}}"
    with pytest.raises(PolicyError, match=said):
        parse_policy(text, "test", Mode.FULL, Overrides())


def test_selectors_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class Last:\n    name = 'last'\n    def choose(self, rows, costs, order, draw): return rows[-1]\n"
    cases.distribution(tmp_path, "[llumnix.selectors]\nlast = tiny_selector:Last\n", source, "tiny_selector")
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = parse_policy("full: {neutral: {selector: last}}", "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    seen = cases.candidates(*(cases.instance(name) for name in "abc"))
    assert run(stage, seen, Draw(random.Random(0))).row == 2


def test_a_name_of_a_column_and_of_a_metric_means_the_column() -> None:
    text = """
define: {metrics: {doubled: {value: 2 * num_waiting_requests}}}
full: {neutral: {metrics: [doubled], selector: metricBasedSelector}}
"""
    stage = parse_policy(text, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    seen = cases.candidates(cases.instance("a", num_waiting_requests=3), sent={"a": Counters(num_requests=5)})
    assert seen.values(stage.metrics[0]).tolist() == [6]
