# SPDX-License-Identifier: Apache-2.0
"""Policies of rescheduling from files: the built-in ones, what flags change in them, one's own, and wrong ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llumlet.protocol.infer_type import InferType
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.policy.filters import FailoverFilter, FailoverMigrationSrcFilter, InferTypeFilter, StalenessFilter
from llumsched.policy.metrics import METRICS
from llumsched.policy.reader import PolicyError, built_in_policies
from llumsched.rescheduling.planning.balance import MetricBalancePairs
from llumsched.rescheduling.planning.failover import RoundRobinPairs
from llumsched.rescheduling.planning.moves import Selection
from llumsched.rescheduling.planning.policies import load_policies, load_rescheduling_policy
from llumsched.rescheduling.rescheduling_config import OF_ONE_TYPE, POLICIES, LoadTarget, ReschedulingConfig, Scope
from tests.llumsched import cases
from tests.llumsched.cases import distribution
from tests.llumsched.rescheduling.cluster import instance, pairs, planned

MINE = """
name: batches
define:
  metrics:
    batch: {value: scheduler_running_to_decode_requests_num + 2 * num_waiting_requests}
  filters:
    busyFilter: {refuse: num_uncomputed_tokens_all_waiting_prefills > 4096}
rescheduling:
  infer_type: neutral
  failed: [schedulabilityFilter]
  sources: [failoverFilter: {domain: node}]
  destinations: [failoverFilter: {domain: node}, busyFilter]
  selector: {metricBalanceSelector: {metric: batch, threshold: 10, rule: NUM_REQ, order: SR, value: 2}}
