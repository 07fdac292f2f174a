# SPDX-License-Identifier: Apache-2.0
"""The arrays answer what the pure functions answer, whatever happened to the instances before."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llumsched.cms.view import View
from llumsched.scheduling import filters
from llumsched.scheduling.explain import explain
from llumsched.scheduling.filters import apply
from llumsched.scheduling.in_flight import InFlight, counters_of
from llumsched.scheduling.load import Context, InferType, Load, Request
from llumsched.scheduling.metrics import METRICS, Metric
from llumsched.scheduling.pipeline import LoadList, Stage, run
from llumsched.scheduling.policy import Mode, Overrides, parse_policy
from llumsched.scheduling.selectors import Draw
from llumsched.scheduling.table import Table
from tests.llumsched import scheduling_cases as cases

POLICY = """
name: everything
full:
  neutral:
    metrics: [{metric}, num_requests]
    filters:
      - schedulabilityFilter
      - stalenessFilter: {{seconds: 60}}
      - metricBasedFilter: {{metric: {metric}, threshold: {threshold}}}
      - metricBasedFilter: {{metric: num_requests, threshold: 9, skip_in_fallback: false}}
      - failoverFilter: {{domain: {domain}}}
    selector: {{{selector}}}
"""
IDS = st.sampled_from([f"i{n}" for n in range(7)])
SMALL = st.integers(0, 3)
CHANGES = st.one_of(
    st.tuples(st.just("left"), IDS, st.none()),
    st.tuples(st.just("sent"), IDS, st.integers(0, 9000)),
    st.tuples(st.just("metadata"), IDS, st.fixed_dictionaries({
        "incarnation": st.sampled_from(["first", "second"]),
        "instance_type": st.sampled_from(["neutral", "neutral", "decode", ""]),
        "served_models": st.sampled_from([["m"], ["m", "x"], ["x"], []]),
        "node_id": st.sampled_from(["", "A", "B"]),
        "unit_id": st.sampled_from(["", "U", "V"]),
        "data_parallel_size": st.sampled_from([1, 2]),
        "max_model_len": st.sampled_from([0, 100, 4096]),
    })),
    st.tuples(st.just("status"), IDS, st.fixed_dictionaries({
        "schedulable": st.sampled_from([True, True, True, False]),
        "health": st.sampled_from([0, 1, 1, 2]),
        "num_total_gpu_tokens": st.sampled_from([0, 50, 10_000]),
        "num_used_gpu_tokens": st.integers(0, 9000),
        "num_uncomputed_tokens_all_waiting_prefills": st.integers(0, 9000),
        "num_running_requests": SMALL,
        "num_waiting_requests": SMALL,
        "scheduler_running_to_decode_requests_num": SMALL,
    })),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.lists(CHANGES, max_size=40),
    metric=st.sampled_from([name for name, metric in METRICS.items() if metric.full]),
    threshold=st.sampled_from([1, 8192]),
    domain=st.sampled_from(["instance", "node", "instance-unit", "node-unit"]),
    selector=st.sampled_from(["metricBasedSelector: {top_k: 1}", "metricBasedSelector: {top_k: 3}",
                              "roundRobinSelector: {}"]),
    tokens=st.sampled_from([0, 60, 3000]),
    avoid=st.frozensets(IDS, max_size=2),
    last=st.one_of(st.none(), IDS),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_the_table_decides_as_the_list(
    changes: list[tuple[str, str, Any]], metric: str, threshold: int, domain: str, selector: str, tokens: int,
    avoid: frozenset[str], last: str | None, seed: int,
) -> None:  # fmt: skip
    text = POLICY.format(metric=metric, threshold=threshold, domain=domain, selector=selector)
    policy = parse_policy(text, "test", Mode.FULL, Overrides())
    now = 0.0
    view, in_flight = View(lambda: now), InFlight()
    table = Table(in_flight, policy.metrics)
    view.observe(table)
    for step, (kind, instance_id, value) in enumerate(changes):
        now = 3.0 * step
        if kind == "left":
            view.remove(instance_id)
        elif kind == "sent":
            in_flight.add(instance_id, counters_of(InferType.NEUTRAL, value))
        elif kind == "metadata":
            view.put_metadata(cases.metadata(instance_id, **value))
        elif instance_id in view:
            incarnation = view[instance_id].metadata.incarnation
            view.put_status(cases.status(instance_id, step, incarnation=incarnation, **value))
    stage = policy.stages[InferType.NEUTRAL]
    loads = [Load(instance, in_flight.of(instance.id)) for instance in view.values()]
    context = Context(now, Request("r", "m", tokens, avoid))
    compare(stage, table, loads, context, last, seed)


def compare(stage: Stage, table: Table, loads: list[Load], context: Context, last: str | None, seed: int) -> None:
    reference = LoadList(loads)
    ours = run(stage, table, context, Draw(random.Random(seed), last))
    theirs = run(stage, reference, context, Draw(random.Random(seed), last))
    told = explain(ours, table)
    assert told == explain(theirs, reference)
    filtered = apply((*stage.filters, *stage.group_filters), loads, context, fallback=theirs.fallback)
    assert (theirs.row is None) == (not filtered.survivors)
    if theirs.row is not None:
        assert told["chosen"] in {load.instance.id for load in filtered.survivors}
    refused = {
        one["instance_id"]: [refusal["reason"] for refusal in one["refused_by"] if not refusal["skipped"]]
        for one in told["instances"]
    }
    reasons = {key: [refusal.reason for refusal in value] for key, value in filtered.refusals.items()}
    assert {key: value for key, value in refused.items() if value} == reasons


def test_metrics_of_the_request_and_filters_of_others_are_asked_each_time() -> None:
    fit = Metric("fit", True, lambda _: 0.0, of_request=lambda load, context: abs(
        load.status.num_free_blocks - context.request.prompt_num_tokens))  # fmt: skip

    class Odd:
        name, skip_in_fallback, marks_failed = "odd", False, False

        def refuse(self, load: Load, context: Context) -> str | None:
            return "odd" if int(load.instance.id[1:]) % 2 else None

    view, in_flight = View(lambda: 0.0), InFlight()
    table = Table(in_flight, [fit])
    view.observe(table)
    for n in range(40):
        cases.put(view, f"i{n}", num_free_blocks=n)
    policy = parse_policy(
        "full: {neutral: {metrics: [num_requests], selector: metricBasedSelector}}", "test", Mode.FULL, Overrides()
    )
    stage = policy.stages[InferType.NEUTRAL]
    stage = Stage(stage.infer_type, (fit,), (*stage.filters, Odd()), (), stage.selector)
    for tokens, best in ((12, "i12"), (13, "i12"), (39, "i38")):
        decision = run(stage, table, Context(0.0, Request("r", "m", tokens)), Draw(random.Random(0)))
        assert decision.row is not None
        assert table.load(decision.row).instance.id == best


def test_other_metadata_of_one_has_no_other_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is loaded: with a thousand instances, to look at all of them takes as long as thirty decisions."""
    view, asked = View(), list[str]()
    table = Table(InFlight(), [])
    view.observe(table)
    for name in "cba":
        cases.put(view, name)
    serves = filters.serves
    monkeypatch.setattr(filters, "serves", lambda one, model: asked.append(one.id) or serves(one, model))
    order = table.order
    stage = [filters.InferTypeFilter(InferType.NEUTRAL), filters.ModelFilter()]

    def refused(model: str) -> list[list[bool]]:
        context = Context(0.0, Request("r", model, 10))
        return [table.refused(one, context).tolist() for one in stage]

    before = refused("m")
    assert before == [[False] * 3, [False] * 3]
    assert refused("x") == [[False] * 3, [True] * 3]
    assert asked == ["c", "b", "a"]
    view.put_metadata(cases.metadata("b", served_models=["x"], instance_type="decode"))
    assert refused("m") == [[False, True, False], [False, True, False]]
    assert asked == ["c", "b", "a", "b"]
    assert refused("x") == [[False, True, False], [True, False, True]]
    assert table.order is order
    for name in ("c", "b"):
        view.remove(name)
    assert refused("m") == [[False], [False]]
    assert refused("x") == [[False], [True]]
