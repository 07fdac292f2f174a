# SPDX-License-Identifier: Apache-2.0
"""Outlier detection and the retry budget: their rules by themselves, and a hundred instances of which a few are bad."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llumlet.process.addresses import Address
from llumlet.protocol.infer_type import InferType
from llumlet.protocol.recovery.retries import RetryBudget, backoff_s
from llumsched.causes import Cause
from llumsched.gateway.backends import Backends
from llumsched.gateway.config import AccessLog, Config
from llumsched.gateway.outliers import Limits, Outliers, Pace
from llumsched.gateway.server import Gateway
from llumsched.policy.document import Mode, load_policy
from llumsched.scheduler.process import SchedulerConfig, serve
from tests.llumsched.gateway.support import DEADLINE_S, cluster, engine, turns, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def outliers(clock: Clock, size: int = 10, **limits: Any) -> Outliers[str]:
    return Outliers(Limits(**{"max_ejected": 0.5} | limits), lambda: size, clock, draw=lambda: 0.5)


def fail(rules: Outliers[str], key: str, times: int = 1, cause: Cause = Cause.ERRORS) -> None:
    for _ in range(times):
        rules.failed(key, cause, "it answered 500")


# The rules


def test_failures_in_a_row_are_too_many(clock: Clock) -> None:
    rules = outliers(clock)
    fail(rules, "a", 4)
    rules.succeeded("a")
    fail(rules, "a", 4)
    assert not rules.ejected
    fail(rules, "a")
    (ejection,) = rules.ejected.values()
    assert (ejection.cause, ejection.why) == (Cause.ERRORS, "5 failures in a row, the last: it answered 500")


def test_a_share_of_failures_counts_if_others_have_fewer(clock: Clock) -> None:
    def every_third_fails(rules: Outliers[str], keys: str) -> None:
        for number in range(60):
            for key in keys:
                rules.succeeded(key) if number % 3 else fail(rules, key)

    alone = outliers(clock)
    for _ in range(100):
        alone.succeeded("well")
    every_third_fails(alone, "a")
    assert list(alone.ejected) == ["a"]
    all_alike = outliers(clock)
    every_third_fails(all_alike, "abcdef")
    assert not all_alike.ejected


def test_a_share_of_little_says_nothing_and_is_forgotten(clock: Clock) -> None:
    rules = outliers(clock)
    for _ in range(9):
        rules.succeeded("a")
        fail(rules, "a")
    assert not rules.ejected
    clock.now_s += 1000
    for _ in range(20):
        rules.succeeded("a")
    fail(rules, "a")
    assert not rules.ejected


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (3, 1), (10, 5)])
def test_at_most_half_of_the_fleet_is_out(clock: Clock, size: int, most: int) -> None:
    rules = outliers(clock, size)
    for number in range(size):
        fail(rules, str(number), 5)
    assert len(rules.ejected) == most


def test_whom_no_connection_reaches_is_out_at_once_and_whatever_the_others_do(clock: Clock) -> None:
    rules = outliers(clock, size=3)
    for key in "abc":
        fail(rules, key, cause=Cause.UNREACHABLE)
    assert set(rules.ejected) == set("abc")


def test_unreachable_instances_are_not_part_of_the_fleet(clock: Clock) -> None:
    """They stay known for a while: of the others half may be out, not none."""
    rules = outliers(clock, size=20)
    for number in range(12):
        fail(rules, f"gone-{number}", cause=Cause.UNREACHABLE)
    for number in range(8):
        fail(rules, f"here-{number}", 5)
    assert sum(key.startswith("here") for key in rules.ejected) == 4


def test_the_way_back_is_a_question_and_a_trial(clock: Clock) -> None:
    rules = outliers(clock)
    fail(rules, "a", 5)
    clock.now_s += 1.9
    assert rules.due() == []
    clock.now_s += 0.2
    assert rules.due() == ["a"]
    assert rules.due() == [], "it is being asked"
    assert rules.is_out("a")
    rules.asked("a", takes=True)
    assert not rules.is_out("a")
    fail(rules, "a")
    assert rules.is_out("a"), "one failure is enough on trial"
    clock.now_s += 3.9
    assert rules.due() == [], "the second time is twice as long"
    clock.now_s += 0.2
    assert rules.due() == ["a"]
    rules.asked("a", takes=True)
    for _ in range(3):
        rules.succeeded("a")
    fail(rules, "a", 4)
    assert not rules.ejected, "the trial is over"


def test_refusing_instance_is_asked_at_growing_intervals(clock: Clock) -> None:
    rules = outliers(clock)
    fail(rules, "a", 5)
    gaps, last_s = [], clock.now_s
    for _ in range(600):
        clock.now_s += 0.1
        for key in rules.due():
            gaps.append(round(clock.now_s - last_s))
            last_s = clock.now_s
            rules.asked(key, takes=False)
    assert gaps == [2, 4, 8, 16, 20]


def test_unasked_instance_is_due_again_at_once(clock: Clock) -> None:
    """The gateway had no descriptors, say: that is nothing against the instance."""
    rules = outliers(clock)
    fail(rules, "a", 5)
    clock.now_s += 2.1
    for _ in range(3):
        assert rules.due() == ["a"]
        rules.asked("a", takes=None)
    assert rules.due() == ["a"]
    rules.asked("a", takes=True)
    assert not rules.is_out("a")


def test_earlier_ejections_are_forgiven(clock: Clock) -> None:
    rules = outliers(clock)
    for calm_s, length_s in ((0.0, 2.0), (1.0, 4.0), (61.0, 2.0)):
        clock.now_s += calm_s
        fail(rules, "a", 5)
        clock.now_s += length_s - 0.01
        assert rules.due() == []
        clock.now_s += 0.02
        assert rules.due() == ["a"]
        rules.asked("a", takes=True)
        for _ in range(3):
            rules.succeeded("a")


def test_silence_ends_with_the_first_word(clock: Clock) -> None:
    rules = outliers(clock)
    rules.silent("a", "3 requests wait, and nothing comes")
    fail(rules, "b", 5)
    assert set(rules.ejected) == {"a", "b"}
    rules.moved("a")
    rules.moved("b")
    assert set(rules.ejected) == {"b"}


def test_an_instance_that_is_gone_is_forgotten(clock: Clock) -> None:
    rules = outliers(clock)
    fail(rules, "a", 5)
    clock.now_s += 10
    rules.due()
    rules.forget("a")
    rules.asked("a", takes=True)
    rules.forget("never seen")
    assert not rules.ejected


def test_slow_is_who_is_ten_times_slower_than_most_with_the_same_model(clock: Clock) -> None:
    pace: Pace[str] = Pace(clock)
    for _ in range(8):
        for key, seconds in {"a": 0.02, "b": 0.03, "c": 1.0, "d": 0.1}.items():
            pace.step(key, seconds, clock.now_s)
    assert set(pace.slow_among("abcd")) == {"c"}
    assert pace.slow_among("ac") == {}, "of two nobody knows which is slow"
    assert pace.slow_among("ab") == {}
    clock.now_s += 60
    assert pace.slow_among("abcd") == {}, "nothing of that is recent"


@pytest.mark.asyncio
async def test_accused_instances_that_are_gone_leave_nothing_behind() -> None:
    async with aiohttp.ClientSession() as session:
        backends = Backends((), session, Limits(0.5), {})
        for number in range(10):
            backend = backends.at(Address(f"host-{number}", 1))
            backends.accuse(backend)
            if number % 2:
                backends.settled(backend, is_proven=True)
                assert not backends._accused
            backends._forget(backend)
            backends.settled(backend, is_proven=True)
        assert not backends._accused


# The budget


def test_retries_are_a_share_of_what_comes(clock: Clock) -> None:
    budget = RetryBudget(0.2, lambda: 0, clock)
    taken = 0
    for _ in range(10_000):
        budget.requested()
        taken += budget.take() is not None
    assert 2000 <= taken <= 2010


def test_a_queue_that_is_lost_comes_again_little_by_little(clock: Clock) -> None:
    budget = RetryBudget(0.2, lambda: 1000, clock)
    clock.now_s += 60
    waits = [budget.take(10.0) for _ in range(500)]
    assert waits[:200] == [0.0] * 200, "a share of what is in flight at once"
    assert waits[-1] == pytest.approx(3.0), "the rest at a tenth a second"
    assert all(wait is not None for wait in waits)
    assert budget.take() is None


def test_second_opinions_leave_something_to_those_that_lost_their_engine(clock: Clock) -> None:
    budget = RetryBudget(0.2, lambda: 0, clock)
    assert sum(budget.take(kept=0.5) is not None for _ in range(10)) == 5
    assert sum(budget.take() is not None for _ in range(10)) == 5


def test_pauses_grow_and_differ() -> None:
    assert [backoff_s(attempt, 1.0) for attempt in (1, 2, 3, 9)] == [0.05, 0.1, 0.2, 1.0]
    assert backoff_s(3, 0.25) == 0.05


# A hundred instances


@dataclass
class Fleet:
    gateway: Gateway
    mocks: list[Mock]
    ports: list[int]
    client: aiohttp.ClientSession
    failed: list[int] = field(default_factory=list)
    """Numbers of the requests that failed, in the order in which they were sent."""
    statuses: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    async def load(self, number: int, concurrency: int, body: dict[str, Any]) -> None:
        """So many requests, each as soon as one before it has ended."""
        url = f"http://127.0.0.1:{self.gateway.port}{COMPLETIONS}"
        data, left = json.dumps(body).encode(), iter(range(number))

        async def ask() -> None:
            for which in left:
                asked_s = time.monotonic()
                async with self.client.post(url, data=data) as answer:
                    content = await answer.read()
                is_whole = answer.status == 200 and b'"error"' not in content
                self.statuses[answer.status] += 1
                self.latencies_s.append(time.monotonic() - asked_s)
                if not is_whole:
                    self.failed.append(which)

        async with asyncio.timeout(5 * DEADLINE_S):
            await asyncio.gather(*(ask() for _ in range(concurrency)))

    def is_avoided(self, number: int) -> bool:
        backends = self.gateway.backends
        return backends.avoids(backends.at(Address("127.0.0.1", self.ports[number])))

    async def until_used_again(self, numbers: Collection[int]) -> None:
        """These instances are well from now on: within 30 s each has requests again."""
        for number in numbers:
            self.mocks[number].seen = []
        well_s = time.monotonic()
        while not all(self.mocks[number].seen for number in numbers) or any(map(self.is_avoided, numbers)):
            await self.load(100, 50, BODY)
            assert time.monotonic() - well_s < 30


@asynccontextmanager
async def fleet(size: int, **settings: Any) -> AsyncIterator[Fleet]:
    """Instances of their own, the real scheduler in lite mode, which goes by load, and a gateway. Of instances that are
    equally free the scheduler takes the first by id: they are in that order."""
    async with AsyncExitStack() as stack:
        mocks = [Mock(interval_s=0.005) for _ in range(size)]
        by_port = {(await stack.enter_async_context(engine(mock)))[0]: mock for mock in mocks}
        ports = sorted(by_port, key=str)
        endpoints = {Address("127.0.0.1", port): InferType.NEUTRAL for port in ports}
        policy = load_policy("load-balance", Mode.LITE)
        scheduler = await serve(SchedulerConfig(policy, host="127.0.0.1", port=0, backend_endpoints=endpoints))
        stack.push_async_callback(scheduler.close)
        await until(lambda: len(scheduler.view) == size)
        defaults: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "metrics_port": 0,
            "scheduler_endpoints": (Address("127.0.0.1", scheduler.port),),
            "backend_endpoints": tuple(endpoints),
            "full_mode": False,
            "access_log": AccessLog.OFF,
        }
        gateway = await stack.enter_async_context(Gateway(Config(**defaults | settings)))
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Fleet(gateway, [by_port[port] for port in ports], ports, client)


BODY = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 4}


@pytest.mark.asyncio
async def test_while_all_instances_fail_they_get_little_more_than_what_comes() -> None:
    """Not three times as much, which each request would be worth."""
    async with cluster(num_engines=2, retry_budget=0.0, mock=Mock(status=500, seen=[])) as it:
        began_s = time.monotonic()
        replies = await asyncio.gather(*(it.post(COMPLETIONS, BODY) for _ in range(100)))
        took_s = time.monotonic() - began_s
        assert {(reply.status, reply.json["error"]["message"]) for reply in replies} == {(500, "mocked")}
        asked = [one for one in it.engines.seen or () if "X-Request-Id" in one["headers"]]
        assert 100 < len(asked) <= 111 + 10 * took_s
        text = (await it.get("/metrics")).content.decode()
        (refused,) = (line for line in text.splitlines() if line.startswith("request_retry_refused_total "))
        assert float(refused.split()[1]) >= 200 - len(asked)


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "num_bad"), [pytest.param(500, 3, marks=pytest.mark.full), (400, 1)])
async def test_instances_that_fail_at_once_take_no_requests_down_with_them(status: int, num_bad: int) -> None:
    """They are always the emptiest, and the first of these: three attempts at a request find the three."""
    bad = range(num_bad)
    async with fleet(100) as it:
        for number in bad:
            it.mocks[number].status = status
        await it.load(6000, 50, BODY)
        assert len(it.failed) <= 50, it.statuses
        assert max(it.failed, default=0) <= 1000
        assert all(map(it.is_avoided, bad))
        for number in bad:
            it.mocks[number].status = 200
        await it.until_used_again(bad)


@dataclass
class Mute(Mock):
    """Answers no completion, whosever it is. `steps`: its engine core's; None if it does not count them."""

    steps: Iterator[int] | None = None

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics" and self.steps is not None:
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {next(self.steps)}\n')
        if request.path == COMPLETIONS:
            if "X-Request-Id" in request.headers:
                self.waiting.append(request.headers["X-Request-Id"])
            await asyncio.sleep(3600)
        return await super().answer(request)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("steps", "stream", "is_silent"),
    [(None, False, False), (itertools.count(), False, False), (itertools.count(), True, False),
     (itertools.repeat(0), False, True), (itertools.repeat(0), True, True), (None, True, True)],
    ids=["one piece, uncounted", "one piece, computing", "prefill", "one piece, still", "streams, still", "uncounted"],
)  # fmt: skip
async def test_instance_is_silent_only_if_it_computes_nothing(
    steps: Iterator[int] | None, stream: bool, is_silent: bool
) -> None:
    """Others answer meanwhile."""
    mute = Mute(models=("mute",), steps=steps)
    async with AsyncExitStack() as stack:
        port, _, _ = await stack.enter_async_context(engine(mute))
        it = await stack.enter_async_context(cluster(num_engines=2, mock=Mock(interval_s=0.02), stall_s=0.4))
        backend = it.gateway.backends.at(Address("127.0.0.1", port))
        backends = it.gateway.backends
        await until(lambda: all(one.models for one in backends if one is not backend))
        async with asyncio.timeout(DEADLINE_S):
            while not backend.models:  # a round of questions that began before it was known does not ask it
                await backends.refresh()
        counters = backends._counters
        backends._counters = lambda one, _: counters(one, DEADLINE_S)  # type: ignore[method-assign]
        asked = [asyncio.create_task(it.post(COMPLETIONS, BODY | {"model": "mute", "stream": stream}))
                 for _ in range(4)]  # fmt: skip
        asked += [asyncio.create_task(it.post(COMPLETIONS, BODY | {"stream": True, "max_tokens": 2000}))
                  for _ in range(4)]  # fmt: skip
        await until(lambda: len(mute.waiting) == 4)
        outliers, probes = backends.outliers, 0
        stands_still = backends.stands_still

        async def counted(*args: Any, **kwargs: Any) -> bool:
            nonlocal probes
            found = await stands_still(*args, **kwargs)
            probes += 1
            return found

        backends.stands_still = counted  # type: ignore[method-assign]
        await until(lambda: outliers.is_out(backend) if is_silent else probes)
        await turns()
        assert outliers.is_out(backend) == is_silent
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: not it.gateway.upstream.calls)


