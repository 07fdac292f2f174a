# SPDX-License-Identifier: Apache-2.0
"""How long blocks are waited for. Over vLLM's schedulers: `tests/engine/test_shortage.py`."""

from __future__ import annotations

from functools import partial

import pytest

from llumlet.protocol.move.shortage import ASK_SECONDS, HOLD_SECONDS, UNHEARD_SECONDS, Shortages


@pytest.mark.parametrize(
    ("told", "waits"),
    [
        # At each time: whether a move is under way, and whether anybody reads statuses.
        ([(0.0, False, False)], [False]),
        ([(0.0, False, True), (ASK_SECONDS * 0.9, False, True), (ASK_SECONDS * 1.1, False, True)], [True, True, False]),
        ([(0.0, True, False), (HOLD_SECONDS * 0.9, True, False), (HOLD_SECONDS, True, False)], [True, True, False]),
        # An answer: from then on it is the move that is waited for, from the beginning of the shortage.
        ([(0.0, False, True), (ASK_SECONDS / 2, True, True), (HOLD_SECONDS * 0.9, True, True)], [True, True, True]),
        # The move has failed: another one would come too late.
        ([(0.0, True, True), (0.01, False, True), (0.02, True, True)], [True, False, False]),
    ],
)
def test_shortage_waits_only_for_moves_under_way(told: list[tuple[float, bool, bool]], waits: list[bool]) -> None:
    shortages = Shortages()
    assert [shortages.waits(now_s, 0, moving=moving, asks=asks) for now_s, moving, asks in told] == waits


def test_averted_preemptions_are_counted() -> None:
    shortages = Shortages()
    for number, (moving, num_preemptions, averted) in enumerate(
        [(True, 0, 1), (False, 0, 1), (True, 1, 1), (True, 1, 2)]
    ):
        shortages.waits(float(number), num_preemptions if averted == 2 else 0, moving=moving, asks=True)
        assert shortages.is_open
        shortages.over(num_preemptions)
        assert (shortages.num_averted, shortages.is_open) == (averted, False)
    shortages.over(1)
    assert shortages.num_averted == 2, "without a shortage there is nothing to avert"


def test_unanswered_shortage_pauses_its_questions() -> None:
    shortages = Shortages()
    asking = partial(shortages.waits, moving=False, asks=True)
    assert asking(0.0, 0)
    assert not asking(ASK_SECONDS, 0)
    shortages.over(1)
    assert not asking(1.0, 1)
    assert not asking(ASK_SECONDS + UNHEARD_SECONDS, 1), "this shortage has been given up"
    shortages.over(2)
    assert asking(ASK_SECONDS + UNHEARD_SECONDS, 2)
