# SPDX-License-Identifier: Apache-2.0
"""The columns answer what plain Python answers, whatever happened to the instances before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llumlet.protocol.infer_type import InferType
from llumsched.cluster import columns
from llumsched.cluster.columns import Cluster, UnknownColumn, Values
from llumsched.cluster.providers.in_flight import InFlight, counters_of
from llumsched.cluster.table import Table, standard_table
from llumsched.cluster.view import View
from llumsched.dispatch.explain import explain
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.document import Mode, Overrides, parse_policy
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import METRICS, Metric
from llumsched.policy.pipeline import Filters, Stage, run
from llumsched.policy.selectors import Draw, MetricBasedSelector
from llumsched.request import Request
from tests.llumsched import cases
from tests.support import scheduling_reference as reference

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
    st.tuples(st.sampled_from(["left", "lost"]), IDS, st.none()),
    st.tuples(st.sampled_from(["sent", "sent urgent"]), IDS, st.integers(0, 9000)),
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
        "num_urgent_requests": SMALL,
        "num_unallocated_tokens_first_waiting_request": st.integers(0, 3000),
        "num_waiting_requests": SMALL,
        "scheduler_running_to_decode_requests_num": SMALL,
    })),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.lists(CHANGES, max_size=40),
    metric=st.sampled_from(
        [
            name
            for name, metric in METRICS.items()
            if metric.full and metric.less_is_better and isinstance(metric.of, Expression) and not metric.of_request
        ]
    ),
    threshold=st.sampled_from([1, 8192]),
    domain=st.sampled_from(["instance", "node", "instance-unit", "node-unit"]),
    selector=st.sampled_from(["metricBasedSelector: {top_k: 1}", "metricBasedSelector: {top_k: 3}",
                              "roundRobinSelector: {}"]),
    tokens=st.sampled_from([0, 60, 3000]),
    priority=st.sampled_from([-1, 0, 5]),
    avoid=st.frozensets(IDS, max_size=2),
    last=st.one_of(st.none(), IDS),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_the_table_decides_as_plain_python(
    changes: list[tuple[str, str, Any]], metric: str, threshold: int, domain: str, selector: str, tokens: int,
    priority: int, avoid: frozenset[str], last: str | None, seed: int,
) -> None:  # fmt: skip
    text = POLICY.format(metric=metric, threshold=threshold, domain=domain, selector=selector)
    policy = parse_policy(text, "test", Mode.FULL, Overrides())
    now = 0.0
    view, in_flight = View(lambda: now), InFlight()
    table = standard_table(in_flight)
    view.observe(table)
    for step, (kind, instance_id, value) in enumerate(changes):
        now = 3.0 * step
        if kind == "left":
            view.remove(instance_id)
        elif kind == "lost":
            view.lose(instance_id)
        elif kind.startswith("sent"):
            in_flight.add(instance_id, counters_of(InferType.NEUTRAL, value, urgent=kind == "sent urgent"))
        elif kind == "metadata":
            view.put_metadata(cases.metadata(instance_id, **value))
        elif instance_id in view:
            incarnation = view[instance_id].metadata.incarnation
            view.put_status(cases.status(instance_id, step, incarnation=incarnation, **value))
    stage = policy.stages[InferType.NEUTRAL]
    loads = [reference.Load(one, in_flight.of(one.id)) for one in view.values()]
    lost = view.lost.within(60)
    for name, formula in reference.METRICS.items():
        measured = dict(zip((one.id for one in table.instances), METRICS[name].values(table), strict=True))
        assert measured == pytest.approx({load.instance.id: formula(load) for load in loads})
    request = Request("r", "m", tokens, priority)
    loads = [replace(load, request=request) for load in loads]
    compare(stage, table, loads, reference.Situation(now, request, avoid, {"i1": "slow"}, lost), Draws(last, seed))


class Draws:
    """The same draw twice."""

    def __init__(self, last: str | None, seed: int) -> None:
        self._last, self._seed = last, seed

    def new(self) -> Draw:
        return Draw(random.Random(self._seed), self._last)


def compare(stage: Stage, table: Table, loads: list[reference.Load], seen: reference.Situation, draws: Draws) -> None:
    context = Context(seen.now_s, seen.request, seen.avoid, seen.complaints, table.measured(seen.lost))
    told = explain(run(stage, Candidates(table, context), draws.new()))
    chosen, fallback = reference.choice(stage, loads, seen, draws.new())
    assert (told["chosen"], told["fallback"]) == (chosen, fallback)
    assert {
        one["instance_id"]: [(why["filter"], why["reason"], why["skipped"]) for why in one["refused_by"]]
        for one in told["instances"]
    } == {
        instance_id: [(name, reason, skip and fallback) for name, reason, skip in refusals]
        for instance_id, refusals in reference.refusals(stage, loads, seen).items()
    }


class Fit:
    """How far a prompt is from what an instance likes best, asked for all at a time."""

    columns: Sequence[str] = ("misfit", "unused")

    def __init__(self) -> None:
        self.num_questions = 0

    def of_request(self, request: Request, cluster: Cluster) -> Sequence[Values]:
        self.num_questions += 1
        return abs(cluster["num_free_blocks"] - request.prompt_num_tokens), np.zeros(len(cluster))


def test_columns_of_the_request_are_asked_for_once_in_a_decision() -> None:
    view, fit = View(lambda: 0.0), Fit()
    table = standard_table(InFlight())
    view.observe(table)
    for n in range(40):
        cases.put(view, f"i{n}", num_free_blocks=n)
    metrics = Metric("fit", Expression("misfit")), Metric("again", Expression("misfit + unused"))
    stage = Stage(InferType.NEUTRAL, metrics, Filters(), MetricBasedSelector())
    for number, (tokens, best) in enumerate(((12, "i12"), (13, "i13"), (39, "i39"))):
        candidates = Candidates(table, Context(0.0, Request("r", "m", tokens)), [fit])
        decision = run(stage, candidates, Draw(random.Random(0)))
        assert decision.row is not None
        assert table.instances[decision.row].id == best
        assert fit.num_questions == number + 1
    with pytest.raises(UnknownColumn, match="no column is called 'other'"):
        candidates["other"]


def test_other_metadata_of_one_has_no_other_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is loaded: with a thousand instances, to look at all of them takes as long as thirty decisions."""
    view, asked = View(), list[str]()
    table = standard_table(InFlight())
    view.observe(table)
    for name in "cba":
        cases.put(view, name)
    serves = columns.serves
    monkeypatch.setattr("llumsched.cluster.table.serves", lambda one, model: asked.append(one.id) or serves(one, model))
    order = table.order
    assert table.serving("m").tolist() == [True] * 3
    held = table.serving("m")
    assert table.serving("x").tolist() == [False] * 3
    assert asked == ["c", "b", "a"]
    view.put_metadata(cases.metadata("b", served_models=["x"], instance_type="decode"))
    assert held.tolist() == [True] * 3, "a decision may still hold it"
    assert table.serving("m").tolist() == [True, False, True]
    assert asked == ["c", "b", "a", "b"]
    assert table.serving("x").tolist() == [False, True, False]
    assert table["infer_type"].tolist() == [0, 2, 0]
    assert table.order is order
    for name in ("c", "b"):
        view.remove(name)
    assert table.serving("m").tolist() == [True]
    assert table.serving("x").tolist() == [False]


