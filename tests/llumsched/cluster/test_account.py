# SPDX-License-Identifier: Apache-2.0
"""The account against engines that do as they like: requests arrive or not, statuses come late or never."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.account import Account
from llumsched.cluster.providers.in_flight import Counters, counters_of
from llumsched.cluster.table import standard_table
from llumsched.cluster.view import View
from llumsched.policy.metrics import METRICS
from tests.llumsched import cases

STALE_S = 10.0
IDS = st.sampled_from(["a", "b", "c"])
REQUESTS = st.sampled_from([f"r{n}" for n in range(6)])
TYPES = st.sampled_from(list(InferType))


class Engines(RuleBasedStateMachine):
    """`on_their_way` is what the account should hold, by its four rules, kept in the plainest way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.view = View(lambda: self.now)
        self.account = Account(lambda: self.now, STALE_S)
        self.view.observe(self.account)
        self.on_their_way: dict[tuple[str, InferType], tuple[str, int, float]] = {}
        self.at_engine: dict[str, set[str]] = {}
        self.lives: dict[str, int] = {}
        self.updates = 0
        for instance_id in "abc":
            self.restart(instance_id)

    @rule(instance_id=IDS)
    def restart(self, instance_id: str) -> None:
        self.lives[instance_id] = self.lives.get(instance_id, 0) + 1
        self.at_engine[instance_id] = set()
        self.view.put_metadata(cases.metadata(instance_id, incarnation=str(self.lives[instance_id])))
        self._forget(lambda request_id, place: place == instance_id)

    @rule(instance_id=IDS)
    def leave(self, instance_id: str) -> None:
        self.view.remove(instance_id)
        self._forget(lambda request_id, place: place == instance_id)

    @rule(request_id=REQUESTS, instance_id=IDS, infer_type=TYPES, tokens=st.integers(0, 99))
    def dispatch(self, request_id: str, instance_id: str, infer_type: InferType, tokens: int) -> None:
        if instance_id not in self.view:
            return
        self.account.dispatched(request_id, instance_id, infer_type, tokens)
        self.on_their_way[request_id, infer_type] = instance_id, tokens, self.now

    @rule(request_id=REQUESTS, instance_id=IDS)
    def arrive(self, request_id: str, instance_id: str) -> None:
        """Also of requests that moved here, or were never dispatched."""
        self.at_engine[instance_id].add(request_id)

    @rule(instance_id=IDS, waiting=st.booleans(), late=st.booleans())
    def report(self, instance_id: str, waiting: bool, late: bool) -> None:
        """`late`: a status of an earlier life, which the view refuses."""
        self.updates += 1
        if instance_id not in self.view:
            return
        names = sorted(self.at_engine[instance_id])
        life = self.lives[instance_id] - late
        fields = {"waiting_requests": names} if waiting else {"recent_waiting_requests": names}
        taken = self.view.put_status(cases.status(instance_id, self.updates, incarnation=str(life), **fields))
        assert taken == (not late)
        if taken:
            self._forget(lambda request_id, place: place == instance_id and request_id in names)

    @rule(request_id=REQUESTS, instance_ids=st.sets(IDS))
    def release(self, request_id: str, instance_ids: set[str]) -> None:
        self.account.released(request_id, instance_ids)
        self._forget(lambda found, place: found == request_id and place in instance_ids)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.account.expire()
        self.on_their_way = {key: value for key, value in self.on_their_way.items() if self.now - value[2] < STALE_S}

    def _forget(self, gone: object) -> None:
        assert callable(gone)
        for (request_id, infer_type), (place, _, _) in list(self.on_their_way.items()):
            if gone(request_id, place):
                del self.on_their_way[request_id, infer_type]

    @invariant()
    def counts_what_is_on_its_way(self) -> None:
        expected: dict[str, Counters] = {}
        for (_, infer_type), (place, tokens, sent_s) in self.on_their_way.items():
            one = counters_of(infer_type, tokens)._replace(dispatched_ms=round(sent_s * 1000))
            expected[place] = expected.get(place, Counters()).plus(one)
        assert dict(self.account.in_flight.counters) == expected
        assert len(self.account) == len(self.on_their_way)

    def teardown(self) -> None:
        self.now += STALE_S
        self.account.expire()
        assert not self.account.in_flight.counters
        assert not len(self.account)
        assert not self.account._entries
        assert not self.account._by_age


TestEngines = Engines.TestCase
TestEngines.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize(
    ("infer_type", "counters"),
    [
        (InferType.NEUTRAL, Counters(1, 1, 1, 7, 28, 7, 7)),
        (InferType.PREFILL, Counters(1, 1, 0, 7, 28, 0, 7)),
        (InferType.DECODE, Counters(1, 0, 1, 0, 0, 7, 7)),
    ],
)
def test_request_is_counted_once(infer_type: InferType, counters: Counters) -> None:
    account = Account(lambda: 0.0, STALE_S)
    account.dispatched("r", "a", infer_type, 7)
    assert account.in_flight.of("a") == counters


def test_switched_off_it_counts_nothing() -> None:
    account = Account(lambda: 0.0, 0.0)
    account.dispatched("r", "a", InferType.NEUTRAL, 7)
    assert not account.in_flight.counters


def test_a_long_name_is_known_by_its_beginning() -> None:
    view, account = View(lambda: 0.0), Account(lambda: 0.0, STALE_S)
    view.observe(account)
    cases.put(view, "a")
    account.dispatched("r" * 200, "a", InferType.NEUTRAL, 7)
    cases.put(view, "a", 2, recent_waiting_requests=["r" * 128])
    assert not account.in_flight.counters


@pytest.mark.parametrize("shown_by_source", [True, False])
def test_a_request_that_moves_is_counted_once_where_it_is(shown_by_source: bool) -> None:
    view, account = View(lambda: 0.0), Account(lambda: 0.0, STALE_S)
    view.observe(account)
    table = standard_table(account.in_flight)
    view.observe(table)
    for name in "ab":
        cases.put(view, name)

    def loads() -> tuple[float, float]:
        a, b = (METRICS["num_requests"].at(table, table.index[name]) for name in "ab")
        return a, b

    account.dispatched("r", "a", InferType.NEUTRAL, 7)
    assert loads() == (1, 0)
    if shown_by_source:
        cases.put(view, "a", 2, num_waiting_requests=1, waiting_requests=["r"], recent_waiting_requests=["r"])
        assert loads() == (1, 0)
    cases.put(view, "a", 3, recent_waiting_requests=["r"])  # it arrived, and is gone
    assert loads() == (0, 0)
    cases.put(view, "b", 2, num_running_requests=1)
    assert loads() == (0, 1)
    assert not len(account)


def test_nothing_is_over_while_no_status_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now, blind = 0.0, True
    account = Account(lambda: now, STALE_S, lambda: blind)
    for number in range(5):
        account.dispatched(f"r{number}", "a", InferType.NEUTRAL, 7)
    now = 3 * STALE_S
    account.expire()
    assert account.in_flight.of("a").num_requests == 5
    monkeypatch.setattr("llumsched.cluster.providers.account._MOST_OVERDUE", 3)
    account.expire()
    assert account.in_flight.of("a").num_requests == 3
    account.dispatched("new", "a", InferType.NEUTRAL, 7)
    blind = False
    account.expire()
    assert account.in_flight.of("a").num_requests == 1
    assert account.num_expired == 5