"""


def test_every_configured_name_is_a_built_in_policy() -> None:
    assert built_in_policies("rescheduling") == sorted(set(POLICIES) - OF_ONE_TYPE.keys())
    assert [policy.name for policy in load_policies(ReschedulingConfig(policies=POLICIES))] == list(POLICIES)
    assert set(ReschedulingConfig().policies) < set(POLICIES)


@pytest.mark.parametrize(
    ("name", "infer_type"),
    [
        ("decode_load", InferType.DECODE),
        ("neutral_load", InferType.NEUTRAL),
        ("prefill_failover", InferType.PREFILL),
        ("decode_failover", InferType.DECODE),
        ("neutral_failover", InferType.NEUTRAL),
    ],
)
def test_names_of_llumnix_are_one_policy_on_the_instances_of_one_type(name: str, infer_type: InferType) -> None:
    policy = load_rescheduling_policy(name, ReschedulingConfig())
    of_all = load_rescheduling_policy(name.removeprefix(f"{infer_type}_"), ReschedulingConfig())
    assert policy.name == name
    of_type = InferTypeFilter(infer_type)
    for ends, all_ends in ((policy.sources, of_all.sources), (policy.destinations, of_all.destinations)):
        assert (ends.singles, ends.groups) == ((of_type, *all_ends.singles), all_ends.groups)
    assert (policy.failed, policy.selector) == (of_all.failed, of_all.selector)


def test_failover_of_all_types_keeps_requests_among_instances_of_one_type() -> None:
    cluster = [
        instance(f"{infer_type}-{name}", 0.1, instance_type=infer_type, schedulable=name != "sick")
        for infer_type in InferType
        for name in ("sick", "well")
    ]
    assert sorted(pairs(planned(cluster, ReschedulingConfig(("failover",))))) == [
        (f"{infer_type}-sick", f"{infer_type}-well") for infer_type in sorted(InferType)
    ]


def test_flags_go_before_what_is_written_in_the_built_in_files() -> None:
    config = ReschedulingConfig(
        decode=LoadTarget("decode_batch_size", 32), balance_threshold=3, scope=Scope.UNIT,
        selection=Selection(Unit.NUM_REQ, Order.LCR, 2), failover_domain=FailoverDomain.NODE, staleness_s=7,
    )  # fmt: skip
    balance = load_rescheduling_policy("decode_load", config)
    assert balance.selector == MetricBalancePairs(
        METRICS["decode_batch_size"], 32, 3, Scope.UNIT, Selection(Unit.NUM_REQ, Order.LCR, 2)
    )
    failover = load_rescheduling_policy("decode_failover", config)
    assert failover.selector == RoundRobinPairs()
    assert StalenessFilter(7) in failover.failed.singles
    assert failover.sources.groups == (FailoverMigrationSrcFilter(FailoverDomain.NODE),)
    assert failover.destinations.groups == (FailoverFilter(FailoverDomain.NODE),)


def test_a_file_of_one_s_own_says_everything_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    config = ReschedulingConfig(
        (str(path),), neutral=LoadTarget(threshold=0.99), failover_domain=FailoverDomain.INSTANCE
    )
    policies = load_policies(config)

    def batch(name: str, requests: int, **more: object) -> object:
        return instance(name, 0.4, scheduler_running_to_decode_requests_num=requests, **more)

    cluster = [
        batch("hot", 20, node_id="A"),
        batch("beside", 0, node_id="B"),
        batch("sick", 0, node_id="B", schedulable=False),
        batch("busy", 1, num_uncomputed_tokens_all_waiting_prefills=5000),
        batch("waits", 0, num_waiting_requests=4),
        batch("warm", 9),
    ]
    made = planned(cluster, config, policies=policies)  # type: ignore[arg-type]
    assert pairs(made) == [("hot", "waits")]
    assert made.moves[0].selection == Selection(Unit.NUM_REQ, Order.SR, 2)
    assert (made.results[0].num_sources, made.results[0].num_destinations) == (1, 2)


def test_the_headroom_of_urgent_requests_is_the_same_for_files_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rescheduling: {selector: {metricBalanceSelector: {metric: virtual_usage}}}")
    table = cases.table(cases.instance("a", num_urgent_requests=1))
    for config, headroom in ((ReschedulingConfig(), 0.5), (ReschedulingConfig(priority_headroom=0.25), 0.25)):
        config = replace(
            config, policies=("neutral_load", "neutral_waiting", str(path)), neutral=LoadTarget("virtual_usage")
        )
        for policy in load_policies(config):
            assert policy.selector.metric.values(table).tolist() == [headroom]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("[]", "has no section 'rescheduling'"),
        ("{selector: roundRobinSelector, source: []}", "has unknown keys source; known: destinations, failed, infer_"),
        ("{selector: roundRobinSelector, infer_type: encode}", "infer_type 'encode' is none of neutral, prefill, deco"),
        ("{selector: roundRobinSelector, sources: all}", "rescheduling.sources: filters is not a list"),
        ("{selector: metricBasedSelector}", "unknown selector 'metricBasedSelector'; known: binPackingCon"),
        ("{selector: metricBalanceSelector}", "missing 1 required positional argument: 'metric'"),
        ("{selector: {metricBalanceSelector: {metric: num_tokens}}}", "metric 'num_tokens' is no load of a status"),
        ("{selector: {metricBalanceSelector: {metric: num_requests, value: 0.5}}}", "value 0.5 is not a whole number"),
        ("{selector: {metricBalanceSelector: {metric: num_requests, order: FCW}}}", "value 0 .as needed. counts"),
        ("{selector: {metricBalanceSelector: {metric: num_requests, rule: SOME}}}", "'SOME' is not a valid Unit"),
        ("{sources: [metricBasedFilter: {metric: nope, threshold: 1}], selector: roundRobinSelector}",
         "rescheduling.sources: metric 'nope' is unknown"),
    ],
)  # fmt: skip
def test_wrong_files(section: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"rescheduling: {section}")
    with pytest.raises(PolicyError, match=said):
        load_policies(ReschedulingConfig((str(path),)))


def test_all_files_are_read_before_their_faults_are_said(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as error:
        load_policies(ReschedulingConfig((str(tmp_path / "gone.yaml"), "nobody_load", "neutral_load")))
    assert [fault.split(":")[0].split(";")[0] for fault in error.value.faults] == [
        f"policy {tmp_path}/gone.yaml", "unknown policy 'nobody_load'",
    ]  # fmt: skip


def test_selectors_of_pairs_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from llumlet.protocol.infer_type import InferType
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.providers.status import Cargo
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection

class FirstToLast:
    name, purpose = "firstToLast", Purpose.BALANCE

    def pair(self, draft, policy, ends):
        first, last = 0, len(draft.snapshot) - 1
        ids, cargo = draft.snapshot.ids, Cargo(1, 100)
        move = Move(policy, self.purpose, ids[first], ids[last], Selection(Unit.NUM_REQ, Order.SR, 1), cargo.tokens)
        draft.choose(first, last, move, cargo)
        return 1, 1
"""
    entry_points = "[llumnix.pair_selectors]\nfirstToLast = tiny_pairs:FirstToLast\nnone = tiny_pairs:Move\n"
    distribution(tmp_path, entry_points, source, "tiny_pairs")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("rescheduling: {selector: firstToLast}")
    config = ReschedulingConfig((str(path),))
    made = planned([instance(name, 0.1) for name in "abc"], config, policies=load_policies(config))
    assert pairs(made) == [("a", "c")]
    path.write_text("rescheduling: {selector: none}")
    with pytest.raises(PolicyError, match="missing"):
        load_policies(config)
