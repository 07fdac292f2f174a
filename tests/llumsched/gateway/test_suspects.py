# SPDX-License-Identifier: Apache-2.0
"""A request that ends its instances ends two of them, whatever else was there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llumlet.contract.attempt_header import ATTEMPT_HEADER
from llumlet.process.addresses import Address
from llumlet.protocol.recovery.suspects import TRIAL_TOKENS
from llumsched.gateway import suspects
from llumsched.gateway.config import AccessLog, Config
from llumsched.gateway.server import Gateway
from llumsched.gateway.suspects import Case, Trials
from tests.llumsched.gateway.support import DEADLINE_S, engine, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
POISON = 666


@dataclass
class Mortal(Mock):
    """Dies of a poisoned prompt, some tokens into its answer, with all that it has."""

    tokens_before: int = 1
    end: Any = None
    attempts: list[str] = field(default_factory=list)
    """Headers of the poisoned requests that came."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == COMPLETIONS and POISON in json.loads(await request.read())["prompt"]:
            self.attempts.append(request.headers.get(ATTEMPT_HEADER, ""))
            asyncio.get_running_loop().call_later(self.interval_s * self.tokens_before, self.end)
        return await super().answer(request)


@dataclass
class Mortals:
    gateway: Gateway
    mocks: list[Mortal]
    dead: list[int]
    client: aiohttp.ClientSession

    async def post(self, body: dict[str, Any], **headers: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.gateway.port}{COMPLETIONS}"
        async with asyncio.timeout(DEADLINE_S), self.client.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def mortals(size: int, **settings: Any) -> AsyncIterator[Mortals]:
    async with AsyncExitStack() as stack:
        mocks, ports, dead = [Mortal(interval_s=0.02) for _ in range(size)], [], list[int]()
        for number, mock in enumerate(mocks):
            port, server, listener = await stack.enter_async_context(engine(mock))
            ports.append(port)

            def end(number: int = number, server: Any = server, listener: Any = listener) -> None:
                dead.append(number)
                listener.close()
                for connection in list(server.connections):
                    connection.force_close()

            mock.end = end
        defaults: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "scheduling_policy": "round-robin"}
        defaults |= {"backend_endpoints": tuple(Address("127.0.0.1", port) for port in ports)}
        defaults |= {"access_log": AccessLog.OFF, "retry_max_count": 9}
        gateway = await stack.enter_async_context(Gateway(Config(**defaults | settings)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Mortals(gateway, mocks, dead, client)


def body(*prompt: int, stream: bool, max_tokens: int = 40) -> dict[str, Any]:
    return {"model": "mock", "prompt": list(prompt), "max_tokens": max_tokens, "stream": stream}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_poisoned_request_ends_two_of_six_instances_and_all_others_end_well(stream: bool) -> None:
    async with mortals(6) as it:
        others = [asyncio.create_task(it.post(body(number, stream=True))) for number in range(30)]
        await until(lambda: sum(len(mock.answering) for mock in it.mocks) == 30)
        status, text = await it.post(body(POISON, stream=stream))
        assert status == (200 if stream else 502)
        assert "died while they had this request: it ends here." in text
        assert len(it.dead) == 2
        for status, text in await asyncio.gather(*others):
            assert status == 200
            assert '"error"' not in text
            assert text.endswith("data: [DONE]\n\n")
        attempts = [attempt for mock in it.mocks for attempt in mock.attempts]
        assert sorted(attempts) == ["", "2"]


@pytest.mark.asyncio
async def test_streams_of_a_dead_instance_go_on_at_the_only_one_that_is_left() -> None:
    """Three on trial there. The gateway still knows instances that are gone, and sends each again only twice."""
    async with mortals(5, retry_max_count=2) as it:
        for mock in it.mocks:
            mock.interval_s = 0.1  # long enough on trial for others to come
        for mock in it.mocks[:3]:
            mock.end()
        streams = [asyncio.create_task(it.post(body(number, stream=True, max_tokens=12))) for number in range(6)]
        await until(lambda: sum(len(mock.answering) for mock in it.mocks) == 6)
        assert [len(mock.answering) for mock in it.mocks] == [0, 0, 0, 3, 3]
        it.mocks[3].end()
        for status, text in await asyncio.gather(*streams):
            assert status == 200
            assert text.endswith("data: [DONE]\n\n")
            assert '"error"' not in text


@pytest.mark.asyncio
async def test_unreachable_instance_is_no_attempt() -> None:
    """Five of six are gone before the gateway knows, and it sends a request again only twice."""
    async with mortals(6, retry_max_count=2) as it:
        for mock in it.mocks:
            mock.seen = []
        await it.post(body(1, stream=False, max_tokens=1))
        for mock in it.mocks:
            if not mock.seen:  # whose turn comes before that of the one that has answered
                mock.end()
        assert len(it.dead) == 5
        status, text = await it.post(body(2, stream=False, max_tokens=1))
        assert status == 200, text


@pytest.mark.asyncio
async def test_two_on_trial_are_at_two_instances_whosever_turn_it_is() -> None:
    async with mortals(4) as it, asyncio.TaskGroup() as asking:
        for mock in it.mocks:
            mock.interval_s = suspects.TRIAL_S  # all that come stay, those on trial are on trial
        asked: list[asyncio.Task[tuple[int, str]]] = []

        async def ask(number: int) -> Mortal:
            """The instance at which it is."""
            before = [len(mock.answering) for mock in it.mocks]
            asked.append(asking.create_task(it.post(body(number, stream=True))))
            await until(lambda: [len(mock.answering) for mock in it.mocks] != before)
            return next(mock for mock, num in zip(it.mocks, before, strict=True) if len(mock.answering) > num)

        first = await ask(1)
        first.end()
        await until(lambda: any(mock.answering for mock in it.mocks if mock is not first))
        second = next(mock for mock in it.mocks if mock is not first and mock.answering)
        third, fourth = await ask(2), await ask(3)
        assert second not in (third, fourth)  # so its turn is the next
        third.end()
        await until(lambda: sum(len(mock.answering) for mock in (second, fourth)) == 3)
        assert (len(second.answering), len(fourth.answering)) == (1, 2)
        for task in asked:
            task.cancel()


@pytest.mark.asyncio
async def test_a_client_cannot_say_which_attempt_it_is() -> None:
    async with mortals(1) as it:
        it.mocks[0].seen = []
        await it.post(body(1, stream=False), **{ATTEMPT_HEADER: "7"})
        assert ATTEMPT_HEADER not in it.mocks[0].seen[0]["headers"]


@pytest.mark.asyncio
async def test_errors_of_an_instance_that_lives_are_no_deaths() -> None:
    async with mortals(3) as it:
        for mock in it.mocks:
            mock.status = 500
        status, text = await it.post(body(1, stream=False))
        assert (status, json.loads(text)["error"]["message"]) == (500, "mocked")


@pytest.mark.asyncio
async def test_an_attempt_that_fails_otherwise_ends_the_trial_too() -> None:
    async with mortals(4) as it:
        asked = asyncio.create_task(it.post(body(POISON, stream=False)))
        await until(lambda: it.dead or any(mock.attempts for mock in it.mocks))
        for mock in it.mocks:
            if not mock.attempts:
                mock.status, mock.end = 500, lambda: None
        status, _ = await asked
        assert (status, len(it.dead)) == (500, 1)
        assert sorted(attempt for mock in it.mocks for attempt in mock.attempts) == ["", "2", "2"]
        assert not it.gateway.services.trials.instances


def cases_of(number: int, trials: Trials[str]) -> list[Case[str]]:
    """Suspects: each was at an instance of its own that died."""
    cases = [Case[str](str(each)) for each in range(number)]
    for case in cases:
        trials.lost(case, f"dead with {case.request_id}")
    return cases


@pytest.mark.asyncio
async def test_instance_has_one_request_on_trial_at_a_time() -> None:
    trials: Trials[str] = Trials(lambda: 2)
    cases = cases_of(4, trials)
    order: list[int] = []

    async def go(number: int) -> None:
        await trials.turn(cases[number])
        trials.begin(cases[number], min({"a", "b"} - trials.instances))
        order.append(number)

    going = [asyncio.create_task(go(number)) for number in range(4)]
    await until(lambda: len(order) == 2)
    assert trials.instances == {"a", "b"}
    for _ in range(TRIAL_TOKENS):
        trials.got_part(cases[0])
    await until(lambda: len(order) == 3)
    trials.lost(cases[1], "b")
    assert cases[1].is_guilty
    await asyncio.gather(*going)
    assert order == [0, 1, 2, 3]
    for case in cases:
        trials.forget(case)
    assert not trials.instances
    assert not len(trials._suspects)


@pytest.mark.asyncio
async def test_request_beside_one_on_trial_is_not_suspected() -> None:
    trials: Trials[str] = Trials(lambda: 2)
    (case,) = cases_of(1, trials)
    beside = Case[str]("beside")
    await trials.turn(case)
    trials.begin(case, "a")
    trials.lost(beside, "a")
    trials.lost(case, "a")
    assert (beside.deaths, beside.is_guilty, case.is_guilty) == ([], False, True)
    trials.forget(beside)
    trials.forget(case)
    assert not len(trials._suspects)


@pytest.mark.asyncio
async def test_request_that_leaves_before_or_with_its_turn_keeps_no_other_waiting() -> None:
    trials: Trials[str] = Trials(lambda: 1)
    first, second, third, last = cases_of(4, trials)
    await trials.turn(first)
    waiting = {case: asyncio.create_task(trials.turn(case)) for case in (second, third, last)}
    await asyncio.sleep(0)
    waiting[second].cancel()
    await asyncio.gather(waiting[second], return_exceptions=True)
    trials.forget(second)
    trials.end(first)  # the turn of the third, which leaves before it knows
    waiting[third].cancel()
    await asyncio.gather(waiting[third], return_exceptions=True)
    trials.forget(third)
    await asyncio.wait_for(waiting[last], suspects.TRIAL_S / 2)
    trials.forget(last)


@pytest.mark.asyncio
async def test_suspects_do_not_wait_where_no_instance_is_left() -> None:
    trials: Trials[str] = Trials(lambda: 0)
    first, second = cases_of(2, trials)
    async with asyncio.timeout(suspects.TRIAL_S / 2):
        await trials.turn(first)
        trials.end(first)
        await trials.turn(second)
    trials.end(second)


@pytest.mark.asyncio
async def test_suspect_whose_turn_does_not_come_goes_on_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that instance dies, either may be to blame: it takes a third death."""
    monkeypatch.setattr(suspects, "TRIAL_S", 0.2)
    trials: Trials[str] = Trials(lambda: 1)
    one, other = cases_of(2, trials)
    for case in (one, other):
        await trials.turn(case)
        trials.begin(case, "a")
        assert case.timer is not None
        case.timer.cancel()  # a trial that takes longer than the other one waits
    trials.lost(one, "a")
    assert not one.is_guilty
    trials.end(other)
    await trials.turn(one)
    trials.begin(one, "b")
    trials.lost(one, "b")
    assert one.is_guilty


@pytest.mark.asyncio
async def test_trial_ends_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "TRIAL_S", 0.01)
    trials: Trials[str] = Trials(lambda: 1)
    (case,) = cases_of(1, trials)
    await trials.turn(case)
    trials.begin(case, "a")
    await until(lambda: not trials.instances)
    trials.lost(case, "a")
    assert not case.is_guilty
