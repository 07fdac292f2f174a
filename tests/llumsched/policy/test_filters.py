# SPDX-License-Identifier: Apache-2.0
"""Who is refused, and the reason for every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llumlet.contract.types import Health
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.columns import serves
from llumsched.cluster.domains import FailoverDomain, failing_with
from llumsched.cluster.instance import Instance
from llumsched.policy import filters as f
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import METRICS, Metric
from llumsched.policy.pipeline import Filters, screen
from tests.llumsched import cases

NOW = 100.0


@pytest.mark.parametrize(
    ("one", "refused", "accepted", "reason"),
    [
        (f.ModelFilter(), cases.instance("b", served_models=["x"]), cases.instance("a"), "does not serve 'm'"),
        (f.InferTypeFilter(InferType.DECODE), cases.instance("b", instance_type="prefill"),
         cases.instance("a", instance_type="decode"), "is prefill, not decode"),
        (f.CapacityFilter(), cases.instance("b", max_model_len=1000), cases.instance("a", max_model_len=1001),
         "a prompt of 1000 tokens does not fit: 999 at most"),
        (f.CapacityFilter(), cases.instance("b", num_total_gpu_tokens=1000),
         cases.instance("a", num_total_gpu_tokens=0), "a prompt of 1000 tokens does not fit: 999 at most"),
        (f.RetryFilter(), cases.instance("b"), cases.instance("a"), "had this request before"),
        (f.BreakerFilter(), cases.instance("b"), cases.instance("a"), "slow: three times"),
        (f.SchedulabilityFilter(), cases.instance("b", schedulable=False), cases.instance("a"),
         "takes no new requests"),
        (f.SchedulabilityFilter(), cases.instance("b", health=Health.HUNG, loop_age_ms=4200.0),
         cases.instance("a", health=Health.OK), "hung: its loop has not moved for 4.2 s"),
        (f.SchedulabilityFilter(), cases.starting("b"), cases.instance("a"), "has not reported its status yet"),
        (f.StalenessFilter(60), cases.instance("b", received_s=39.9), cases.instance("a", received_s=40.0),
         "last status 60.1 s ago"),
        (f.MetricBasedFilter(METRICS["num_requests"], 4), cases.instance("b", num_running_requests=4),
         cases.instance("a", num_running_requests=3), "num_requests is 4, not below 4"),
        (f.MetricBasedFilter(Metric("free", Expression("num_free_blocks"), less_is_better=False), 4),
         cases.instance("b", num_free_blocks=4), cases.instance("a", num_free_blocks=5), "free is 4, not above 4"),
        (f.ConditionFilter("roomFilter", Expression("prompt_num_tokens > 10 * num_free_blocks"), "no room"),
         cases.instance("b", num_free_blocks=99), cases.instance("a", num_free_blocks=100),
         "no room (num_free_blocks is 99, prompt_num_tokens is 1000)"),
    ],
)  # fmt: skip
def test_filter(one: f.Filter, refused: Instance, accepted: Instance, reason: str) -> None:
    seen = cases.candidates(
        accepted, refused, now_s=NOW, complaints={"b": "slow: three times"}, model="m", prompt_num_tokens=1000,
        avoid=frozenset({"b"}),
    )  # fmt: skip
    assert one.refuse(seen).tolist() == [False, True]
    assert one.reason(seen, 1) == reason


def test_a_model_by_its_served_names_else_by_the_engine_s() -> None:
    lora = cases.instance("a", model="base", served_models=["alias", "adapter"])
    assert serves(lora, "adapter")
    assert not serves(lora, "base")
    assert serves(cases.instance("a", model="base", served_models=[]), "base")
    assert serves(lora, "")


def failing(instances: list[Instance], failed: str, domain: str) -> set[str]:
    table = cases.table(*instances)
    together = failing_with(FailoverDomain(domain), np.array([one.id == failed for one in instances]), table)
    return {one.id for one, fails in zip(instances, together, strict=True) if fails}


def units() -> list[Instance]:
    """Two engines of two ranks each, over three nodes."""
    places = [("r0", "A", "U"), ("r1", "B", "U"), ("r2", "B", "V"), ("r3", "C", "V")]
    return [cases.instance(id, node_id=node, unit_id=unit, data_parallel_size=2) for id, node, unit in places]


@pytest.mark.parametrize(
    ("failed", "domain", "together"),
    [
        ("r0", "instance", "r0"),
        ("r0", "instance-unit", "r0 r1"),
        ("r0", "node", "r0"),
        ("r0", "node-unit", "r0 r1"),
        ("r1", "node", "r1 r2"),
        ("r1", "node-unit", "r0 r1 r2 r3"),
    ],
)
def test_failover_domains_of_units(failed: str, domain: str, together: str) -> None:
    assert failing(units(), failed, domain) == set(together.split())


@pytest.mark.parametrize(
    ("domain", "together"), [("instance", "i0"), ("instance-unit", "i0"), ("node", "i0 i1"), ("node-unit", "i0 i1")]
)
def test_failover_domains_of_single_instances(domain: str, together: str) -> None:
    instances = [cases.instance(f"i{n}", node_id=f"node{n // 2}", unit_id="same") for n in range(4)]
    assert failing(instances, "i0", domain) == set(together.split())


def test_an_instance_without_a_place_fails_alone() -> None:
    assert failing([cases.instance("a"), cases.instance("b")], "a", "node-unit") == {"a"}


def screened(filters: list[Any], *instances: Instance) -> tuple[set[str], set[str], dict[str, list[str]]]:
    """Ids of those who pass and of those who failed, and the names of the filters that refuse each of the others."""
    found = screen(Filters.of(filters), cases.candidates(*instances, now_s=NOW))
    refused: dict[str, list[str]] = {}
    for one, mask in found.refused:
        for row in np.flatnonzero(mask):
            refused.setdefault(instances[row].id, []).append(one.name)
    passed, failed = ({instances[row].id for row in np.flatnonzero(mask)} for mask in (found.passed, found.failed))
    return passed, failed, refused


def test_every_refusal_has_its_own_filter() -> None:
    passed, failed, refused = screened(
        [
            f.FailoverFilter(FailoverDomain.NODE),
            f.SchedulabilityFilter(),
            f.MetricBasedFilter(METRICS["num_requests"], 4),
        ],
        cases.instance("bad", schedulable=False, num_running_requests=9, node_id="A"),
        cases.instance("beside", node_id="A"),
        cases.instance("busy", num_running_requests=9, node_id="B"),
        cases.instance("good", node_id="B"),
    )
    assert (passed, failed) == ({"good"}, {"bad"})
    assert refused == {
        "bad": ["schedulabilityFilter", "metricBasedFilter", "failoverFilter"],
        "beside": ["failoverFilter"],
        "busy": ["metricBasedFilter"],
    }


def test_a_newcomer_does_not_fail_its_domain() -> None:
    passed, failed, refused = screened(
        [f.SchedulabilityFilter(), f.StalenessFilter(60), f.FailoverFilter(FailoverDomain.NODE)],
        cases.starting("new", NOW - 70, node_id="A"),
        cases.instance("beside", received_s=NOW, node_id="A"),
    )
    assert (passed, failed) == ({"beside"}, set())
    assert refused == {"new": ["schedulabilityFilter", "stalenessFilter"]}


def test_sources_of_a_failover_are_the_ones_that_destinations_are_not() -> None:
    seen = cases.candidates(cases.instance("bad"), cases.instance("good"))
    failed = np.array([True, False])
    one = f.FailoverMigrationSrcFilter(FailoverDomain.INSTANCE)
    assert one.refuse_among(seen, failed).tolist() == [False, True]
    assert one.reason_among(seen, failed, 1) == "shares its instance with no failed instance"
