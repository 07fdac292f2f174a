# SPDX-License-Identifier: Apache-2.0
"""What holds for every cluster: roles, worth, caps, rest; and that bursts cause neither storms nor ping-pong."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.instance import Instance
from llumsched.latency.fitting import Coefficients
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.planning.moves import Purpose, Selection
from llumsched.rescheduling.rescheduling_config import SHORTEST_AS_NEEDED, ReschedulingConfig
from tests.llumsched.cases import Known
from tests.llumsched.rescheduling.cluster import CAPACITY, Cluster, balancing, instance, planned

DEADLINE: Any = {"deadline": None, "max_examples": 60}

cells = st.fixed_dictionaries(
    {
        "load": st.floats(0, 1),
        "instance_type": st.sampled_from(["neutral", "decode", "prefill"]),
        "schedulable": st.sampled_from([True, True, True, False]),
        "unit_id": st.sampled_from(["", "u", "v"]),
        "node_id": st.sampled_from(["", "n", "m"]),
        "data_parallel_size": st.sampled_from([1, 2]),
        "max_migrations_out": st.integers(0, 4),
        "max_migrations_in": st.integers(0, 4),
        "num_migrate_out_reqs": st.integers(0, 2),
        "num_waiting_requests": st.integers(0, 3),
    }
)
AMOUNTS = ((Unit.TOKEN, 1024), (Unit.NUM_REQ, 2), (Unit.RATIO, 0.1))
selections = st.sampled_from(
    [SHORTEST_AS_NEEDED, *(Selection(unit, order, value) for unit, value in AMOUNTS for order in Order)]
)


@settings(**DEADLINE)
@given(st.lists(cells, max_size=12), selections, st.integers(1, 8))
def test_every_plan_keeps_the_rules(rows: list[dict[str, Any]], selection: Selection, cap: int) -> None:
    config = ReschedulingConfig(selection=selection, max_moves_per_pass=cap)
    cluster = {f"i{number:02}": instance(f"i{number:02}", **row) for number, row in enumerate(rows)}
    history = History(config)
    made = planned(cluster.values(), config, history)
    assert len(made.moves) <= cap
    assert not {move.source for move in made.moves} & {move.destination for move in made.moves}
    sent, taken = Counter[str](), Counter[str]()
    for number, move in enumerate(made.moves):
        source, destination = cluster[move.source], cluster[move.destination]
        assert source.metadata.instance_type == destination.metadata.instance_type
        assert destination.status.schedulable
        if move.purpose is Purpose.BALANCE:
            assert move.gain > move.cost >= 0
            assert source.status.schedulable
        sent[move.source] += 1 if move.selection.value < 0 else int(move.expected_requests)
        taken[move.destination] += int(move.expected_requests)
        history.began(number, move, 0.0)
    for name, number in sent.items():
        limit = cluster[name].metadata.max_migrations_out
        assert not limit or number <= limit - cluster[name].status.num_migrate_out_reqs
    again = planned(cluster.values(), config, history)
    both = (*made.moves, *again.moves)
    assert not {move.source for move in both} & {move.destination for move in both}, "moves under way keep their roles"


@settings(**DEADLINE)
@given(
    st.lists(st.lists(st.integers(1, 20_000), max_size=8), min_size=2, max_size=6),
    st.sampled_from([order for order in Order if order is not Order.FCW]),
)
def test_every_move_lowers_the_imbalance_and_it_comes_to_rest(lengths: list[list[int]], order: Order) -> None:
    """As much as needed, in all orders that look at what runs: FCW cannot be asked for so."""
    fitting = {f"i{number}": _fitting(each) for number, each in enumerate(lengths)}
    cluster = Cluster(fitting, balancing(selection=Selection(Unit.TOKEN, order, 0.0), max_moves_per_pass=1))
    quiet = 0
    for _ in range(400):
        before = cluster.imbalance
        moves = cluster.step()
        assert cluster.imbalance <= before + 1e-12
        # Nothing for longer than any cool-down lasts.
        quiet = quiet + 1 if not moves or cluster.imbalance == before else 0
        if quiet > 25:
            break
    assert quiet > 25


def _fitting(lengths: list[int]) -> list[int]:
    kept: list[int] = []
    for length in lengths:
        if sum(kept) + length <= CAPACITY:
            kept.append(length)
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_bursts_cause_no_storm_and_no_ping_pong(seed: int) -> None:
    """Twelve instances, a burst on a random one every few passes, for two minutes. Requests end after a while."""
    chance = random.Random(seed)
    cluster = Cluster({f"i{number:02}": [] for number in range(12)})
    born: dict[int, float] = {}
    num_moves = 0
    for turn in range(240):
        if turn % 7 == 0:
            victim = f"i{chance.randrange(12):02}"
            for _ in range(chance.randint(5, 30)):
                length = min(int(chance.paretovariate(1.2) * 300), 8000)
                if cluster.load(victim) + length / CAPACITY < 1:
                    born[cluster.add(victim, length)] = cluster.now_s
        for requests in cluster.requests.values():
            for one in [one for one in requests if cluster.now_s - born[one] > chance.uniform(5, 40)]:
                del requests[one]
        moves = cluster.step()
        num_moves += len(moves)
        assert len(moves) <= 6, "each instance at most once"
    trips = Counter(one for _, _, _, one in cluster.trips)
    assert max(trips.values()) <= 4, "a request lives for forty seconds and rests for ten after each move"
    assert len(cluster.trips) < len(born) * 1.5
    for when, source, destination, _ in cluster.trips:
        back = [trip for trip in cluster.trips if trip[1:3] == (destination, source) and 0 <= trip[0] - when < 10]
        assert not back
    assert num_moves > 20


def test_skewed_cluster_is_even_within_seconds() -> None:
    cluster = Cluster({"a": [400] * 200, "b": [400] * 20, "c": [400] * 10, "d": []})
    for _ in range(10):
        cluster.step()
    loads = [cluster.load(name) for name in cluster.requests]
    assert max(loads) - min(loads) < 0.05, loads


def test_new_empty_instance_fills() -> None:
    cluster = Cluster({f"i{number}": [500] * 100 for number in range(4)})
    assert cluster.step() == []
    cluster.requests["new"] = {}
    for _ in range(12):
        cluster.step()
    assert cluster.load("new") > 0.9 * 2.0 / 5, cluster.load("new")


def test_storm_after_an_outage_is_capped() -> None:
    """A hundred hot and a hundred cold ones: no more than the cap begin per pass."""
    names = {f"h{number}": [1000] * 80 for number in range(100)} | {f"c{number}": [] for number in range(100)}
    cluster = Cluster(names)
    assert [len(cluster.step()) for _ in range(2)] == [32, 32]


TOKEN_S = 1e-3
"""Of a prefill, in the model of `KNOWN`."""
KNOWN = Known(Coefficients(a=0.02, b=TOKEN_S, c=0.0, d=0.001, e=0.0))
queues = st.fixed_dictionaries(
    {
        "load": st.floats(0, 1),
        "number": st.integers(0, 4),
        "length": st.integers(2, 20_000),
        "cached": st.floats(0, 1),
        "held": st.floats(0, 1),
    }
)


def _told(length: int, cached: float) -> tuple[int, int]:
    """Tokens of a request that are cached, and those that its instance tells to be uncomputed: none, if it is one."""
    num_cached = round(cached * (length - 1))
    uncomputed = length - num_cached
    return num_cached, uncomputed if uncomputed > 1 else 0


def _waiting(name: str, load: float, number: int, length: int, cached: float, held: float) -> Instance:
    """So many wait, of one length, of which a share is cached, and of that a share in blocks that others hold."""
    num_cached, uncomputed = _told(length, cached)
    return instance(
        name,
        load,
        num_waiting_requests=number,
        scheduler_waiting_to_decode_tokens_num=number * length,
        num_uncomputed_tokens_all_waiting_prefills=number * uncomputed,
        num_unallocated_tokens_all_waiting_requests=number * (length - round(held * num_cached)),
    )


@settings(**DEADLINE)
@given(st.lists(queues, min_size=2, max_size=8), st.floats(0, 1))
def test_waiting_request_never_moves_at_a_loss(rows: list[dict[str, Any]], share: float) -> None:
    """What it costs, computed here by hand: as long as it is computed again, the destination holds it for nothing."""
    config = ReschedulingConfig(policies=("neutral_waiting",))
    cells = {f"i{number}": row for number, row in enumerate(rows)}
    cluster = {name: _waiting(name, **row) for name, row in cells.items()}
    shares = {name: dict.fromkeys(cluster.keys() - {name}, share) for name in cluster}
    for move in planned(cluster.values(), config, known=KNOWN, shares=shares).moves:
        assert move.gain > move.cost
        here, there = cells[move.source], cluster[move.destination].status
        assert there is not None
        _, uncomputed = _told(here["length"], here["cached"])
        lost = max(here["length"] - uncomputed - 1, 0) * (1 - share)
        queued = max(
            there.num_uncomputed_tokens_all_waiting_prefills, there.num_unallocated_tokens_all_waiting_requests
        )
        before = (there.num_used_gpu_tokens + queued) / CAPACITY
        after = before + move.expected_tokens / CAPACITY
        assert move.cost == pytest.approx(lost * TOKEN_S * (after**2 - before**2), rel=1e-6, abs=1e-9)


@settings(**DEADLINE)
@given(st.lists(queues, min_size=2, max_size=8))
def test_without_prefix_caching_a_queue_costs_nothing_and_moves_as_if_no_step_were_told(
    rows: list[dict[str, Any]],
) -> None:
    config = ReschedulingConfig(policies=("neutral_waiting",))
    cluster = [_waiting(f"i{number}", **row | {"cached": 0.0}) for number, row in enumerate(rows)]
    made = planned(cluster, config, known=KNOWN, shares={})
    assert made == planned(cluster, config)
    assert all(move.cost == 0 for move in made.moves)
