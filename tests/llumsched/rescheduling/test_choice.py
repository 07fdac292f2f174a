# SPDX-License-Identifier: Apache-2.0
"""The choice by name is that of the llumlet by rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llumlet.contract.types import Mode, RequestInfo
from llumlet.protocol.move import selection as llumlet
from llumlet.protocol.move.selection import Order, Unit
from llumsched.rescheduling.executing.orders import choose
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection

CAPACITY = 10_000
rows = st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.booleans()), max_size=10)
rules = st.one_of(
    st.tuples(st.just(Unit.NUM_REQ), st.sampled_from([-1.0, 1.0, 3.0])),
    st.tuples(st.just(Unit.TOKEN), st.integers(1, 6000).map(float)),
    st.tuples(st.just(Unit.RATIO), st.sampled_from([0.05, 0.25, 1.0])),
)


@given(rows, rules, st.sampled_from(list(Order)))
def test_it_is_the_same(rows: list[tuple[int, bool, bool]], rule: tuple[Unit, float], order: Order) -> None:
    ordered = [row for row in rows if row[1]] + [row for row in rows if not row[1]]
    num_running = sum(running for _, running, _ in rows)
    infos, candidates = [], []
    for number, (length, running, movable) in enumerate(ordered):
        name = f"r{number:02}"
        phase = RequestInfo.DECODE if running else RequestInfo.WAITING
        priority = length % 4 - 1
        infos.append(
            RequestInfo(request_id=name, phase=phase, prompt_tokens=length, movable=movable, priority=priority)
        )
        position = number if running else number - num_running
        candidates.append(llumlet.Candidate(llumlet.RequestId(name), running, position, length, movable, priority))
    theirs = llumlet.select(candidates, llumlet.parse_rule(rule[0], order, rule[1]), CAPACITY)
    move = Move("neutral_load", Purpose.BALANCE, "a", "b", Selection(rule[0], order, rule[1]), 0.0)
    ours = [info.request_id for info in choose(infos, move, CAPACITY, ())]
    if rule == (Unit.NUM_REQ, -1.0):
        assert sorted(ours) == sorted(theirs)
    else:
        assert ours == theirs


def test_urgent_requests_run_on_where_they_are_as_long_as_others_could_move() -> None:
    """Even where they alone would fit what is asked for."""
    rule = llumlet.parse_rule("TOKEN", "SR", 60)
    urgent = llumlet.Candidate(llumlet.RequestId("urgent"), True, 0, 50, priority=-1)
    for movable, taken in ((True, "other"), (False, "urgent")):
        other = llumlet.Candidate(llumlet.RequestId("other"), True, 1, 100, movable)
        assert llumlet.select([urgent, other], rule, CAPACITY) == [taken]
    assert llumlet.select([urgent, other], llumlet.parse_rule("NUM_REQ", "SR", -1), CAPACITY) == ["urgent"]
    waiting = llumlet.Candidate(llumlet.RequestId("waiting"), False, 0, 10)
    first = llumlet.Candidate(llumlet.RequestId("first"), False, 0, 10, priority=-1)
    assert llumlet.select([waiting, first, other], llumlet.parse_rule("NUM_REQ", "FCW", 1), CAPACITY) == ["first"]


def test_a_prefill_is_not_worth_it() -> None:
    """What cannot bring its KV cache along is left, unless it has none; a preempted one has to be computed anyway."""
    infos = [
        RequestInfo(
            request_id="hybrid", phase=RequestInfo.DECODE, prompt_tokens=9, movable=True, moves_as=Mode.RECOMPUTE
        ),
        RequestInfo(request_id="plain", phase=RequestInfo.DECODE, prompt_tokens=8, movable=True, moves_as=Mode.LIVE),
        RequestInfo(
            request_id="gone", phase=RequestInfo.PREEMPTED, prompt_tokens=7, movable=True, moves_as=Mode.RECOMPUTE
        ),
        RequestInfo(request_id="new", phase=RequestInfo.WAITING, prompt_tokens=6, movable=True, moves_as=Mode.WAITING),
    ]
    move = Move("neutral_load", Purpose.BALANCE, "a", "b", Selection(Unit.NUM_REQ, Order.LCR, -1.0), 0.0)
    assert [info.request_id for info in choose(infos, move, CAPACITY, ())] == ["plain", "gone", "new"]