def test_a_snapshot_stands_still_and_knows_who_is_lost() -> None:
    view = View(lambda: 0.0)
    table = standard_table(InFlight())
    view.observe(table)
    for name in "cdab":
        cases.put(view, name, num_used_gpu_tokens=ord(name))
    view.put_metadata(cases.metadata("starting"))
    view.lose("b")
    snapshot = table.snapshot(view.lost.within(60))
    assert snapshot.ids == ["a", "b", "c", "d"]
    assert snapshot["lost"].tolist() == [0, 1, 0, 0]
    assert snapshot["num_used_gpu_tokens"].tolist() == list(map(ord, "abcd"))
    assert table.snapshot().ids == ["a", "c", "d"]
    view.remove("a")
    snapshot.add(snapshot.index["c"], {"num_used_gpu_tokens": 1, "num_waiting_requests": -5})
    assert snapshot["num_used_gpu_tokens"].tolist() == [97, 98, 100, 100]
    assert snapshot["num_waiting_requests"].tolist() == [0] * 4
    assert table["num_used_gpu_tokens"].tolist() == [99, 100, 0]


def test_two_providers_of_one_column_are_refused() -> None:
    with pytest.raises(ValueError, match="columns of two providers: sent_requests"):
        Table([InFlight(), InFlight()])


def test_newest_of_several_statuses_is_shown_when_a_column_is_read() -> None:
    view, table = View(), standard_table(InFlight())
    view.observe(table)
    for number in range(1, 4):
        for name in "abc":
            cases.put(view, name, number, num_used_gpu_tokens=100 * number)
    assert table["num_used_gpu_tokens"].tolist() == [300, 300, 300]
    cases.put(view, "a", 4, num_used_gpu_tokens=1)
    view.remove("c")
    cases.put(view, "b", 5, num_used_gpu_tokens=2, max_model_len=7)
    assert table["num_used_gpu_tokens"].tolist() == [1, 2]
    assert table["max_model_len"].tolist()[1] == 7
