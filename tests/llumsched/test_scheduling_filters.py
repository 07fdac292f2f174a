# SPDX-License-Identifier: Apache-2.0
"""Who survives, and the reason for every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from llumlet.types import Health
from llumsched.cms.view import Instance
from llumsched.scheduling import filters as f
from llumsched.scheduling.load import Context, InferType, Load, Request
from llumsched.scheduling.metrics import METRICS, Metric
from tests.llumsched import scheduling_cases as cases

NOW = 100.0


def context(**fields: Any) -> Context:
    return Context(NOW, Request(**fields))


@pytest.mark.parametrize(
    ("one", "refused", "accepted", "reason"),
    [
        (f.ModelFilter(), cases.load("a", served_models=["x"]), cases.load("a", model="x"), "does not serve 'm'"),
        (f.InferTypeFilter(InferType.DECODE), cases.load("a", instance_type="prefill"),
         cases.load("a", instance_type="decode"), "is prefill, not decode"),
        (f.CapacityFilter(), cases.load("a", max_model_len=1000), cases.load("a", max_model_len=1001),
         "a prompt of 1000 tokens does not fit: 999 at most"),
        (f.CapacityFilter(), cases.load("a", num_total_gpu_tokens=1000), cases.load("a", num_total_gpu_tokens=0),
         "a prompt of 1000 tokens does not fit: 999 at most"),
        (f.RetryFilter(), cases.load("bad"), cases.load("a"), "had this request before"),
        (f.SchedulabilityFilter(), cases.load("a", schedulable=False), cases.load("a"), "takes no new requests"),
        (f.SchedulabilityFilter(), cases.load("a", health=Health.HUNG, loop_age_ms=4200.0),
         cases.load("a", health=Health.OK), "hung: its loop has not moved for 4.2 s"),
        (f.SchedulabilityFilter(), Load(Instance(cases.metadata("a"), None, 0.0)), cases.load("a"),
         "has not reported its status yet"),
        (f.StalenessFilter(60), cases.load("a", received_s=39.9), cases.load("a", received_s=40.0),
         "last status 60.1 s ago"),
        (f.MetricBasedFilter(METRICS["num_requests"], 4), cases.load("a", num_running_requests=4),
         cases.load("a", num_running_requests=3), "num_requests is 4, not below 4"),
        (f.MetricBasedFilter(Metric("free", False, lambda load: load.status.num_free_blocks), 4),
         cases.load("a", num_free_blocks=4), cases.load("a", num_free_blocks=5), "free is 4, not above 4"),
    ],
)  # fmt: skip
def test_filter(one: f.Filter, refused: Load, accepted: Load, reason: str) -> None:
    seen = context(model="m", prompt_num_tokens=1000, avoid=frozenset({"bad"}))
    assert one.refuse(refused, seen) == reason
    if not isinstance(one, f.ModelFilter):
        assert one.refuse(accepted, seen) is None


def test_a_model_by_its_served_names_else_by_the_engine_s() -> None:
    lora = cases.instance("a", model="base", served_models=["alias", "adapter"])
    assert f.serves(lora, "adapter")
    assert not f.serves(lora, "base")
    assert f.serves(cases.instance("a", model="base", served_models=[]), "base")
    assert f.serves(lora, "")


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
    found = f.failover_set(units(), {failed}, f.FailoverDomain(domain))
    assert found == set(together.split())


@pytest.mark.parametrize(
    ("domain", "together"), [("instance", "i0"), ("instance-unit", "i0"), ("node", "i0 i1"), ("node-unit", "i0 i1")]
)
def test_failover_domains_of_single_instances(domain: str, together: str) -> None:
    instances = [cases.instance(f"i{n}", node_id=f"node{n // 2}", unit_id="same") for n in range(4)]
    assert f.failover_set(instances, {"i0"}, f.FailoverDomain(domain)) == set(together.split())


def test_an_instance_without_a_place_fails_alone() -> None:
    instances = [cases.instance("a"), cases.instance("b")]
    assert f.failover_set(instances, {"a"}, f.FailoverDomain.NODE_UNIT) == {"a"}


def test_every_refusal_has_its_reason_and_its_own_filter() -> None:
    threshold = f.MetricBasedFilter(METRICS["num_requests"], 4)
    filters = [f.SchedulabilityFilter(), threshold, f.FailoverFilter(f.FailoverDomain.NODE)]
    loads = [
        cases.load("bad", schedulable=False, num_running_requests=9, node_id="A"),
        cases.load("beside", node_id="A"),
        cases.load("busy", num_running_requests=9, node_id="B"),
        cases.load("good", node_id="B"),
    ]
    done = f.apply(filters, loads, context())
    assert [load.instance.id for load in done.survivors] == ["good"]
    assert done.failed == {"bad"}
    assert {key: [one.filter for one in value] for key, value in done.refusals.items()} == {
        "bad": ["schedulabilityFilter", "metricBasedFilter", "failoverFilter"],
        "beside": ["failoverFilter"],
        "busy": ["metricBasedFilter"],
    }
    again = f.apply(filters, loads, context(), fallback=True)
    assert [load.instance.id for load in again.survivors] == ["busy", "good"]


def test_a_newcomer_does_not_fail_its_domain() -> None:
    filters = [f.SchedulabilityFilter(), f.StalenessFilter(60), f.FailoverFilter(f.FailoverDomain.NODE)]
    newcomer = Load(Instance(cases.metadata("new", node_id="A"), None, NOW - 70))
    loads = [newcomer, cases.load("beside", received_s=NOW, node_id="A")]
    done = f.apply(filters, loads, context())
    assert [load.instance.id for load in done.survivors] == ["beside"]
    assert not done.failed
    assert [one.filter for one in done.refusals["new"]] == ["schedulabilityFilter", "stalenessFilter"]


def test_sources_of_a_failover_are_the_ones_that_destinations_are_not() -> None:
    loads = [cases.load("bad", schedulable=False), cases.load("good")]
    failed = f.apply([f.SchedulabilityFilter()], loads, context()).failed
    refused = f.FailoverMigrationSrcFilter(f.FailoverDomain.INSTANCE).refuse_among(
        [load.instance for load in loads], failed
    )
    assert refused == {"good": "shares its instance with no failed instance"}
