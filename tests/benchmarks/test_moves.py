# SPDX-License-Identifier: Apache-2.0
"""Stalls read off synthetic timelines whose answer is known."""

from __future__ import annotations

import itertools

import pytest

from tests.support.moves import stall_of


def arrivals(gaps: list[float]) -> list[float]:
    return list(itertools.accumulate(gaps, initial=100.0))


def test_a_stall_at_the_hand_over() -> None:
    times = arrivals([0.010] * 20 + [0.045] + [0.010] * 20)
    stall = stall_of(times, 21)
    assert stall.stall == pytest.approx(0.045)
    assert stall.itl == pytest.approx(0.010)
    assert stall.excess == pytest.approx(0.035)


def test_a_move_that_nobody_notices() -> None:
    stall = stall_of(arrivals([0.010] * 41), 21)
    assert stall.stall == pytest.approx(stall.itl)


def test_a_late_second_token_counts_as_the_stall() -> None:
    times = arrivals([0.010] * 20 + [0.012, 0.080] + [0.010] * 20)
    assert stall_of(times, 21).stall == pytest.approx(0.080)


def test_a_burst_after_the_stall_does_not_lower_the_gap() -> None:
    """Tokens that waited together arrive together: they belong to the hand-over."""
    times = arrivals([0.010] * 20 + [0.050, 0.0, 0.0] + [0.010] * 20)
    stall = stall_of(times, 21)
    assert (stall.stall, stall.itl) == (pytest.approx(0.050), pytest.approx(0.010))


def test_a_stall_far_from_the_hand_over_is_not_the_moves() -> None:
    times = arrivals([0.010] * 5 + [0.500] + [0.010] * 14 + [0.020] + [0.010] * 20)
    assert stall_of(times, 21).stall == pytest.approx(0.020)


def test_the_gap_is_taken_near_the_move() -> None:
    """A stream slows down as it grows; far tokens must not enter."""
    times = arrivals([0.001] * 100 + [0.010] * 16 + [0.030] + [0.010] * 40)
    assert stall_of(times, 117).itl == pytest.approx(0.010)


def test_gaps_during_the_copy_are_not_steady() -> None:
    """Asked for at token 20, settled at token 41: the gaps between are the copy's."""
    times = arrivals([0.010] * 20 + [0.025] * 20 + [0.040] + [0.030] * 3 + [0.010] * 20)
    stall = stall_of(times, 41, quiet_until=times[20], quiet_from=times[44])
    assert stall.stall == pytest.approx(0.040)
    assert stall.itl == pytest.approx(0.010)
    assert len(stall.steady) == 24


@pytest.mark.parametrize("index", [0, 41, 60])
def test_a_hand_over_outside_the_stream_has_no_stall(index: int) -> None:
    with pytest.raises(ValueError, match="no gaps"):
        stall_of(arrivals([0.010] * 40), index)
