# SPDX-License-Identifier: Apache-2.0
"""The dispatcher over a view: balance without any prompt waiting, stages, tries, and what is said when nobody fits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_request

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.dispatch.dispatcher import Dispatcher, Knowledge, NotPlaced, NotPlacedKind
from llumsched.model_memory import REMEMBERED_S
from llumsched.policy.document import Mode, Overrides, Policy, load_policy, parse_policy
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import Metric
from llumsched.request import Request
from llumsched.scaling.scaler import FORGET_S
from tests.llumsched import cases

PREFILL_ONLY = """
full:
  neutral: {metrics: [all_prefills_tokens_num], filters: [schedulabilityFilter], selector: metricBasedSelector}
"""


class Cluster:
    def __init__(self, policy: Policy, *names: str, models: tuple[str, ...] = (), **fields: object) -> None:
        self.now = 0.0
        self.view = View(lambda: self.now)
        self.account = Account(lambda: self.now, 10.0, lambda: not self.view.connected)
        draw, knowledge = random.Random(0), Knowledge(models=models)
        self.dispatcher = Dispatcher(self.view, policy, self.account, lambda: self.now, draw, knowledge)
        for name in names:
            cases.put(self.view, name, **fields)

    def place(self, request_id: str = "r", tokens: int = 100, *stages: InferType, model: str = "m") -> list[str]:
        placed = self.dispatcher.schedule(Request(request_id, model, tokens), stages or (InferType.NEUTRAL,))
        return [one.instance.id for one in placed]


def full(**overrides: object) -> Policy:
    return load_policy("load-balance", Mode.FULL, Overrides(**overrides))  # type: ignore[arg-type]


def decoding_only(policy: Policy, num_requests: int = 1000) -> Counter[str]:
    """Where requests go of which each has its prompt computed before the next one comes."""
    cluster, placed = Cluster(policy, *"abcd", num_total_gpu_tokens=10_000_000), Counter[str]()
    for number in range(num_requests):
        (name,) = cluster.place(f"r{number}")
        placed[name] += 1
        cases.put(
            cluster.view, name, number + 2, num_total_gpu_tokens=10_000_000, num_used_gpu_tokens=100 * placed[name],
            num_running_requests=placed[name], recent_waiting_requests=[f"r{number}"],
        )  # fmt: skip
    return placed


def test_instances_that_compute_no_prompt_are_balanced_by_what_they_hold() -> None:
    """The figure of docs/reference/defaults.md."""
    assert decoding_only(full()) == {"a": 250, "b": 250, "c": 250, "d": 250}
    assert decoding_only(parse_policy(PREFILL_ONLY, "test", Mode.FULL, Overrides())) == {"a": 1000}


def test_a_burst_between_two_statuses_is_spread() -> None:
    cluster = Cluster(full(), *"abcd")
    assert Counter(cluster.place(f"r{n}")[0] for n in range(40)) == dict.fromkeys("abcd", 10)


def test_a_long_outage_of_the_cms_forgets_nothing_that_was_sent() -> None:
    cluster, placed = Cluster(full(), "a"), Counter[str]()
    cases.put(cluster.view, "b", num_uncomputed_tokens_all_waiting_prefills=600)
    cluster.view.connected = False
    for number in range(40):
        cluster.now += 3
        cluster.account.expire()
        placed.update(cluster.place(f"r{number}", 100))
    assert placed == {"a": 23, "b": 17}
    cluster.view.connected = True
    cluster.account.expire()
    assert len(cluster.account) == 4  # of the last ten seconds


def test_a_newcomer_leaves_its_node_in_service() -> None:
    cluster = Cluster(full(failover_domain="node"), "a", "b", node_id="A")
    cluster.view.put_metadata(cases.metadata("new", node_id="A"))
    assert [cluster.place(f"r{n}") for n in range(3)] == [["a"], ["b"], ["a"]]
    cases.put(cluster.view, "new", 1, schedulable=False, node_id="A")
    with pytest.raises(NotPlaced):
        cluster.place("r3")


def test_the_threshold_of_the_first_metric_counts_where_more_than_the_best_may_be_chosen() -> None:
    """As docs/operate/troubleshooting.md says."""

    def chosen(threshold: float, top_k: int) -> set[str]:
        cluster = Cluster(full(thresholds={InferType.NEUTRAL: threshold}, top_k=top_k))
        for name, tokens in {"a": 300, "b": 100, "c": 200}.items():
            cases.put(cluster.view, name, num_uncomputed_tokens_all_waiting_prefills=tokens)
        dispatcher, request = cluster.dispatcher, Request("", "m", 100)
        rows = {dispatcher.decide(request)[InferType.NEUTRAL].row or 0 for _ in range(50)}
        return {dispatcher.table.instances[row].id for row in rows}

    assert [chosen(threshold, top_k=1) for threshold in (1, 150, 1e6)] == [{"b"}] * 3
    assert [chosen(threshold, top_k=2) for threshold in (1, 150, 1e6)] == [{"b", "c"}, {"b"}, {"b", "c"}]


def test_both_stages_or_none() -> None:
    cluster = Cluster(full(), "p", instance_type="prefill")
    stages = (InferType.PREFILL, InferType.DECODE)
    with pytest.raises(NotPlaced) as error:
        cluster.place("r", 100, *stages)
    assert error.value.kind is NotPlacedKind.NO_MATCH_INFER_TYPE
    assert not cluster.account.in_flight.counters
    cases.put(cluster.view, "d", instance_type="decode")
    assert cluster.place("r", 100, *stages) == ["p", "d"]
    assert cluster.account.in_flight.of("p").num_decode_requests == 0
    assert cluster.account.in_flight.of("d").num_prefill_requests == 0


def test_second_stage_sees_what_the_first_has_placed() -> None:
    seen: list[int] = []

    class Sent:
        """A column that counts what was sent anywhere."""

        columns = ("sent_anywhere",)

        def of_request(self, request: Request, cluster: object) -> list[list[float]]:
            seen.append(sum(each.num_requests for each in made.account.in_flight.counters.values()))
            return [[float(seen[-1])] * len(made.view)]

    text = "full: {prefill: &s {metrics: [sent_anywhere], selector: metricBasedSelector}, decode: *s}"
    made = Cluster(full(), "p", instance_type="prefill")
    cases.put(made.view, "d", instance_type="decode")
    made.dispatcher._providers = (Sent(),)
    metric = Metric("sent_anywhere", Expression("sent_anywhere"))
    policy = parse_policy(text.replace("sent_anywhere", "num_requests"), "test", Mode.FULL, Overrides())
    stages = {kind: replace(stage, metrics=(metric,)) for kind, stage in policy.stages.items()}
    made.dispatcher.policy = replace(policy, stages=stages)
    assert made.place("r", 100, InferType.PREFILL, InferType.DECODE) == ["p", "d"]
    assert seen == [0, 1]


def test_stages_one_after_the_other_are_both_accounted() -> None:
    cluster = Cluster(full(), "p", instance_type="prefill")
    cases.put(cluster.view, "d", instance_type="decode")
    assert cluster.place("r", 100, InferType.PREFILL) == ["p"]
    assert cluster.place("r", 100, InferType.DECODE) == ["d"]
    assert set(cluster.account.in_flight.counters) == {"p", "d"}


def test_a_retry_goes_round_and_comes_back_when_nobody_else_is_left() -> None:
    cluster = Cluster(full(), *"abc")
    assert [cluster.place()[0] for _ in range(4)] == ["a", "b", "c", "a"]
    assert set(cluster.account.in_flight.counters) == {"a"}
    cluster.now = 60.0
    cluster.account.expire()
    for name in "abc":
        cases.put(cluster.view, name, 2)
    assert cluster.place() == ["a"]


def test_a_lost_store_makes_no_instance_stale() -> None:
    cluster = Cluster(full(), "a")
    cluster.view.heard_s, cluster.view.connected = 0.0, False
    cluster.now = 1000.0
    assert cluster.place() == ["a"]
    cluster.view.connected = True
    with pytest.raises(NotPlaced, match="no available endpoint"):
        cluster.place()


def test_nothing_known_and_nobody_to_ask() -> None:
    cluster = Cluster(full())
    cluster.view.connected = False
    with pytest.raises(NotPlaced) as error:
        cluster.place()
    assert error.value.kind is NotPlacedKind.CMS_NOT_AVAILABLE
    cluster.view.connected = True
    with pytest.raises(NotPlaced) as error:
        cluster.place()
    assert error.value.kind is NotPlacedKind.NO_MATCH_INFER_TYPE


def test_a_policy_without_the_stage() -> None:
    cluster = Cluster(parse_policy(PREFILL_ONLY, "test", Mode.FULL, Overrides()), "a")
    with pytest.raises(NotPlaced, match="places no decode requests"):
        cluster.place("r", 1, InferType.DECODE)


def test_a_sick_node_gets_nothing() -> None:
    cluster = Cluster(full(failover_domain="node"))
    for name, node, schedulable in (("a", "n0", True), ("b", "n0", False), ("c", "n1", True)):
        cases.put(cluster.view, name, node_id=node, schedulable=schedulable)
    assert {cluster.place(f"r{n}")[0] for n in range(9)} == {"c"}
    cases.put(cluster.view, "b", 2, node_id="n0")
    assert {cluster.place(f"s{n}")[0] for n in range(30)} == {"a", "b", "c"}


def test_memory_of_placements_is_bounded() -> None:
    cluster = Cluster(full(), *"ab")
    for number in range(50):
        cluster.now += 1.0
        for name in "ab":
            cases.put(cluster.view, name, update_id=number + 2)
        cluster.place(f"r{number}")
        cluster.account.expire()
    assert len(cluster.dispatcher._placed) <= 11
    assert len(cluster.account) <= 11


def _refusal(cluster: Cluster, model: str) -> NotPlacedKind:
    with pytest.raises(NotPlaced) as error:
        cluster.place(model=model)
    return error.value.kind


def test_model_whose_last_instance_left_is_away_and_not_unknown() -> None:
    cluster = Cluster(full(), models=("configured",))
    cases.put(cluster.view, "a", served_models=["m"])
    cases.put(cluster.view, "b", served_models=["n", "adapter"])
    assert _refusal(cluster, "never") is NotPlacedKind.ENDPOINT_NOT_FOUND
    assert _refusal(cluster, "configured") is NotPlacedKind.MODEL_AWAY
    cases.put(cluster.view, "b", 2, served_models=["n"])
    assert _refusal(cluster, "adapter") is NotPlacedKind.MODEL_AWAY
    cluster.view.remove("a")
    assert _refusal(cluster, "m") is NotPlacedKind.MODEL_AWAY
    cluster.now = FORGET_S
    cases.put(cluster.view, "b", 3, served_models=["n"])
    assert _refusal(cluster, "m") is NotPlacedKind.MODEL_AWAY, "a scaler still wants it"
    cluster.now = REMEMBERED_S + 1
    cases.put(cluster.view, "b", 4, served_models=["n"])
    assert _refusal(cluster, "m") is NotPlacedKind.ENDPOINT_NOT_FOUND
    assert cluster.place(model="n") == ["b"]


def test_request_without_a_model_is_placed_where_there_is_one_model() -> None:
    cluster = Cluster(full())
    cases.put(cluster.view, "a", served_models=["m", "adapter"])
    cases.put(cluster.view, "b", served_models=["m"])
    assert cluster.place(model="") in (["a"], ["b"])
    cases.put(cluster.view, "c", served_models=["other"])
    assert _refusal(cluster, "") is NotPlacedKind.MODEL_NEEDED
    cluster.view.remove("c")
    assert cluster.place(model="")


def test_request_that_may_wait_is_told_which_filters_it_waits_for() -> None:
    cluster = Cluster(load_policy("slo", Mode.FULL), "a", num_total_gpu_tokens=1000, num_used_gpu_tokens=990)
    asked = Request("r", "m", 100, ttft_slo_ms=1000.0)
    with pytest.raises(NotPlaced, match=r"would meet its objectives \(roomFilter\)") as error:
        cluster.dispatcher.schedule(replace_request(asked, may_wait=True))
    assert error.value.kind is NotPlacedKind.NO_ENDPOINT_IN_TIME
    assert cluster.dispatcher.schedule(asked)[0].instance.id == "a"
