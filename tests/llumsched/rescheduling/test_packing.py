# SPDX-License-Identifier: Apache-2.0
"""Policies that pack. The worked examples are those of Llumnix's documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.instance import Instance
from llumsched.latency.fitting import Coefficients
from llumsched.policy.reader import PolicyError
from llumsched.rescheduling.planning.moves import Purpose, Selection
from llumsched.rescheduling.planning.policies import load_rescheduling_policy
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from tests.llumsched.cases import UNKNOWN, Known
from tests.llumsched.rescheduling.cluster import CAPACITY, instance, pairs, planned

MITIGATION = ReschedulingConfig(policies=("binpacking_mitigation",), tpot_slo=50.0)
CONSOLIDATION = replace(MITIGATION, policies=("binpacking_consolidation",))
STEPS = Known(Coefficients(a=0.02, b=0.001, c=0.0, d=0.0005, e=0.0))
"""A step of 20 ms, half of one more for each request that decodes."""


def at(name: str, tpot_ms: float, **fields: Any) -> Instance:
    """With so many decodes that each token takes so long."""
    number = round((tpot_ms - 20.0) / 0.5)
    busy = {"scheduler_running_to_decode_requests_num": number, "num_running_requests": number}
    return instance(name, number * 0.005, **{"max_migrations_out": 100, "max_migrations_in": 100, **busy, **fields})


def test_mitigation_moves_the_last_request_to_the_fullest_punctual() -> None:
    [move] = planned([at("D1", 48.0), at("D2", 35.0), at("idle", 21.0)], MITIGATION, known=STEPS).moves
    assert (move.source, move.destination, move.purpose) == ("D1", "D2", Purpose.PACK)
    assert move.selection == Selection(Unit.NUM_REQ, Order.LCR, 1)
    assert move.expected_requests == 1
    assert pairs(planned([at("D1", 47.0), at("D2", 35.0)], MITIGATION, known=STEPS)) == []
    assert pairs(planned([at("D1", 48.0), at("D2", 43.0)], MITIGATION, known=STEPS)) == []


def test_consolidation_moves_all_to_the_fullest_punctual() -> None:
    [move] = planned([at("D3", 25.0), at("D4", 40.0), at("D5", 30.0)], CONSOLIDATION, known=STEPS).moves
    assert (move.source, move.destination) == ("D3", "D4")
    assert move.selection == Selection(Unit.NUM_REQ, Order.LCR, 10), "what waits stays"
    assert move.expected_requests == 10


def test_of_several_sources_the_slowest_is_relieved_and_the_fastest_emptied() -> None:
    late = [at("a", 48.0), at("b", 55.0), at("c", 50.0), at("room", 30.0)]
    assert pairs(planned(late, MITIGATION, known=STEPS)) == [("b", "room")]
    idle = [at("a", 27.0), at("b", 22.0), at("c", 25.0), at("full", 42.0)]
    assert pairs(planned(idle, CONSOLIDATION, known=STEPS)) == [("b", "full")]


def test_a_destination_is_looked_at_with_all_that_comes() -> None:
    """25 and 42 ms: 47 together, below the 47.5 from which on it would give away itself; 26 and 42 are 48."""
    [move] = planned([at("a", 25.0), at("b", 42.0)], CONSOLIDATION, known=STEPS).moves
    assert move.destination == "b"
    made = planned([at("a", 26.0), at("b", 42.0)], CONSOLIDATION, known=STEPS)
    assert made.moves == ()
    assert made.results[0].refused == {"above_limit": 1}
    [move] = planned([at("a", 26.0), at("b", 42.0), at("c", 27.0)], CONSOLIDATION, known=STEPS).moves
    assert move.destination == "c"


@pytest.mark.parametrize(
    ("fields", "number", "value"),
    [({"max_migrations_out": 4}, 4, 4), ({"max_migrations_out": 10}, 10, 10), ({"max_migrations_out": 11}, 10, 10)],
)
def test_no_more_at_a_time_than_may_move(fields: dict[str, int], number: int, value: int) -> None:
    [move] = planned([at("a", 25.0, **fields), at("b", 40.0)], CONSOLIDATION, known=STEPS).moves
    assert (move.expected_requests, move.selection.value) == (number, value)


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        ({"scheduler_running_to_decode_urgent_requests_num": 1}, {}, None),
        ({}, {"schedulable": False}, "no_destination"),
        ({"instance_type": "decode"}, {}, "no_destination"),
        ({}, {"num_used_gpu_tokens": CAPACITY}, "no_room"),
        ({}, {"scheduler_running_to_decode_requests_num": 0}, "no_destination"),
    ],
)
def test_packing_leaves_some_requests(source: dict[str, Any], destination: dict[str, Any], reason: str | None) -> None:
    made = planned([at("a", 25.0, **source), at("b", 40.0, **destination)], CONSOLIDATION, known=STEPS)
    assert made.moves == ()
    assert list(made.results[0].refused) == ([reason] if reason else [])


def test_each_type_packs_among_itself() -> None:
    cluster = [at("a", 25.0, instance_type="decode"), at("b", 40.0, instance_type="decode"), at("c", 42.0)]
    assert pairs(planned(cluster, CONSOLIDATION, known=STEPS)) == [("a", "b")]


@pytest.mark.parametrize("config", [MITIGATION, CONSOLIDATION])
def test_nothing_is_packed_while_nobody_knows_how_long_steps_take(config: ReschedulingConfig) -> None:
    assert planned([at("a", 60.0), at("b", 25.0)], config, known=Known(UNKNOWN)).moves == ()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(20, 60), min_size=2, max_size=8), st.booleans())
def test_it_comes_to_rest_and_nobody_is_made_late(tpots: list[int], mitigates: bool) -> None:
    """Pass by pass, until nothing moves: at most one source each, and no destination that has to give itself."""
    config = MITIGATION if mitigates else CONSOLIDATION
    loads = {f"i{number}": float(tpot) for number, tpot in enumerate(tpots)}
    for _ in range(200):
        moves = planned([at(name, tpot) for name, tpot in loads.items()], config, known=STEPS).moves
        assert len(moves) <= 1
        if not moves:
            break
        (move,) = moves
        loads[move.source] -= 0.5 * move.expected_requests
        loads[move.destination] += 0.5 * move.expected_requests
        assert loads[move.destination] < 47.5
    else:
        raise AssertionError(f"it goes on: {loads}")
    late = [name for name, tpot in loads.items() if tpot >= 47.5]
    assert not late or not mitigates or all(tpot >= 42.5 for tpot in loads.values() if tpot < 47.5)


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        ("num_waiting_requests", "'num_waiting_requests' is no formula of constants: it names num_waiting_requests"),
        ("most +", "is no formula"),
        ("true", "True is no formula"),
    ],
)
def test_a_limit_is_a_formula_of_constants(limit: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = """
name: mine
define: {constants: {most: 40}}
rescheduling: {selector: {binPackingMitigationSelector: {metric: num_requests, limit: LIMIT}}}
"""
    file.write_text(text.replace("LIMIT", "most / 2"))
    assert load_rescheduling_policy(str(file), ReschedulingConfig()).selector.limit == 20  # type: ignore[attr-defined]
    file.write_text(text.replace("LIMIT", limit))
    with pytest.raises(PolicyError, match=fault.replace("(", r"\(")):
        load_rescheduling_policy(str(file), ReschedulingConfig())


def test_an_infer_type_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nrescheduling: {infer_type: all, selector: {roundRobinSelector: {}}}\n")
    with pytest.raises(PolicyError, match="infer_type 'all' is none of neutral, prefill, decode, any"):
        load_rescheduling_policy(str(file), ReschedulingConfig())
