# SPDX-License-Identifier: Apache-2.0
"""When a scheduler knows enough of the cluster to choose."""

from __future__ import annotations

import pytest

from llumsched.cluster.view import View
from llumsched.dispatch.warmth import QUIET_S, Warmth
from tests.llumsched import cases


class Bench:
    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self.now_s = 100.0
        self.view = View(lambda: self.now_s)
        self.warmth = Warmth(lambda: self.now_s, quiet_s)
        self.view.observe(self.warmth)

    def after(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.warmth.is_warming


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_is_warm_when_no_instance_has_come_for_a_while(bench: Bench) -> None:
    assert bench.after(3600.0), "with none at all"
    for name in "abc":
        cases.put(bench.view, name)
        assert bench.after(QUIET_S - 0.1)
    cases.put(bench.view, "a", 2)
    assert not bench.after(0.1), "statuses are no growth"


def test_it_stays_warm_when_the_fleet_grows_or_shrinks_later(bench: Bench) -> None:
    cases.put(bench.view, "a")
    assert not bench.after(QUIET_S)
    cases.put(bench.view, "b")
    assert not bench.after(0.0)
    bench.view.remove("a")
    assert not bench.after(0.0)


def test_a_fleet_that_never_stops_growing_is_placed_in_the_end(bench: Bench) -> None:
    for number in range(15):
        cases.put(bench.view, f"i{number}")
        assert bench.after(0.99)
    cases.put(bench.view, "last")
    assert not bench.after(0.2)


def test_it_warms_up_again_after_all_have_been_lost(bench: Bench) -> None:
    cases.put(bench.view, "a")
    assert not bench.after(QUIET_S)
    bench.view.remove("a")
    cases.put(bench.view, "a")
    assert bench.after(0.0)
    assert not bench.after(QUIET_S)


def test_without_a_time_it_is_always_warm() -> None:
    bench = Bench(quiet_s=0.0)
    assert not bench.after(0.0)
    cases.put(bench.view, "a")
    bench.view.remove("a")
    assert not bench.after(0.0)
