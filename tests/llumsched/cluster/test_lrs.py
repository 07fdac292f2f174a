# SPDX-License-Identifier: Apache-2.0
"""Load of engines that report none: what was sent, what gateways say of it, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.in_flight import Counters
from llumsched.cluster.providers.lrs import RealtimeState, Update
from llumsched.cluster.view import View
from tests.llumsched import cases

NEUTRAL = InferType.NEUTRAL


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Lite:
    def __init__(self) -> None:
        self.clock = Clock()
        self.view = View(self.clock)
        for name in "ab":
            cases.put(self.view, name)
        self.state = RealtimeState(self.clock, self.view, gateway_ttl_s=30, state_ttl_s=600)
        self.view.observe(self.state)

    def send(self, request_id: str = "r", place: str = "a", tokens: int = 100, gateway: str = "g") -> None:
        self.state.dispatched(request_id, place, NEUTRAL, tokens, gateway)

    def report(self, tokens: int, *, gateway: str = "g", place: str = "a", request_id: str = "r",
               done: bool = False) -> str | None:  # fmt: skip
        return self.state.reported(Update(request_id, place, NEUTRAL, gateway, tokens, done))

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.state.expire()

    def tokens(self, place: str = "a") -> int:
        return self.state.in_flight.of(place).num_tokens


@pytest.fixture
def lite() -> Iterator[Lite]:
    lite = Lite()
    yield lite
    lite.wait(10_000)
    assert not lite.state.in_flight.counters
    assert not len(lite.state)
    assert not lite.state._gateways
    assert not lite.state._released


def test_from_dispatch_to_release(lite: Lite) -> None:
    lite.send()
    assert lite.state.in_flight.of("a") == Counters(1, 1, 1, 100, 5050, 100, 100)
    assert lite.report(101, done=True) is None
    assert lite.state.in_flight.of("a") == Counters(1, 0, 1, 0, 0, 101, 101)
    assert lite.report(90) is None
    assert lite.tokens() == 101
    for _ in range(2):
        lite.state.released("r", {"a"}, "g")
        assert not lite.state.in_flight.counters


def test_a_retry_takes_the_place_of_the_first_try(lite: Lite) -> None:
    lite.send(place="a")
    lite.send(place="b", tokens=120)
    assert (lite.tokens("a"), lite.tokens("b")) == (0, 120)
    lite.state.released("r", {"a"}, "g")
    assert lite.tokens("b") == 120
    assert lite.report(150, place="a") == "request instance changed"


def test_reports_that_are_not_taken(lite: Lite) -> None:
    lite.send()
    assert lite.report(150, place="nowhere", request_id="x") == "endpoint not found"
    lite.state.released("r", {"a"}, "g")
    assert lite.report(150) == "request released"
    assert not lite.state.in_flight.counters


def test_the_same_id_of_two_gateways_is_two_requests(lite: Lite) -> None:
    lite.send(gateway="g")
    lite.send(gateway="h", tokens=7)
    assert lite.tokens() == 107
    assert lite.report(8, gateway="h") is None
    lite.state.released("r", {"a"}, "g")
    assert lite.tokens() == 8
    lite.state.released("r", {"a"}, "h")


def test_a_restarted_scheduler_learns_what_runs(lite: Lite) -> None:
    assert lite.report(150) is None
    assert lite.tokens() == 150


def test_a_lost_gateway_takes_its_requests_along(lite: Lite) -> None:
    lite.send("r", gateway="g")
    lite.send("s", gateway="h", tokens=7)
    lite.wait(25)
    lite.report(7, gateway="h", request_id="s")
    lite.wait(10)
    assert lite.tokens() == 7


def test_a_connected_gateway_is_not_lost(lite: Lite) -> None:
    lite.state.connected("g")
    lite.send()
    lite.wait(100)
    assert lite.tokens() == 100
    lite.state.disconnected("g")
    lite.wait(31)
    assert not lite.tokens()


def test_a_request_that_its_gateway_lost(lite: Lite) -> None:
    lite.state.connected("g")
    lite.send()
    lite.wait(599)
    assert lite.tokens() == 100
    lite.wait(2)
    assert not lite.tokens()
    assert lite.state.num_expired == 1
    lite.state.disconnected("g")


def test_an_instance_that_leaves_or_restarts_takes_its_requests_along(lite: Lite) -> None:
    lite.send("r", "a")
    lite.send("s", "b")
    lite.view.put_metadata(cases.metadata("a", incarnation="second"))
    assert (lite.tokens("a"), lite.tokens("b")) == (0, 100)
    lite.view.remove("b")
    assert not lite.state.in_flight.counters


def test_a_gateway_that_reports_nothing_is_warned_of_once(lite: Lite, caplog: pytest.LogCaptureFixture) -> None:
    """As one that is left in full mode does."""

    def serve(seconds: int) -> None:
        for number in range(seconds // 10):
            lite.send(f"silent {number}", gateway="silent")
            lite.send(f"other {number}", gateway="other")
            lite.report(100, request_id=f"other {number}", gateway="other")
            lite.wait(10)

    lite.state.connected("idle")
    serve(30)
    assert not caplog.records
    serve(100)
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "gateway 'silent' has requests placed and reports none: each "
    ]
    lite.state.disconnected("idle")
