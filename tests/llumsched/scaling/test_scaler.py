# SPDX-License-Identifier: Apache-2.0
"""How many instances there should be: of loads that rise, fall, flutter and fall silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumsched.cluster.instance import Instance
from llumsched.scaling.load import STALE_S, Group, measure
from llumsched.scaling.scaler import FORGET_S, Advice, Scaler
from llumsched.scaling.scaling_config import Bounds, ScalingConfig, faults, read_bounds
from tests.llumsched import cases
from tests.llumsched.latency.test_fitting import TRUE

CONFIG = ScalingConfig(low_freeness=100, high_freeness=300, cold_start_s=0, settle_s=30)
BOUNDS = Bounds(1, 8)
M = Group("m", "neutral")


def holding(
    instance_id: str, tokens: int, requests: int, *, waiting_tokens: int = 0, now_s: float = 0.0, **more: object
) -> Instance:
    """Of 10,000 tokens of KV cache."""
    return cases.instance(
        instance_id, now_s, num_used_gpu_tokens=tokens, num_running_requests=requests,
        num_uncomputed_tokens_all_waiting_prefills=waiting_tokens, **more,
    )  # fmt: skip


def even(number: int, tokens: float, requests: float, now_s: float = 0.0) -> list[Instance]:
    """A load that is spread evenly over so many instances."""
    return [holding(f"i{n}", round(tokens / number), round(requests / number), now_s=now_s) for n in range(number)]


class World:
    """An autoscaler that obeys at once, a look each second."""

    def __init__(self, config: ScalingConfig = CONFIG, bounds: Bounds = BOUNDS, number: int = 1) -> None:
        self.scaler, self.number, self.now_s = Scaler(config, bounds), number, 0.0

    def plays(self, seconds: int, tokens: Callable[[float], float], per_request: float = 100.0) -> list[int]:
        """What was wanted each second."""
        wanted = []
        for _ in range(seconds):
            there = even(self.number, tokens(self.now_s), tokens(self.now_s) / per_request, self.now_s)
            [advice] = self.scaler.advise(cases.table(*there), self.now_s)
            self.number = advice.wanted
            wanted.append(advice.wanted)
            self.now_s += 1.0
        return wanted


def advised(scaler: Scaler, instances: Sequence[Instance], now_s: float = 0.0) -> Advice:
    [advice] = scaler.advise(cases.table(*instances), now_s)
    return advice


def test_the_number_needed_is_the_papers_freeness_solved_for_it() -> None:
    """(n·M - V) / B of the instances that are needed is the freeness that is asked for."""
    table = cases.table(holding("a", 6000, 30, waiting_tokens=1000), holding("b", 8000, 10))
    load = measure(table, CONFIG, 0.0)[M]
    assert (load.needed * 10_000 - 15_000) / 40 == pytest.approx(100)
    assert (load.comfortable * 10_000 - 15_000) / 40 == pytest.approx(300)
    assert load.reason == "KV cache"
    assert advised(Scaler(CONFIG, BOUNDS), table.instances).saturation == pytest.approx(1.9 / 2)


def test_leaving_and_silent_instances_do_not_count_but_their_load_does() -> None:
    table = cases.table(
        holding("serves", 5000, 10, now_s=100.0),
        holding("leaves", 4000, 10, now_s=100.0, schedulable=False),
        holding("stale", 9000, 10, now_s=100.0 - STALE_S - 1),
        cases.starting("starts", 100.0),
    )
    load = measure(table, CONFIG, 100.0)[M]
    assert ([table.instances[row].id for row in load.rows], load.num_starting, load.num_leaving) == (["serves"], 1, 1)
    assert load.needed == pytest.approx((9000 + 20 * 100) / 10_000)


def test_groups_are_by_model_and_role() -> None:
    table = cases.table(
        holding("a", 9000, 1), holding("b", 9000, 1, served_models=["n"]), holding("c", 0, 0, instance_type="prefill")
    )
    assert list(measure(table, CONFIG, 0.0)) == [M, Group("m", "prefill"), Group("n", "neutral")]
    advice = Scaler(CONFIG, BOUNDS).advise(table, 0.0)
    assert [one.group for one in advice] == list(measure(table, CONFIG, 0.0))


def test_more_are_wanted_at_once_and_as_many_as_it_takes() -> None:
    world = World(number=2)
    assert world.plays(1, lambda _: 55_000, per_request=1000) == [7]  # 55,000 + 55 · 100, of 10,000 each


def test_fewer_are_wanted_when_it_was_comfortable_for_long_enough() -> None:
    world = World(number=6)
    assert world.plays(30, lambda _: 50_000, per_request=1000)[-1] == 6
    wanted = world.plays(40, lambda _: 10_000, per_request=1000)
    assert wanted[:29] == [6] * 29
    assert wanted[31:] == [2] * 9, "10,000 + 10 · 300"


def test_peak_within_the_settling_time_keeps_instances() -> None:
    world = World(number=6)
    world.plays(60, lambda _: 50_000, per_request=1000)
    wanted = world.plays(100, lambda now_s: 50_000 if now_s % 25 == 0 else 5_000, per_request=1000)
    assert set(wanted) == {6}


def test_between_needed_and_comfortable_nothing_changes() -> None:
    """35 requests of 1,000 need 3.85 and are comfortable with 4.55."""
    world = World(number=4)
    assert set(world.plays(120, lambda now_s: 35_000 + 800 * (now_s % 2), per_request=1000)) == {4}


def test_growth_is_looked_ahead_of_by_the_cold_start_and_a_wave_is_not_growth() -> None:
    def growing(now_s: float) -> float:
        return 10_000 + 250 * now_s

    config = ScalingConfig(low_freeness=0, high_freeness=0, settle_s=30)
    blind, ahead = (World(replace(config, cold_start_s=seconds)) for seconds in (0, 60))
    late, early = (world.plays(120, growing, per_request=20).index(4) for world in (blind, ahead))
    assert 50 <= late - early <= 70
    steady = World(replace(config, cold_start_s=60), number=4)
    wave = [31_000, 37_000, 33_000, 38_000, 32_000, 36_000, 39_000]
    assert set(steady.plays(140, lambda now_s: wave[int(now_s) % 7], per_request=20)) == {4}


def test_requests_that_go_on_are_no_growth() -> None:
    """Three of them, each of which gets a token a step: what is needed grows, but nobody comes."""
    scaler = Scaler(ScalingConfig(low_freeness=0, high_freeness=0, cold_start_s=600), BOUNDS)
    for now_s in range(60):
        advice = advised(scaler, [holding("a", 3 * (100 + 30 * now_s), 3, now_s=now_s)], now_s)
    assert advice.wanted == 1


def test_instances_that_come_back_after_a_start_of_the_scheduler_are_not_too_many() -> None:
    scaler = Scaler(CONFIG, BOUNDS)
    assert advised(scaler, even(1, 100, 1), 0.0).wanted == 1
    later = [advised(scaler, even(number, 100, 1, float(number)), float(number)) for number in (2, 3, 4)]
    assert [one.wanted for one in later] == [2, 3, 4]
    assert not any(one.leave for one in later)


def test_a_group_that_vanishes_keeps_its_number_until_it_is_forgotten() -> None:
    scaler = Scaler(CONFIG, BOUNDS)
    assert advised(scaler, even(4, 30_000, 30)).wanted == 4
    gone = advised(scaler, [], FORGET_S - 1)
    assert (gone.wanted, gone.num_serving, gone.saturation, gone.leave) == (4, 0, 0.0, [])
    assert not scaler.advise(cases.table(), FORGET_S + 1)


def test_a_limit_of_latency_needs_instances_too() -> None:
    table = cases.table(holding("a", 100, 1, num_uncomputed_pairs=0), known=cases.Known())
    needed = measure(table, ScalingConfig(tpot_s=1e-9), 0.0)[M]
    assert (needed.needed, needed.reason) == (2.0, "time per token"), "no more than twice as many at a time"
    step_s = 1.2 * (TRUE.a + TRUE.d + 100 * TRUE.e)
    assert 0.5 < measure(table, ScalingConfig(tpot_s=step_s), 0.0)[M].needed < 1.0
    assert measure(table, ScalingConfig(), 0.0)[M].reason == "KV cache"


def test_instances_of_whose_steps_nothing_is_known_need_no_others() -> None:
    """An idle cluster, or a new version: nothing was seen of it yet."""
    limits = ScalingConfig(ttft_s=10.0, tpot_s=10.0)
    scaler = Scaler(limits, BOUNDS)
    for now_s in range(200):
        assert advised(scaler, [holding(name, 100, 1, now_s=now_s) for name in "ab"], now_s).wanted <= 2
    mixed = cases.table(holding("a", 100, 1), holding("b", 100, 1), known=cases.KnownOf("a"))
    alone = cases.table(holding("a", 100, 1), holding("b", 100, 1), known=cases.KnownOf("a", "b"))
    found = [measure(table, ScalingConfig(tpot_s=1e-3), 0.0)[M] for table in (mixed, alone)]
    assert found[0].needed == pytest.approx(found[1].needed)
    assert found[0].needed > 2


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 300)), min_size=1, max_size=60),
    number=st.integers(0, 12),
    least=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_always(loads: list[tuple[int, int]], number: int, least: int, more: int) -> None:
    """Within the bounds; nobody leaves below the least, nor while more are needed; who leaves serves."""
    bounds = Bounds(least, least + more)
    scaler = Scaler(CONFIG, bounds)
    for now_s, (tokens, requests) in enumerate(loads):
        table = cases.table(*even(number, tokens, requests, now_s)) if number else cases.table()
        for advice in scaler.advise(table, now_s):
            assert bounds.least <= advice.wanted <= bounds.most
            assert number - len(advice.leave) >= min(number, advice.wanted)
            assert set(advice.cheapest_first) <= set(table.index)
            needed = measure(table, CONFIG, now_s)[M].needed if number else 0.0
            assert advice.wanted >= bounds.clamp(needed) or not number
            number = advice.wanted


def test_the_cheapest_leaves_first_and_of_equals_the_last() -> None:
    there = [holding("a", 500, 1), holding("b", 300, 9), holding("c", 0, 0, waiting_tokens=4000), holding("d", 500, 1)]
    scaler = Scaler(CONFIG, Bounds(1, 8))
    for now_s in range(40):
        advice = advised(scaler, [cases.instance(one.id, now_s) for one in there], now_s)
    advice = advised(scaler, there, 40.0)
    assert (advice.wanted, advice.leave) == (1, ["b", "d", "a"])
    assert advised(scaler, [holding("a", 1, 1), holding("b", 0, 0)][:1], 41.0).leave == []


def test_a_node_keeps_an_instance_as_long_as_others_have_company() -> None:
    there = [
        holding("a", 10, 1, node_id="n1"), holding("b", 500, 1, node_id="n2"), holding("c", 600, 1, node_id="n2"),
        holding("d", 700, 1, node_id="n2"),
    ]  # fmt: skip
    scaler = Scaler(CONFIG, Bounds(1, 8))
    for now_s in range(41):
        advice = advised(scaler, [cases.instance(one.id, now_s, node_id=one.metadata.node_id) for one in there], now_s)
    advice = advised(scaler, there, 41.0)
    assert advice.leave == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("3", "is not MIN:MAX"), ("a:b", "is not MIN:MAX"), (":", "is not MIN:MAX"), ("1:2:3", "is not MIN:MAX"),
     ("-1:2", "is not MIN:MAX"), ("1.5:2", "is not MIN:MAX"), ("0:2", "MIN must be at least 1"),
     ("5:2", "MIN is above MAX")],
)  # fmt: skip
def test_bounds_that_are_none(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_bounds(text)


def test_a_band_that_is_upside_down() -> None:
    [fault] = faults(ScalingConfig(low_freeness=300, high_freeness=200))
    assert "--scaling-high-freeness 200 is below --scaling-low-freeness 300" in fault
    assert not list(faults(ScalingConfig()))
