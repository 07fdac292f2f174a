# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict and report, from streams that never happened."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from examples.demo import Outcome, report
from tests.support.moves import stall_of_move
from tests.support.timelines import move, stream


def outcome(**changes: Any) -> Outcome:
    gaps = [0.010] * 20 + [0.020] + [0.010] * 30 + [0.018] + [0.010] * 20
    moved = stream(gaps)
    moves = (
        move(21, moved.times[19], moved.times[23]),
        move(52, moved.times[50], moved.times[54]),
    )
    moves = tuple(dataclasses.replace(each, **changes) for each in moves)
    stalls = tuple(stall_of_move(moved, each) for each in moves)
    return Outcome(moved, stream(gaps), stream(gaps), moves, stalls)


def test_a_good_run() -> None:
    good = outcome()
    assert good.good
    values = good.as_json()
    assert values["moves"] == 2
    assert values["mode"] == "live"
    assert values["tokens_identical"] is True
    assert values["stall_ms_p50"] == pytest.approx(19.0)
    assert values["itl_ms_p50"] == pytest.approx(10.0)
    assert values["stall_over_itl_p50"] == pytest.approx(1.9)
    assert values["copied_bytes"] == 2 << 20


@pytest.mark.parametrize("changes", [{"mode": "blocking"}, {"recomputed_tokens": 2}, {"phase": "stayed"}])
def test_a_move_that_was_not_live_fails_the_demo(changes: dict[str, Any]) -> None:
    assert not outcome(**changes).good


def test_wrong_token_fails_the_demo() -> None:
    bad = outcome()
    bad.moved.token_ids[-1] += 1
    assert not bad.tokens_identical
    assert not bad.good


def test_the_report_shows_who_computed_what() -> None:
    console = Console(width=160)
    run = outcome()
    with console.capture() as shown:
        report(run, [f" t{i}" for i in run.moved.token_ids], console)
    text = shown.get()
    assert "[A] t0" in text
    assert "[B] t21" in text
    assert "[A] t52" in text
    assert "the same" in text
