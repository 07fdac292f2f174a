# SPDX-License-Identifier: Apache-2.0
"""Selection by rule, limits, and the block ledger."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llumlet.protocol.errors import LocalProtocolError, Reason, Refused
from llumlet.protocol.ids import MigrationId, RequestId
from llumlet.protocol.move.ledger import BlockOwner, audit
from llumlet.protocol.move.limits import Limits, Slots
from llumlet.protocol.move.selection import ALL, Candidate, Order, Rule, Unit, parse_rule, select
from tests.protocol.ledger import Ledger

RUNNING = [("a", 500), ("b", 100), ("c", 900), ("d", 100)]
WAITING = [("w", 700), ("x", 50)]


def queues() -> list[Candidate]:
    """Two queues, each from its head."""
    running = [Candidate(RequestId(name), True, at, tokens) for at, (name, tokens) in enumerate(RUNNING)]
    waiting = [Candidate(RequestId(name), False, at, tokens) for at, (name, tokens) in enumerate(WAITING)]
    return running + waiting


def chosen(unit: str, order: str, value: float, candidates: list[Candidate] | None = None) -> str:
    return "".join(select(queues() if candidates is None else candidates, parse_rule(unit, order, value), 2000))


@pytest.mark.parametrize(
    ("order", "expected"),
    [("LCR", "dcba"), ("FCR", "abcd"), ("LR", "cabd"), ("SR", "bdac"), ("FCW", "wx"), ("FCWSR", "wx"), ("LP", "cabd")],
)
def test_orders(order: str, expected: str) -> None:
    assert chosen("NUM_REQ", order, 10) == expected


def test_lowest_priority_goes_first_then_the_longest() -> None:
    """Urgent ones go only if nobody else runs that could, and then in the same order."""
    numbers = {"a": 0, "b": 10, "c": 0, "d": -3}
    running = [msgspec.structs.replace(one, priority=numbers[one.request_id]) for one in queues() if one.running]
    assert chosen("NUM_REQ", "LP", 10, running) == "bca"
    assert chosen("TOKEN", "LP", 650, running) == "ba", "what does not fit is skipped"
    urgent = [msgspec.structs.replace(one, priority=one.priority - 20) for one in running]
    assert chosen("NUM_REQ", "LP", 10, urgent) == "bcad"


def test_fcwsr_takes_running_requests_only_if_none_waits() -> None:
    assert chosen("NUM_REQ", "FCWSR", 3) == "wx"
    assert chosen("NUM_REQ", "FCWSR", 3, [c for c in queues() if c.running]) == "bda"


@pytest.mark.parametrize(
    ("unit", "order", "value", "expected"),
    [
        ("NUM_REQ", "LR", 2, "ca"),
        ("TOKEN", "SR", 700, "bda"),  # 100 + 100 + 500
        ("TOKEN", "SR", 699, "bd"),
        ("TOKEN", "LR", 700, "abd"),  # 900 does not fit and is skipped; 500 + 100 + 100 do
        ("TOKEN", "LR", 99, "c"),  # nothing fits: the first in order goes alone
        ("RATIO", "FCR", 0.30, "ab"),  # 600 of 2,000 tokens
        ("RATIO", "SR", 0.001, "b"),
    ],
)
def test_budgets(unit: str, order: str, value: float, expected: str) -> None:
    assert chosen(unit, order, value) == expected


def test_all_means_waiting_ones_too() -> None:
    assert chosen("NUM_REQ", "LR", ALL) == "cabdwx"
    assert chosen("NUM_REQ", "FCW", ALL) == "wxabcd"


def test_immovable_requests_are_skipped() -> None:
    stuck = [Candidate(RequestId("a"), True, 0, 10, movable=False), Candidate(RequestId("b"), True, 1, 9000)]
    assert chosen("TOKEN", "FCR", 100, stuck) == "b"
    assert chosen("NUM_REQ", "FCR", ALL, stuck[:1]) == ""


@pytest.mark.parametrize(
    ("unit", "order", "value"),
    [
        ("NUM_REQ", "XYZ", 1),
        ("REQUESTS", "SR", 1),
        ("NUM_REQ", "", 1),
        ("NUM_REQ", "SR", 0),
        ("NUM_REQ", "SR", -2),
        ("NUM_REQ", "SR", 1.5),
        ("TOKEN", "SR", -1),
        ("RATIO", "SR", 0),
        ("RATIO", "SR", 1.01),
        ("RATIO", "SR", math.nan),
    ],
)
def test_words_and_values_that_do_not_exist(unit: str, order: str, value: float) -> None:
    with pytest.raises(Refused) as refusal:
        parse_rule(unit, order, value)
    assert refusal.value.reason is Reason.INVALID_REQUEST


candidates = st.lists(
    st.tuples(st.booleans(), st.integers(1, 5000), st.booleans(), st.sampled_from([-(1 << 40), -1, 0, 0, 5, 1 << 40])),
    max_size=12,
).map(
    lambda drawn: [
        Candidate(RequestId(f"r{at}"), running, at, tokens, movable, priority)
        for at, (running, tokens, movable, priority) in enumerate(drawn)
    ]
)
rules = st.one_of(
    st.builds(Rule, st.just(Unit.NUM_REQ), st.sampled_from(Order), st.integers(1, 12)),
    st.builds(Rule, st.just(Unit.TOKEN), st.sampled_from(Order), st.integers(1, 9000)),
    st.builds(Rule, st.just(Unit.RATIO), st.sampled_from(Order), st.floats(0.001, 1)),
)


@given(candidates, rules)
def test_selection_never_exceeds_its_budget_unless_it_is_one_request(found: list[Candidate], rule: Rule) -> None:
    by_id = {candidate.request_id: candidate for candidate in found}
    taken = select(found, rule, capacity_tokens=8000)
    assert len(set(taken)) == len(taken)
    assert all(by_id[request_id].movable for request_id in taken)
    budget = int(8000 * rule.value) if rule.unit is Unit.RATIO else int(rule.value)
    cost = len(taken) if rule.unit is Unit.NUM_REQ else sum(by_id[request_id].num_tokens for request_id in taken)
    assert cost <= budget or len(taken) == 1
    asked = [c for c in found if c.movable and (c.running or rule.order in (Order.FCW, Order.FCWSR))]
    if rule.order is Order.FCW:
        asked = [c for c in asked if not c.running]
    assert bool(taken) == bool(asked)
    assert select(list(reversed(found)), rule, capacity_tokens=8000) == taken


@given(candidates, st.sampled_from(Order))
def test_urgent_requests_run_on_as_long_as_others_run_that_could_move(found: list[Candidate], order: Order) -> None:
    by_id = {candidate.request_id: candidate for candidate in found}
    taken = [by_id[name] for name in select(found, Rule(Unit.NUM_REQ, order, len(found) + 1), capacity_tokens=8000)]
    running = [one for one in found if one.movable and one.running]
    if any(one.priority >= 0 for one in running):
        assert not [one for one in taken if one.running and one.priority < 0]


@given(candidates, st.integers(1, 12))
def test_no_lower_priority_stays_instead_of_a_moved_request(found: list[Candidate], number: int) -> None:
    """And of equals nobody longer."""
    names = select(found, Rule(Unit.NUM_REQ, Order.LP, number), capacity_tokens=8000)
    running = [one for one in found if one.movable and one.running]
    others = [one for one in running if one.priority >= 0]
    worth = {one.request_id: (one.priority, one.num_tokens) for one in others or running}
    assert len(names) == min(number, len(worth))
    assert [worth[name] for name in names] == sorted(worth.values(), reverse=True)[:number]


# Limits


def slots(**limits: object) -> Slots:
    return Slots(Limits(**limits), capacity_tokens=1000, busy=Reason.DESTINATION_BUSY)  # type: ignore[arg-type]


def test_slots_are_counted_once_and_given_back_once() -> None:
    two = slots(max_requests=2)
    first, second, third = (MigrationId(name) for name in "abc")
    two.take(first, 10)
    two.take(first, 10)
    two.take(second, 10)
    with pytest.raises(Refused, match="destination_busy"):
        two.take(third, 10)
    two.give_back(first)
    two.give_back(first)
    two.take(third, 10)
    assert (two.num_requests, two.num_tokens, two.available_requests) == (2, 20, 0)


def test_token_limit_is_the_tighter_of_tokens_and_ratio() -> None:
    limited = slots(max_tokens=600, max_kv_ratio=0.5)
    assert limited.available_tokens == 500
    limited.take(MigrationId("a"), 400)
    with pytest.raises(Refused):
        limited.take(MigrationId("b"), 101)
    limited.take(MigrationId("b"), 100)


def test_request_larger_than_the_limit_goes_alone() -> None:
    limited = slots(max_tokens=100)
    limited.take(MigrationId("large"), 5000)
    with pytest.raises(Refused):
        limited.take(MigrationId("small"), 1)


def test_no_limit() -> None:
    free = slots()
    assert (free.available_requests, free.available_tokens) == (None, None)
    for number in range(100):
        free.take(MigrationId(str(number)), 10**6)


def test_nothing_may_come_in_if_the_limit_is_zero() -> None:
    with pytest.raises(Refused):
        slots(max_requests=0).take(MigrationId("a"), 1)


# Ledger


def test_life_of_a_move_in_the_ledgers_of_both() -> None:
    source, destination = Ledger(8), Ledger(8)
    source.hold(BlockOwner.SCHEDULER, "r", [0, 1, 2])
    source.hold(BlockOwner.PIN, "m", [0, 1])
    destination.hold(BlockOwner.RESERVATION, "m", [5, 6, 7])
    assert destination.writable("m", [5, 6])
    assert not destination.writable("m", [4])
    source.give_back(BlockOwner.SCHEDULER, "r")
    assert source.counts() == {"free": 6, "scheduler": 0, "pin": 2, "reservation": 0, "draining": 0}
    destination.pass_on("m", BlockOwner.SCHEDULER, "r")
    assert not destination.writable("m", [5])
    source.give_back(BlockOwner.PIN, "m")
    source.give_back(BlockOwner.PIN, "m")
    for ledger in (source, destination):
        ledger.check_idle()


def test_draining_blocks_may_be_written_and_are_nobody_elses() -> None:
    ledger = Ledger(4)
    ledger.hold(BlockOwner.RESERVATION, "m", [0, 1])
    ledger.pass_on("m", BlockOwner.DRAINING)
    assert ledger.writable("m", [0, 1])
    assert ledger.free() == [2, 3]
    with pytest.raises(LocalProtocolError, match="draining"):
        ledger.hold(BlockOwner.SCHEDULER, "r", [1, 2])
    with pytest.raises(LocalProtocolError, match="draining m"):
        ledger.check_idle()
    ledger.give_back(BlockOwner.DRAINING, "m")
    ledger.check_idle()


@pytest.mark.parametrize(
    ("owner", "blocks"),
    [
        (BlockOwner.PIN, [3]),  # a pin never comes first
        (BlockOwner.RESERVATION, [0]),  # the scheduler has it
        (BlockOwner.RESERVATION, [1]),  # reserved for another
        (BlockOwner.SCHEDULER, [1]),
        (BlockOwner.SCHEDULER, [4]),  # there is no such block
    ],
)
def test_refused_slot_changes_nothing(owner: BlockOwner, blocks: list[int]) -> None:
    ledger = Ledger(4)
    ledger.hold(BlockOwner.SCHEDULER, "r", [0])
    ledger.hold(BlockOwner.RESERVATION, "m", [1])
    before = ledger.counts()
    with pytest.raises(LocalProtocolError):
        ledger.hold(owner, "other", blocks)
    assert ledger.counts() == before


def test_only_a_reservation_is_passed_on() -> None:
    with pytest.raises(LocalProtocolError):
        Ledger(4).pass_on("m", BlockOwner.SCHEDULER)


@pytest.mark.parametrize(
    ("free", "held", "fault"),
    [
        ([0, 1], {}, "neither free nor owned: [2]"),
        ([0, 1, 2, 2], {}, "twice"),
        ([0, 1, 2], {BlockOwner.PIN: {2}}, "free and owned: [2]"),
        ([0], {BlockOwner.SCHEDULER: {1, 2}, BlockOwner.RESERVATION: {2}}, "held by others too: [2]"),
        ([0], {BlockOwner.SCHEDULER: {1, 2}, BlockOwner.PIN: {2}}, None),
    ],
)
def test_audit_of_a_pool_as_found(free: list[int], held: dict[BlockOwner, set[int]], fault: str | None) -> None:
    faults = audit(3, free, held)
    assert (fault is None) == (not faults)
    assert fault is None or fault in faults[0]
