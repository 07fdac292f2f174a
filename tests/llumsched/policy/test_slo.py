# SPDX-License-Identifier: Apache-2.0
"""The built-in policy of objectives: who is chosen, and when somebody who may wait is asked to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.latency.fitting import Coefficients
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.policy.pipeline import Decision, run
from llumsched.policy.reader import PolicyError
from llumsched.policy.selectors import Draw
from tests.llumsched import cases
from tests.llumsched.cases import Known

STEPS = Known(Coefficients(a=0.02, b=0.001, c=0.0, d=0.001, e=0.0))
"""A step of 20 ms, one more for each token of a prefill and each request that decodes."""


def instance(name: str, decodes: int = 0, waiting: int = 0, used: float = 0.1, **fields: Any) -> Instance:
    """`waiting`: tokens that are to be computed first."""
    return cases.instance(
        name,
        scheduler_running_to_decode_requests_num=decodes,
        num_uncomputed_tokens_all_waiting_prefills=waiting,
        num_used_gpu_tokens=int(used * 10_000) - waiting,
        max_num_batched_tokens=4096,
        **fields,
    )


def decision(
    *instances: Instance,
    infer_type: InferType = InferType.NEUTRAL,
    constants: dict[str, float] | None = None,
    known: Known = STEPS,
    **request: Any,
) -> Decision:
    """For a prompt of 100 tokens, which takes 121 ms alone, if nothing else is said."""
    policy = load_policy("slo", Mode.FULL, Overrides(constants=constants or {}))
    candidates = cases.candidates(*instances, known=known, **{"prompt_num_tokens": 100} | request)
    return run(policy.stages[infer_type], candidates, Draw(random.Random(0)))


def chosen(*instances: Instance, **more: Any) -> str | None:
    made = decision(*instances, **more)
    return None if made.row is None else instances[made.row].id


def reasons(made: Decision, row: int = 0) -> list[str]:
    return [one.name for one, mask in made.screening.refused if mask[row]]


def test_of_those_in_time_the_one_with_the_least_to_compute_first() -> None:
    fleet = instance("a", waiting=400), instance("b", decodes=20, waiting=100), instance("c", waiting=300)
    assert chosen(*fleet, ttft_slo_ms=5000, tpot_slo_ms=100) == "b"


def test_in_time_goes_before_little_to_compute() -> None:
    slow, busy = instance("slow", decodes=60), instance("busy", waiting=400)
    assert chosen(slow, busy, ttft_slo_ms=5000, tpot_slo_ms=50) == "busy"
    assert chosen(slow, busy, ttft_slo_ms=5000, tpot_slo_ms=200) == "slow"


def test_a_full_cache_is_no_room_to_spare() -> None:
    full, busy = instance("full", used=0.97), instance("busy", waiting=400)
    assert chosen(full, busy, ttft_slo_ms=5000) == "busy"


def test_where_nobody_is_in_time_the_least_miss() -> None:
    fleet = instance("a", waiting=2000), instance("b", waiting=1500), instance("c", waiting=3000)
    assert chosen(*fleet, ttft_slo_ms=500) == "b"


@pytest.mark.parametrize(
    ("fleet", "request_", "refused_by"),
    [
        ([instance("late", waiting=2000)], {"ttft_slo_ms": 1500}, ["ttftFilter"]),
        ([instance("late", waiting=2000)], {"ttft_slo_ms": 3000}, []),
        ([instance("late", waiting=2000)], {"ttft_slo_ms": 3000, "waited_ms": 1500}, ["ttftFilter"]),
        ([instance("slow", decodes=40)], {"tpot_slo_ms": 50}, ["tpotFilter"]),
        ([instance("slow", decodes=20)], {"tpot_slo_ms": 50}, []),
        ([instance("full", used=0.96)], {"ttft_slo_ms": 5000}, ["roomFilter"]),
    ],
)
def test_waiting_request_waits_for_a_punctual_instance(
    fleet: list[Instance], request_: dict[str, float], refused_by: list[str]
) -> None:
    made = decision(*fleet, may_wait=True, **{"ttft_slo_ms": 60_000, "tpot_slo_ms": 1000} | request_)
    assert reasons(made) == refused_by
    assert (made.row is None) == bool(refused_by)
    assert chosen(*fleet, **request_) == fleet[0].id, "who may not wait goes"


def test_late_request_goes_to_an_empty_queue() -> None:
    idle, busy = instance("idle"), instance("busy", waiting=500)
    late = {"ttft_slo_ms": 1000, "tpot_slo_ms": 100, "waited_ms": 5000, "may_wait": True}
    assert chosen(busy, **late) is None
    assert chosen(busy, idle, **late) == "idle"


def test_an_objective_that_nobody_could_meet_is_late_from_the_start() -> None:
    assert chosen(instance("idle"), ttft_slo_ms=1, tpot_slo_ms=100, may_wait=True) == "idle"


def test_while_nobody_knows_how_long_steps_take_nobody_waits() -> None:
    fleet = instance("a", waiting=300), instance("b", waiting=100)
    assert chosen(*fleet, known=Known(cases.UNKNOWN), ttft_slo_ms=1, tpot_slo_ms=1, may_wait=True) == "b"


@pytest.mark.parametrize("infer_type", list(InferType))
def test_an_instance_of_whose_steps_nothing_is_known_gets_its_share(infer_type: InferType) -> None:
    """Without requests it would never be known: a new version beside an old one would stay idle."""
    known, kind = cases.KnownOf("old"), {"instance_type": infer_type.value}
    old, new = instance("old", **kind), instance("new", **kind)
    more = {"known": known, "infer_type": infer_type, "ttft_slo_ms": 5000, "tpot_slo_ms": 1000}
    if infer_type is not InferType.DECODE:
        assert chosen(old, new, **more) == "new", "first among equals"
        assert chosen(old, instance("new", waiting=500, **kind), **more) == "old", "and no more than that"
    assert chosen(instance("old", used=0.5, **kind), new, **more) == "new" or infer_type is InferType.PREFILL
    late = {**more, "ttft_slo_ms": 0.001, "tpot_slo_ms": 0.001}
    assert chosen(old, new, **late) == "new", "where nobody else is in time"
    full = instance("new", used=0.99, **kind)
    assert infer_type is InferType.PREFILL or chosen(old, full, **more) == "old", "it has no room"


def test_constants_are_the_objectives_of_who_names_none() -> None:
    made = decision(instance("a", waiting=3000), may_wait=True, constants={"ttft_slo": 2000.0})
    assert reasons(made) == ["ttftFilter"]
    made = decision(instance("a", decodes=40), may_wait=True)
    assert reasons(made) == ["tpotFilter"]
    assert decision(instance("a", decodes=40), may_wait=True, constants={"tpot_slo": 80.0}).row == 0


@pytest.mark.parametrize(("infer_type", "better"), [(InferType.PREFILL, "slow"), (InferType.DECODE, "busy")])
def test_each_stage_looks_at_its_own_objective(infer_type: InferType, better: str) -> None:
    kind = {"instance_type": infer_type.value}
    fleet = instance("slow", decodes=60, **kind), instance("busy", waiting=1000, **kind)
    assert chosen(*fleet, infer_type=infer_type, ttft_slo_ms=500, tpot_slo_ms=50) == better


def test_it_needs_to_know_how_instances_get_on() -> None:
    with pytest.raises(PolicyError, match="has no section 'lite'"):
        load_policy("slo", Mode.LITE)
