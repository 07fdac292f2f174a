# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks and how it counts; that it runs on real engines is shown by running it."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.rebalance import CASES, LONG, SHORT, Case, Outcome, arrivals, rate_for, table_of


def test_every_second_request_is_long_and_all_cases_get_the_same() -> None:
    requests = arrivals(rate=5, seconds=60, seed=3)
    assert requests == arrivals(rate=5, seconds=60, seed=3)
    assert requests != arrivals(rate=5, seconds=60, seed=4)
    assert [(len(one.prompt), one.num_output) for one in requests[:4]] == [LONG, SHORT, LONG, SHORT]
    assert all(before.at_s < after.at_s <= 60 for before, after in itertools.pairwise(requests))
    assert len(requests) == pytest.approx(300, rel=0.2)


@pytest.mark.parametrize("gap_s", [0.005, 0.02])
@pytest.mark.parametrize("load", [0.5, 1.2])
def test_as_many_requests_as_fill_a_kv_cache(load: float, gap_s: float) -> None:
    """However fast the engines are: tokens held at a time, by the requests themselves."""
    capacity, seconds = 6400, 5000.0
    num_prompt, num_output = LONG
    held = sum(
        num_output * gap_s * (num_prompt + num_output / 2)
        for one in arrivals(rate_for(load, capacity, gap_s), seconds, seed=1)
        if one.num_output == num_output
    )
    assert held / seconds / capacity == pytest.approx(load, rel=0.1)


def test_a_row() -> None:
    outcome = Outcome([1.0, 2.0, 103.0], [5.0] * 200, preemptions=3, moves=4)
    row = outcome.row(Case("round-robin", True))
    assert (row["bench"], row["dispatch"], row["rescheduling"]) == ("rebalance", "round-robin", True)
    assert row["ttft_p99_ms"] == pytest.approx(101, abs=0.1)
    assert (row["itl_p99_ms"], row["preemptions"], row["moves"], row["requests"]) == (5.0, 3, 4, 3)
    assert table_of([row]).row_count == 1


def test_the_cases() -> None:
    assert len(set(CASES)) == 4
    assert ["--enable-rescheduling" in case.scheduler_arguments for case in CASES] == [False, True, False, True]
