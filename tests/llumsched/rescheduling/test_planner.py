# SPDX-License-Identifier: Apache-2.0
"""Which moves a pass chooses. The worked examples are those of Llumnix's documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llumlet.contract.types import Health, InstanceStatus, Mode
from llumlet.protocol.move.selection import ALL, Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.status import Cargo
from llumsched.cluster.table import standard_table
from llumsched.latency.fitting import Coefficients
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.executing.orders import migrate_request
from llumsched.rescheduling.planning.balance import MetricBalancePairs
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.rescheduling.planning.planner import plan, screened
from llumsched.rescheduling.planning.policies import load_policies
from llumsched.rescheduling.rescheduling_config import LoadTarget, ReschedulingConfig, Scope
from tests.llumsched.cases import UNKNOWN, Known, distribution, table
from tests.llumsched.rescheduling.cluster import CAPACITY, balancing, instance, pairs, planned

TOKENS_1024 = Selection(Unit.TOKEN, Order.SR, 1024)
SLOTS = {"max_migrations_out": 4, "max_migrations_in": 4}
FAILOVERS = ("prefill_failover", "decode_failover", "neutral_failover")


def test_example_of_the_documentation() -> None:
    loads = {"d1": 0.9, "d2": 0.3, "d3": 0.8, "d4": 0.2, "d5": 0.4}
    cluster = [instance(name, load, instance_type="decode") for name, load in loads.items()]
    made = planned(cluster, balancing("decode", 0.7, selection=TOKENS_1024))
    assert pairs(made) == [("d1", "d4"), ("d3", "d2")]
    assert {move.selection for move in made.moves} == {TOKENS_1024}
    [result] = made.results
    assert (result.num_sources, result.num_destinations, result.num_moves) == (2, 3, 2)


def test_sources_and_destinations_are_paired_from_the_ends_and_ties_go_by_id() -> None:
    cluster = [instance(name, load) for name, load in [("c", 0.9), ("a", 0.9), ("d", 0.1), ("b", 0.1), ("e", 0.5)]]
    assert pairs(planned(cluster, balancing())) == [("a", "b"), ("c", "d")]


def test_pairing_stops_where_a_destination_is_no_lower() -> None:
    assert pairs(planned([instance("a", 0.5), instance("b", 0.5)], balancing())) == []


def test_default_evens_a_pair_out() -> None:
    [move] = planned([instance("hot", 0.8), instance("empty")], ReschedulingConfig()).moves
    assert move.selection == Selection(Unit.TOKEN, Order.SR, 40_000)
    assert move.expected_tokens == 40_000
    assert move.gain > move.cost > 0


def test_a_threshold_of_one_balances_only_what_is_full() -> None:
    cluster = [instance("a", 0.95), instance("b")]
    assert pairs(planned(cluster, balancing(threshold=1.0))) == []
    assert pairs(planned([instance("a", 1.0), instance("b")], balancing(threshold=1.0))) == [("a", "b")]


TWENTY_MS = Known(Coefficients(a=0.02, b=0.001, c=0.0, d=0.001, e=0.0))
"""A step of 20 ms, one more for each token of a prefill and each request that decodes."""


def _decoding(name: str, number: int) -> Instance:
    return instance(name, 0.3, scheduler_running_to_decode_requests_num=number, num_running_requests=number)


@pytest.mark.parametrize(
    ("hot", "cold", "tpot_slo", "number"),
    [
        (40, 4, 50.0, 10),  # 60 ms and 24: evened out only as far as one is late
        (27, 4, 50.0, 0),  # 47 ms: in time, by less than the threshold
        (40, 23, 50.0, 0),  # nobody stays in time with more
        (40, 4, 80.0, 0),
    ],
)
def test_late_instance_gives_to_a_punctual_one(hot: int, cold: int, tpot_slo: float, number: int) -> None:
    config = ReschedulingConfig(policies=("neutral_tpot",), tpot_slo=tpot_slo)
    made = planned([_decoding("hot", hot), _decoding("cold", cold)], config, known=TWENTY_MS)
    assert pairs(made) == [("hot", "cold")] * bool(number)


def test_long_waiting_request_moves_where_it_waits_less() -> None:
    queue = {
        "num_waiting_requests": 4,
        "num_uncomputed_tokens_all_waiting_prefills": 4000,
        "max_num_batched_tokens": 512,
    }
    busy, idle = instance("busy", 0.1, **queue), instance("idle", max_num_batched_tokens=512)
    config = ReschedulingConfig(policies=("neutral_ttft",))
    assert not planned([busy, idle], config, known=TWENTY_MS).moves, "4 s"
    [move] = planned([busy, idle], replace(config, ttft_slo=2000.0), known=TWENTY_MS).moves
    assert (move.source, move.destination, move.selection) == ("busy", "idle", Selection(Unit.NUM_REQ, Order.FCW, 1))
    also_busy = instance("also", 0.1, **queue)
    assert not planned([busy, also_busy], replace(config, ttft_slo=2000.0), known=TWENTY_MS).moves


def test_predictions_are_of_what_was_reported_if_the_snapshot_has_been_moved_on() -> None:
    """They step on from there themselves: what has passed since the status would count twice."""
    busy = instance(
        "busy", 0.1, num_waiting_requests=4, num_uncomputed_tokens_all_waiting_prefills=4000,
        num_unallocated_tokens_all_waiting_requests=4000, max_num_batched_tokens=512,
    )  # fmt: skip
    (policy,) = load_policies(ReschedulingConfig(policies=("neutral_ttft",), ttft_slo=2000.0))
    reported = table(busy, known=TWENTY_MS).snapshot()
    passed_s = 2.0  # of 4: more than 1.7 are left
    moved = reported.copy()
    moved["num_uncomputed_tokens_all_waiting_prefills"][:] /= 2
    assert screened(policy, moved, passed_s, reported).ends.sources.all()
    assert not screened(policy, moved, passed_s).ends.sources.any()


@pytest.mark.parametrize("policy", ["neutral_tpot", "neutral_ttft"])
def test_nothing_moves_while_nobody_knows_how_long_steps_take(policy: str) -> None:
    config = ReschedulingConfig(policies=(policy,), tpot_slo=0.001, ttft_slo=0.001)
    cluster = [_decoding("hot", 40), instance("idle")]
    assert not planned(cluster, config, known=Known(UNKNOWN)).moves


def test_flags_of_load_do_not_change_what_is_late() -> None:
    config = ReschedulingConfig(policies=("neutral_tpot",), neutral=LoadTarget("num_requests", 1000.0), tpot_slo=50.0)
    (policy,) = load_policies(config)
    assert isinstance(policy.selector, MetricBalancePairs)
    assert (policy.selector.metric.name, policy.selector.threshold) == ("predicted_tpot", 0.0)


def test_waiting_requests_move_one_by_one_to_free_room() -> None:
    config = ReschedulingConfig(policies=("neutral_waiting",))
    queue = {
        "num_waiting_requests": 3,
        "num_uncomputed_tokens_all_waiting_prefills": 24_000,
        "num_unallocated_tokens_all_waiting_requests": 30_000,
    }
    room = instance("room", 0.5)
    [move] = planned([instance("full", 0.9, **queue), room], config).moves
    assert (move.source, move.destination) == ("full", "room")
    assert move.selection == Selection(Unit.NUM_REQ, Order.FCW, 1)
    assert move.expected_tokens == 10_000
    assert move.cost == 0
    # The same queue where it fits waits for a step, not for room.
    assert not planned([instance("soon", 0.6, **queue), room], config).moves
    nowhere = planned([instance("full", 0.9, **queue), instance("other", 0.95)], config)
    assert not nowhere.moves
    assert nowhere.results[0].refused == {"no_room": 1}


def _queueing(cached: int) -> Instance:
    """Three requests of 10,000 tokens wait, of which so many are cached, all in blocks that nobody holds."""
    return instance(
        "full",
        0.9,
        num_waiting_requests=3,
        scheduler_waiting_to_decode_tokens_num=30_000,
        num_unallocated_tokens_all_waiting_requests=30_000,
        num_uncomputed_tokens_all_waiting_prefills=30_000 - 3 * cached,
    )


def test_waiting_request_stays_with_its_cached_prompt() -> None:
    config = ReschedulingConfig(policies=("neutral_waiting",))
    cluster = [_queueing(cached=9_000), instance("room", 0.5), instance("other", 0.55)]
    slow = Known(Coefficients(a=0.02, b=0.002, c=0.0, d=0.001, e=0.0))
    refused = planned(cluster, config, known=slow, shares={})
    assert not refused.moves, "eighteen seconds of prefill"
    assert refused.results[0].refused == {"not_worth_it": 1}
    [move] = planned(cluster, config, known=slow, shares={"full": {"other": 0.9}}).moves
    assert (move.source, move.destination) == ("full", "other")
    assert move.cost == pytest.approx(1.8 * (0.65**2 - 0.55**2), rel=1e-3), "900 tokens, of two milliseconds each"
    for known, cached in ((Known(UNKNOWN), 9_000), (slow, 0), (slow, 1)):
        [move] = planned([_queueing(cached), *cluster[1:]], config, known=known, shares={}).moves
        assert (move.destination, move.cost) == ("room", 0)
    [move] = planned(cluster, config, known=slow).moves
    assert (move.destination, move.cost) == ("room", 0), "it may be cached there as well"


def test_recomputation_costs_grow_with_the_position() -> None:
    """By the tokens that each of its own attends to."""
    config = ReschedulingConfig(policies=("neutral_waiting",))
    attention = Known(Coefficients(a=0.02, b=0.0, c=1e-9, d=0.001, e=0.0))
    cluster = [_queueing(cached=9_000), instance("room", 0.5)]
    [all_lost] = planned(cluster, config, known=attention, shares={}).moves
    [half_lost] = planned(cluster, config, known=attention, shares={"full": {"room": 0.5}}).moves
    assert all_lost.cost == pytest.approx(9_000**2 / 2 * 1e-9 * (0.6**2 - 0.5**2), rel=1e-3)
    assert half_lost.cost == pytest.approx(0.75 * all_lost.cost, rel=1e-3)


STEPS = {"num_decode_steps": 1000, "decode_steps_s": 25.0}
"""A fortieth of a second each: twenty decodes fill 800 tokens in a second."""


def test_imminent_preemption_gives_the_last_of_the_batch() -> None:
    config = ReschedulingConfig(policies=("neutral_preemption",))
    [move] = planned([instance("full", 0.993, **STEPS), instance("room", 0.9, **STEPS)], config).moves
    assert (move.source, move.destination) == ("full", "room")
    assert move.selection == Selection(Unit.NUM_REQ, Order.LCR, 1)
    assert not planned([instance("calm", 0.991, **STEPS), instance("room", 0.9, **STEPS)], config).moves
    # Who has less than five seconds, 4,000 tokens, will be in need itself.
    assert not planned([instance("full", 0.993, **STEPS), instance("soon", 0.965, **STEPS)], config).moves
    assert planned([instance("full", 0.993, **STEPS), instance("idle")], config).moves


def test_instance_without_blocks_gives_without_a_step_model() -> None:
    config = ReschedulingConfig(policies=("neutral_preemption",))
    short = instance("short", 0.95, num_lacking_blocks=1, **STEPS)
    assert pairs(planned([short, instance("room", 0.5)], config)) == [("short", "room")]
    assert not planned([instance("a", 0.99), instance("b", 0.5)], config).moves, "before its first step"
    assert not planned([instance("full", 0.999, **STEPS), emptied(short)], config).moves


def emptied(one: Instance) -> Instance:
    """The same, emptier: what lacks blocks takes nothing, however much is free by the numbers."""
    assert one.status is not None
    status = InstanceStatus()
    status.CopyFrom(one.status)
    status.num_used_gpu_tokens = 0
    return replace(one, status=status)


def test_others_leave_where_urgent_requests_are_and_urgent_ones_stay() -> None:
    """With virtual usage; by the memory alone the instance has room, and takes more."""
    config = replace(ReschedulingConfig(policies=("neutral_load",)), neutral=LoadTarget("virtual_usage"))
    urgent = {"num_urgent_requests": 2, "scheduler_running_to_decode_urgent_requests_num": 2}
    cluster = [instance("urgent", 0.4, **urgent), instance("b", 0.6), instance("c", 0.6)]
    [move] = planned(cluster, config).moves
    assert (move.source, move.destination) == ("urgent", "b")
    assert move.expected_tokens == pytest.approx(0.1 * CAPACITY, rel=0.1)
    assert pairs(planned(cluster, balancing())) == [("b", "urgent")]
    little = replace(config, priority_headroom=0.2)
    assert pairs(planned(cluster, little)) == [], "by which it is as full as the others"


def test_urgent_requests_alone_are_evened_out_with_others_like_them_and_disturb_nobody_else() -> None:
    config = replace(ReschedulingConfig(policies=("neutral_load",)), neutral=LoadTarget("virtual_usage"))
    urgent = {"num_urgent_requests": 20, "scheduler_running_to_decode_urgent_requests_num": 20}
    full, fits = instance("full", 0.9, **urgent), instance("fits", 0.3, **urgent)
    assert pairs(planned([full, instance("b", 0.6)], config)) == []
    assert pairs(planned([full, fits], config)) == [("full", "fits")]


def test_room_is_made_where_the_first_of_the_queue_finds_none() -> None:
    """De-fragmentation: two instances with the same memory in use, one of them with somebody who needs more of it."""
    config = replace(ReschedulingConfig(policies=("neutral_load",)), neutral=LoadTarget("virtual_usage"))
    queue = {"num_waiting_requests": 1, "num_unallocated_tokens_first_waiting_request": 30_000}
    [move] = planned([instance("a", 0.8), instance("b", 0.8, **queue), instance("c", 0.6)], config).moves
    assert (move.source, move.destination) == ("b", "c")


def test_in_an_even_cluster_a_pass_gives_up_soon() -> None:
    """All pairs would be weighed otherwise, for nothing, in every pass."""
    cluster = [instance(f"i{number:03}", 0.5 + number * 1e-5) for number in range(200)]
    made = planned(cluster, balancing())
    assert not made.moves
    assert made.results[0].refused == {"not_worth_it": 8}


def test_an_instance_that_a_foreign_metric_cannot_measure_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(
        tmp_path,
        "[llumnix.metrics]\nfilled = filling_extension:FILLED\n",
        "from llumsched.policy.metrics import Metric\n"
        "FILLED = Metric('filled', lambda columns: 1 / (1 - columns['num_used_gpu_tokens'] / 90_000))\n",
        "filling_extension",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ReschedulingConfig(policies=("neutral_load",), neutral=LoadTarget(metric="filled"))
    cluster = [instance("hot", 0.8), instance("empty"), instance("raises", 0.9)]
    assert pairs(planned(cluster, config)) == [("hot", "empty")]


def test_a_destination_without_room_gives_way_to_the_next() -> None:
    """It would be the coldest in every pass, and its source would wait for ever."""
    small = instance("small", num_total_gpu_tokens=3000)
    hot = instance("hot", 0.9, num_running_requests=20, scheduler_running_to_decode_requests_num=20)
    made = planned([hot, small, instance("c", 0.1)], ReschedulingConfig(policies=("neutral_load",)))
    assert pairs(made) == [("hot", "c")]
    [result] = made.results
    assert result.refused == {"no_room": 1}
    config = ReschedulingConfig(policies=("neutral_load",), neutral=LoadTarget(metric="decode_batch_size"))
    full = instance("full", 0.999, num_running_requests=1, scheduler_running_to_decode_requests_num=1)
    empty = instance("c", 0.01, num_running_requests=2, scheduler_running_to_decode_requests_num=2)
    assert pairs(planned([hot, full, empty], config)) == [("hot", "c")]


def test_a_full_cluster_of_long_requests_is_not_looked_at_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def obstacle(history: History, source: str, destination: str, now_s: float) -> str:
        asked.append((source, destination))
        return ""

    monkeypatch.setattr(History, "obstacle", obstacle)
    long = {"num_running_requests": 2, "scheduler_running_to_decode_requests_num": 2}
    cluster = [instance(f"hot-{number:03d}", 0.98, **long) for number in range(40)]
    cluster += [instance(f"cold-{number:03d}", 0.9, **long) for number in range(160)]
    made = planned(cluster, balancing())
    assert (pairs(made), asked) == ([], [])
    assert made.results[0].refused == {"no_room": 40 * 160}
    made = planned([*cluster, instance("room", 0.4)], balancing())
    assert pairs(made) == [("hot-000", "room")]
    assert asked[0] == ("hot-000", "room")
    assert len(asked) <= 40


def test_an_avoided_destination_is_left_by_all_sources() -> None:
    config = balancing()
    history = History(config)
    history.destination_failed("cold", 0.0)
    cluster = [instance("a", 0.9), instance("b", 0.8), instance("cold")]
    made = planned(cluster, config, history, 0.1)
    assert "cold" not in {destination for _, destination in pairs(made)}
    assert made.results[0].refused["destination_avoided"] == 1


def test_difference_below_the_threshold_is_left() -> None:
    cluster = [instance("a", 0.6), instance("b", 0.3)]
    made = planned(cluster, balancing(balance_threshold=0.4))
    assert pairs(made) == []
    assert made.results[0].refused == {"below_threshold": 1}
    assert pairs(planned(cluster, balancing(balance_threshold=0.25))) == [("a", "b")]


def test_units_balance_among_themselves_and_know_no_threshold() -> None:
    config = balancing(threshold=0.99, scope=Scope.UNIT)
    cluster = [
        instance("a", 0.9, unit_id="u"),
        instance("b", 0.5, unit_id="u"),
        instance("c", 0.4, unit_id="v"),
        instance("d", 0.0, unit_id="v"),
        instance("e", 0.0),
    ]
    assert pairs(planned(cluster, config)) == [("a", "b"), ("c", "d")]


def test_only_instances_of_the_type_that_understand_each_other_and_are_well() -> None:
    hot = instance("hot", 0.9, compatibility_digest="x")
    others = [
        instance("decode", compatibility_digest="x", instance_type="decode"),
        instance("foreign", compatibility_digest="y"),
        instance("closed", compatibility_digest="x", schedulable=False),
        instance("silent", compatibility_digest="x", received_s=-61.0),
        instance("hung", compatibility_digest="x", health=Health.HUNG),
    ]
    assert pairs(planned([hot, *others], balancing())) == []
    well = instance("well", 0.5, compatibility_digest="x")
    assert pairs(planned([hot, *others, well], balancing())) == [("hot", "well")]


def test_balance_is_not_worth_a_prefill_and_a_failover_is() -> None:
    """Of engines that keep their KV caches in different ways, as with other block sizes."""
    hot, cool, other = instance("hot", 0.9), instance("cool", 0.5), instance("other", 0.1, cache_digest="other")
    assert pairs(planned([hot, other], balancing())) == []
    assert pairs(planned([hot, cool, other], balancing())) == [("hot", "cool")]
    failing = instance("failing", 0.7, schedulable=False)
    config = ReschedulingConfig(policies=FAILOVERS)
    assert pairs(planned([failing, other], config)) == [("failing", "other")]
    assert {destination for _, destination in pairs(planned([failing, cool, other], config))} == {"cool"}


def test_only_request_is_not_moved_to_an_empty_instance() -> None:
    alone = instance("a", 0.5, scheduler_running_to_decode_requests_num=1, num_running_requests=1)
    made = planned([alone, instance("b")], balancing())
    assert pairs(made) == []
    assert made.results[0].refused == {"not_worth_it": 1}


def test_unprofitable_move_is_left() -> None:
    """The same difference: small requests over a fast link, or a stall that is longer than the gain is worth."""
    cluster = [instance("a", 0.6), instance("b", 0.5)]
    assert pairs(planned(cluster, balancing(horizon_s=1.0))) == [("a", "b")]
    assert pairs(planned(cluster, balancing(horizon_s=0.2))) == []
    heavy = [instance("a", 0.9, bytes_per_block=1 << 30), instance("b", 0.5, bytes_per_block=1 << 30)]
    assert pairs(planned(heavy, balancing())) == []
    assert pairs(planned(heavy, balancing(link_bytes_per_s=1e13))) == [("a", "b")]


def test_cached_blocks_at_the_destination_are_not_copied() -> None:
    """Nor does it decide where hardly anything is to be copied at all."""
    cluster = [instance("a", 0.9, bytes_per_block=1 << 28), instance("b", 0.5), instance("c", 0.52)]
    slow = balancing(link_bytes_per_s=4e10)
    assert pairs(planned(cluster, slow)) == [], "too much to copy"
    made = planned(cluster, slow, shares={"a": {"c": 0.95}})
    assert pairs(made) == [("a", "c")]
    assert planned(cluster, slow, shares={"a": {"b": 0.95, "c": 0.9}}).moves[0].destination == "b"
    assert pairs(planned(cluster, slow, shares={"b": {"a": 0.95}, "c": {"a": 0.95}})) == []
    light = [instance("a", 0.9), instance("b", 0.1), instance("c", 0.5)]
    assert pairs(planned(light, balancing(), shares={"a": {"c": 1.0}}))[0] == ("a", "b")


def decode_batches() -> ReschedulingConfig:
    """Balances by a metric that says nothing of the KV cache."""
    return ReschedulingConfig(policies=("neutral_load",), neutral=LoadTarget("decode_batch_size"))


@pytest.mark.parametrize("in_use", [0.99, 1.0])
def test_full_destination_is_left(in_use: float) -> None:
    """Its batch is small, of few long requests."""
    full = instance("b", in_use, scheduler_running_to_decode_requests_num=2)
    made = planned([instance("a", 0.9), full], decode_batches())
    assert made.results[0].refused == {"no_room": 1}


def test_destination_that_does_not_tell_its_size_may_have_room() -> None:
    unknown = instance("b", num_total_gpu_tokens=0)
    assert pairs(planned([instance("a", 0.9), unknown], decode_batches())) == [("a", "b")]


def test_coming_requests_need_room() -> None:
    config = decode_batches()
    history = History(config)
    small = {"scheduler_running_to_decode_requests_num": 2}
    first, second = instance("first", 0.5), instance("second", 0.5)
    destination = instance("destination", 0.7, **small)
    [move] = planned([first, destination], config, history).moves
    assert move.expected_tokens > 15_000, "no room for two of them"
    history.began(1, move, 0.0)
    assert planned([second, destination], config, history, 1.0).results[0].refused == {"no_room": 1}
    history.ended(1, 2.0)
    history.seen([instance(name, received_s=2.1) for name in ("first", "destination")])
    assert pairs(planned([second, destination], config, history, 2.1)) == [("second", "destination")]


def test_slots_limit_what_is_expected_and_asked() -> None:
    busy = instance("busy", 0.9, max_migrations_out=2, num_migrate_out_reqs=2)
    assert pairs(planned([busy, instance("b")], balancing())) == []
    [move] = planned([instance("a", 0.8, max_migrations_out=2), instance("b")], balancing()).moves
    assert move.expected_requests == 2
    assert move.expected_tokens == pytest.approx(2 * 0.8 * CAPACITY / 20)


def test_metric_that_counts_requests() -> None:
    cluster = [instance("a", 0.5), instance("b", 0.1, scheduler_running_to_decode_requests_num=4)]
    [move] = planned(cluster, decode_batches()).moves
    assert (move.source, move.destination) == ("a", "b")
    assert move.expected_requests == 8, "half of the difference"


def test_waiting_requests_move_when_the_order_takes_them() -> None:
    selection = Selection(Unit.NUM_REQ, Order.FCW, 2)
    waiting = instance("a", 0.0, num_waiting_requests=4, num_uncomputed_tokens_all_waiting_prefills=40_000)
    [move] = planned([waiting, instance("b")], balancing(selection=selection)).moves
    assert (move.expected_requests, move.expected_tokens) == (2, 20_000)
    assert pairs(planned([waiting, instance("b")], balancing())) == []


def test_cap_per_pass() -> None:
    cluster = [instance(f"hot{i}", 0.9) for i in range(10)] + [instance(f"cold{i}") for i in range(10)]
    assert len(planned(cluster, balancing(max_moves_per_pass=3)).moves) == 3


# ------------------------------------------------------------------------------------------------------- failover


def failing(name: str, **more: object) -> object:
    return instance(name, 0.2, schedulable=False, **more)


def test_failover_example_of_the_documentation() -> None:
    """decode-3 becomes unschedulable with domain `node`: all of its node is left, and nothing goes there."""
    cluster = [
        instance(f"decode-{i}", 0.2, instance_type="decode", node_id=f"node-{(i - 1) // 2}", schedulable=i != 3)
        for i in range(1, 7)
    ]
    config = ReschedulingConfig(policies=("decode_failover",), failover_domain=FailoverDomain.NODE, staleness_s=100)
    made = planned(cluster, config)
    assert {move.source for move in made.moves} == {"decode-3", "decode-4"}
    assert {move.destination for move in made.moves} == {"decode-1", "decode-2", "decode-5", "decode-6"}


def test_failover_to_the_only_healthy_one_takes_everything() -> None:
    cluster = [instance("a", 0.2, schedulable=False), instance("b", 0.9)]
    [move] = planned(cluster, ReschedulingConfig(policies=FAILOVERS)).moves
    assert move.selection == Selection(Unit.NUM_REQ, Order.LR, ALL)


def test_of_several_failing_ones_each_takes_the_slots_that_others_have_left() -> None:
    """Of one pass: who finds none waits for the next one, and the policy goes on."""
    cluster = [
        instance("a", 0.3, schedulable=False, max_migrations_out=4),
        instance("b", 0.3, schedulable=False, max_migrations_out=4, scheduler_running_to_decode_requests_num=3),
        instance("c", max_migrations_in=4),
    ]
    made = planned(cluster, ReschedulingConfig(policies=("neutral_failover",)))
    assert [(move.source, move.destination, move.selection.value) for move in made.moves] == [("a", "c", 4.0)]
    [result] = made.results
    assert (result.error, result.refused["no_slot"]) == (None, 1)


def test_failover_spreads_the_requests_of_one_source_over_all_healthy_ones() -> None:
    cluster = [instance("a", 0.2, schedulable=False, num_waiting_requests=2)] + [instance(f"b{i}") for i in range(4)]
    made = planned(cluster, ReschedulingConfig(policies=FAILOVERS))
    running = {move.destination: move.selection.value for move in made.moves if move.selection.order is Order.LR}
    waiting = {move.destination: move.selection.value for move in made.moves if move.selection.order is Order.FCW}
    assert running == {f"b{i}": 5 for i in range(4)}
    assert sorted(waiting.values()) == [1, 1]


def test_failover_asks_for_as_much_as_there_are_slots_and_goes_on_in_the_round() -> None:
    config = ReschedulingConfig(policies=FAILOVERS)
    history = History(config)
    cluster = [instance("a", 0.2, schedulable=False, **SLOTS)] + [instance(f"b{i}", **SLOTS) for i in range(6)]
    made = planned(cluster, config, history)
    assert [(move.destination, move.selection.value) for move in made.moves] == [(f"b{i}", 1) for i in range(4)]
    for number, move in enumerate(made.moves):
        history.began(number, move, 0.0)
    assert planned(cluster, config, history).moves == (), "all slots are taken"
    for number in range(4):
        history.ended(number, 1.0)
    history.seen([instance(one.id, received_s=2.0) for one in cluster])
    later = planned(cluster, config, history, 2.0)
    assert [move.destination for move in later.moves] == ["b4", "b5", "b0", "b1"]


def test_several_sources_begin_at_different_destinations() -> None:
    cluster = [
        instance(f"a{i}", 0.2, schedulable=False, scheduler_running_to_decode_requests_num=1) for i in range(3)
    ] + [instance(f"b{i}") for i in range(3)]
    assert pairs(planned(cluster, ReschedulingConfig(policies=FAILOVERS))) == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_nothing_is_asked_of_a_loop_that_hangs() -> None:
    cluster = [instance("a", 0.2, schedulable=False, health="HUNG"), instance("b")]
    assert pairs(planned(cluster, ReschedulingConfig(policies=FAILOVERS))) == []


def test_failover_comes_before_balancing_and_shares_its_view_of_the_load() -> None:
    cluster = [instance("sick", 0.6, schedulable=False), instance("cold"), instance("hot", 0.5)]
    made = planned(cluster, ReschedulingConfig(max_moves_per_pass=2))
    assert pairs(made) == [("sick", "cold"), ("sick", "hot")]
    whole = planned(cluster, ReschedulingConfig())
    assert ("hot", "cold") not in pairs(whole), "it is a destination of this pass"


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (FailoverDomain.INSTANCE, {"r0"}),
        (FailoverDomain.INSTANCE_UNIT, {"r0", "r1"}),
        (FailoverDomain.NODE, {"r0", "x"}),
        (FailoverDomain.NODE_UNIT, {"r0", "r1", "x"}),
    ],
)
def test_failure_domains(domain: FailoverDomain, expected: set[str]) -> None:
    """Units U = {r0 on node A, r1 on B} and V = {r2 on B, r3 on C}; x on A is alone; r0 is silent."""
    assert failing_sources(domain, silent="r0") == expected


def test_failure_domains_reach_over_nodes() -> None:
    assert failing_sources(FailoverDomain.NODE, silent="r1") == {"r1", "r2"}
    assert failing_sources(FailoverDomain.NODE_UNIT, silent="r1") == {"r0", "r1", "r2", "r3"}


def failing_sources(domain: FailoverDomain, silent: str) -> set[str]:
    places = {"r0": ("A", "U"), "r1": ("B", "U"), "r2": ("B", "V"), "r3": ("C", "V"), "x": ("A", "")}
    cluster = [
        instance(
            name,
            0.2,
            node_id=node,
            unit_id=unit,
            data_parallel_size=2 if unit else 1,
            received_s=-100.0 if name == silent else 0.0,
        )
        for name, (node, unit) in places.items()
    ]
    cluster.append(instance("well", node_id="D"))
    made = planned(cluster, ReschedulingConfig(policies=FAILOVERS, failover_domain=domain))
    return {move.source for move in made.moves}


def test_instances_that_do_not_know_their_node_fail_alone() -> None:
    cluster = [instance("a", 0.2, schedulable=False), instance("b", 0.2), instance("c")]
    made = planned(cluster, ReschedulingConfig(policies=FAILOVERS, failover_domain=FailoverDomain.NODE))
    assert {move.source for move in made.moves} == {"a"}


# -------------------------------------------------------------------------------------------------------- history


def test_moves_under_way_count_in_the_load_until_both_ends_have_reported() -> None:
    config = balancing()
    history = History(config)
    cluster = [instance("hot", 0.8), instance("empty"), instance("other", 0.4)]
    [move] = [move for move in planned(cluster, config, history).moves if move.destination == "empty"]
    history.began(1, move, 0.0)
    assert pairs(planned(cluster, config, history, 1.0)) == []
    history.ended(1, 2.0)
    history.seen([instance(one.id, received_s=1.9) for one in cluster])
    assert history.pending() == {"hot": Cargo(-10, -40_000), "empty": Cargo(10, 40_000)}
    history.seen([instance("hot", received_s=2.1), instance("empty", received_s=1.9)])
    assert history.pending() == {"empty": Cargo(10, 40_000)}
    history.seen([replace(instance("empty", received_s=2.5), late_s=0.6)])
    assert history.pending() == {"empty": Cargo(10, 40_000)}
    history.seen([instance("hot", received_s=2.1), instance("empty", received_s=2.1)])
    assert history.pending() == {}
    assert history.pending_moves() == []


def test_nothing_goes_back_while_the_pair_cools_down() -> None:
    config = balancing(pair_cooldown_s=10.0)
    history = History(config)
    [move] = planned([instance("a", 0.8), instance("b")], config, history).moves
    history.began(1, move, 0.0)
    history.ended(1, 1.0)
    back = [instance("a", 0.0, received_s=2.0), instance("b", 0.8, received_s=2.0)]
    history.seen(back)
    made = planned(back, config, history, 10.9)
    assert pairs(made) == []
    assert made.results[0].refused == {"pair_cooling": 1}
    assert pairs(planned(back, config, history, 11.1)) == [("b", "a")]


def test_destination_that_refused_is_avoided_and_another_tried() -> None:
    config = balancing(avoid_s=10.0, staleness_s=60.0)
    history = History(config)
    cluster = [instance("hot", 0.8), instance("b"), instance("c", 0.1)]
    history.destination_failed("b", 0.0)
    assert pairs(planned(cluster, config, history, 9.0)) == [("hot", "c")]
    assert pairs(planned(cluster, config, history, 11.0)) == [("hot", "b")]
    history.destination_failed("b", 11.0)
    assert pairs(planned(cluster, config, history, 30.0)) == [("hot", "c")], "twice as long"
    assert pairs(planned(cluster, config, history, 32.0)) == [("hot", "b")]
    history.destination_failed("b", 32.0)
    history.instance_left("b")
    assert pairs(planned(cluster, config, history, 32.0)) == [("hot", "b")], "a new life"


def test_destination_that_one_source_cannot_reach_is_open_to_others_until_a_second_says_so() -> None:
    config = balancing(avoid_s=10.0)
    history = History(config)
    cluster = [instance("x", 0.9), instance("y", 0.8), instance("b"), instance("c", 0.1)]
    history.link_failed("x", "b", 0.0)
    assert pairs(planned(cluster, config, history, 1.0)) == [("x", "c"), ("y", "b")]
    history.link_failed("y", "b", 0.0)
    assert pairs(planned(cluster, config, history, 1.0)) == [("x", "c")]


def test_failover_avoids_too() -> None:
    config = ReschedulingConfig(policies=FAILOVERS)
    history = History(config)
    history.destination_failed("b", 0.0)
    cluster = [instance("a", 0.2, schedulable=False), instance("b"), instance("c")]
    assert {move.destination for move in planned(cluster, config, history, 1.0).moves} == {"c"}


def test_history_keeps_nothing_for_ever() -> None:
    config = ReschedulingConfig()
    history = History(config)
    [move] = planned([instance("a", 0.8), instance("b")], config, history).moves
    history.began(1, move, 0.0)
    history.moved("b", "r", 0.0)
    history.destination_failed("b", 0.0)
    history.source_failed("a", 0.0)
    history.link_failed("a", "b", 0.0)
    history.ended(1, 1.0)
    history.seen([])
    history.forget_expired(1e4)
    left = {name: value for name, value in vars(history).items() if isinstance(value, dict) and value}
    assert left == {}


WITHOUT_KV = {"kv_unsupported": "not exactly one KV cache group"}
WAITING = {"num_waiting_requests": 4, "num_uncomputed_tokens_all_waiting_prefills": 8_000}


def test_only_failover_may_cost_a_prefill() -> None:
    cluster = [instance("a", 0.9, **WITHOUT_KV), instance("b", 0.1, **WITHOUT_KV)]
    assert pairs(planned(cluster, balancing())) == []
    failing = [instance("a", 0.9, schedulable=False, **WITHOUT_KV), instance("b", 0.1, **WITHOUT_KV)]
    assert pairs(planned(failing, ReschedulingConfig(policies=FAILOVERS))) == [("a", "b")]


def test_balance_moves_waiting_requests() -> None:
    cluster = [instance("a", 0.9, **WITHOUT_KV, **WAITING), instance("b", 0.1, **WITHOUT_KV)]
    first_come = Selection(Unit.NUM_REQ, Order.FCW, 2)
    assert pairs(planned(cluster, balancing(selection=first_come))) == [("a", "b")]


def test_a_destination_that_takes_no_kv_cache_is_none_to_balance_with() -> None:
    cluster = [instance("a", 0.9), instance("b", 0.1, **WITHOUT_KV), instance("c", 0.2)]
    assert pairs(planned(cluster, balancing())) == [("a", "c")]


def test_immovable_request_is_left() -> None:
    marked = {"unsupported": "custom logits processors without the mark"}
    cluster = [instance("a", 0.9, schedulable=False, **marked), instance("b", 0.1, **marked)]
    assert pairs(planned(cluster, ReschedulingConfig(policies=FAILOVERS))) == []


@pytest.mark.parametrize(("purpose", "method"), [(Purpose.BALANCE, Mode.LIVE), (Purpose.FAILOVER, 0)])
def test_only_a_failover_takes_what_costs_a_prefill(purpose: Purpose, method: Mode) -> None:
    move = Move("mine", purpose, "a", "b", Selection(Unit.NUM_REQ, Order.SR, 1.0), 100.0)
    assert migrate_request(move, instance("b")).method == method


def test_waiting_request_has_nothing_to_copy() -> None:
    heavy = {"bytes_per_block": 1 << 30}
    waiting = instance("a", num_waiting_requests=4, num_uncomputed_tokens_all_waiting_prefills=40_000, **heavy)
    config = balancing(selection=Selection(Unit.NUM_REQ, Order.FCW, 2))
    [move] = planned([waiting, instance("b", **heavy)], config).moves
    assert (move.source, move.destination, move.cost) == ("a", "b", 0.0)


def test_a_metric_to_which_a_request_makes_no_difference_moves_nothing() -> None:
    config = ReschedulingConfig(policies=("neutral_load",), neutral=LoadTarget("all_prefills_tokens_num"))
    computing = instance("a", 0.5, num_uncomputed_tokens_scheduler_running_prefills=9_000)
    made = planned([computing, instance("b")], config)
    assert (pairs(made), made.results[0].refused) == ([], {"not_worth_it": 1})


def test_lost_instance_has_failed() -> None:
    table, config = standard_table(InFlight()), ReschedulingConfig(FAILOVERS, failover_domain=FailoverDomain.NODE)
    for one in (instance("beside", 0.2, node_id="A"), instance("other", node_id="B")):
        table.appeared(one)
    gone = instance("gone", 0.2, node_id="A")
    made = plan(table.snapshot([gone]), load_policies(config), History(config), config, 1.0)
    assert pairs(made) == [("beside", "other")]
