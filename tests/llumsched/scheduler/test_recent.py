# SPDX-License-Identifier: Apache-2.0
"""Shares of the last minute, by a clock of the test's own."""

from __future__ import annotations

import pytest

from llumsched.contract import Attained
from llumsched.scheduler import recent
from llumsched.scheduler.recent import WINDOW_S, Attainment, RecentShares, Share


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_counts_expire_after_a_minute() -> None:
    clock = Clock()
    shares = RecentShares(clock)
    shares.add("a", Share(1, 2))
    clock.now_s += WINDOW_S / 2
    shares.add("a", Share(3, 3))
    shares.add("b", Share(0, 4))
    assert shares.sums() == {"a": (4, 5), "b": (0, 4)}
    clock.now_s += WINDOW_S / 2 + 0.5
    assert shares.sums() == {"a": (3, 3), "b": (0, 4)}
    clock.now_s += WINDOW_S
    assert shares.sums() == {}


def test_memory_is_bounded_by_the_seconds_of_a_minute() -> None:
    clock = Clock()
    shares = RecentShares(clock)
    for _ in range(10_000):
        clock.now_s += 0.05
        shares.add("a", Share(1, 1))
    assert len(shares._seconds) <= WINDOW_S + 2
    assert WINDOW_S / 0.05 <= shares.sums()["a"].whole <= (WINDOW_S + 2) / 0.05


def test_a_gateway_tells_all_since_its_start_and_only_what_is_new_counts() -> None:
    attainment = Attainment(Clock())
    attainment.told("g", [Attained("m", 100, 50)])
    assert attainment.sums() == {}  # of whatever time
    attainment.told("g", [Attained("m", 103, 51), Attained("n", 0, 2)])
    attainment.told("g", [Attained("m", 103, 51), Attained("n", 0, 2)])
    attainment.told("h", [])
    attainment.told("h", [Attained("m", 1, 0)])
    assert attainment.sums() == {"m": (4, 5), "n": (0, 2)}


def test_counts_that_go_back_are_a_new_beginning() -> None:
    attainment = Attainment(Clock())
    attainment.told("g", [])
    attainment.told("g", [Attained("m", 9, 9)])
    attainment.told("g", [Attained("m", 2, 20)])
    attainment.told("g", [Attained("m", 3, 20)])
    assert attainment.sums() == {"m": (10, 19)}


def test_gateways_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_MOST_GATEWAYS", 3)
    attainment = Attainment(Clock())
    for number in range(9):
        attainment.told(f"g{number}", [])
    assert list(attainment._gateways) == ["g6", "g7", "g8"]
    attainment.told("g6", [Attained("m", 1, 0)])
    assert attainment.sums() == {"m": (1, 1)}