@pytest.mark.asyncio
async def test_few_requests_wait_for_an_instance_that_accepts_them_and_never_answers() -> None:
    """Its API server is well. Round robin sends it one of a hundred until it is known to hang, seconds later."""
    async with fleet(100, scheduling_policy="round-robin", stall_s=1.0, engine_stall_s=2.0) as it:
        mute = it.mocks[0]
        mute.counters = "vllm:generation_tokens_total 7\n"
        mute.is_healthy_while_hung = True
        mute.hung.add(it.ports[0])
        await it.load(4000, 50, BODY)
        assert not it.failed, it.statuses
        assert 0 < len(mute.waiting) <= 20
        assert it.is_avoided(0)
        mute.hung.clear()
        await it.until_used_again([0])


@pytest.mark.asyncio
async def test_few_requests_go_to_an_instance_that_is_a_hundred_times_slower() -> None:
    """Also round robin, which does not look at load. Between its ejections it has some, for a trial."""
    async with fleet(100, scheduling_policy="round-robin") as it:
        slow = it.mocks[0]
        slow.interval_s, slow.seen = 100 * slow.interval_s, []
        await it.load(4000, 50, BODY | {"stream": True, "max_tokens": 12})
        assert not it.failed, it.statuses
        async with it.client.get(f"http://127.0.0.1:{it.gateway.metrics_port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        (ejections,) = (line for line in lines if line.startswith('gateway_ejections_total{cause="slowness"}'))
        assert float(ejections.split()[1]) >= 1
        assert len(slow.seen) <= 20
        slow.interval_s /= 100
        await it.until_used_again([0])
