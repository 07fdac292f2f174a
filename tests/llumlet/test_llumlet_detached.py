# SPDX-License-Identifier: Apache-2.0
"""What was begun goes on when the one who asked for it has left."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError, LlumletUnreachable
from llumlet.contract.server import RunningServer, serve
from llumlet.contract.types import MovePhase, Reason
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent, until

pytestmark = pytest.mark.asyncio


async def test_moves_go_on_when_the_caller_leaves_the_stream(client: LlumletClient, agent: FakeAgent) -> None:
    agent.go.clear()
    async with aclosing(client.migrate(messages.migrate(request_ids=["r-1", "r-2"]))) as events:
        async for event in events:
            if event.progress.phase == MovePhase.COPYING:
                break
    agent.go.set()
    await until(lambda: agent.moved == ["r-1", "r-2"])
    assert agent.completed == ["migrate"]


async def test_moves_go_on_when_the_caller_vanishes(
    server: RunningServer, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent.go.clear()
    client = LlumletClient(server.address)

    async def watch() -> None:
        async for _ in client.migrate(messages.migrate()):
            pass

    watching = asyncio.create_task(watch())
    await agent.copying.wait()
    await client.close()
    with pytest.raises((asyncio.CancelledError, LlumletUnreachable)):
        await watching
    await until(lambda: "the caller of llumlet Migrate left" in caplog.text)
    assert agent.moved == []
    agent.go.set()
    await until(lambda: agent.completed == ["migrate"])
    assert agent.moved == ["cmpl-7-0a1b2c3d"]


async def test_moves_go_on_when_the_deadline_of_the_stream_passes(client: LlumletClient, agent: FakeAgent) -> None:
    agent.go.clear()
    phases = []

    async def watch() -> None:
        async for event in client.migrate(messages.migrate(), deadline_s=3.0):
            phases.append(event.progress.phase)

    with pytest.raises(LlumletUnreachable) as caught:
        await watch()
    assert caught.value.timed_out
    assert phases == [MovePhase.SELECTED, MovePhase.COPYING]
    agent.go.set()
    await until(lambda: agent.moved == ["cmpl-7-0a1b2c3d"])


async def test_a_commit_is_not_cut_by_the_sources_deadline(client: LlumletClient, agent: FakeAgent) -> None:
    agent.gates["commit"] = gate = asyncio.Event()
    with pytest.raises(LlumletUnreachable):
        await client.commit(messages.commit(), deadline_s=2.0)
    assert agent.asked("commit")
    assert agent.completed == []
    gate.set()
    await until(lambda: agent.completed == ["commit"])


async def test_a_failure_that_nobody_waits_for_is_logged(
    client: LlumletClient, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gate = asyncio.Event()
    agent.gates = {"commit": gate, "reserve": gate}
    agent.failures = {
        "commit": ZeroDivisionError("oops"),
        "reserve": LlumletError(Reason.DESTINATION_FULL, "no"),
    }
    with pytest.raises(LlumletUnreachable):
        await client.commit(messages.commit(), deadline_s=2.0)
    with pytest.raises(LlumletUnreachable):
        await client.reserve(messages.reserve(), deadline_s=2.0)
    await until(lambda: caplog.text.count("the caller of llumlet") == 2)
    gate.set()
    await until(lambda: "llumlet Commit, whose caller had left, failed" in caplog.text)
    await until(lambda: "was refused: destination_full" in caplog.text)


async def test_stopping_the_server_cancels_what_does_not_end_in_time() -> None:
    agent = FakeAgent()
    agent.go.clear()
    async with await serve(agent) as server, LlumletClient(server.address) as client:

        async def watch() -> None:
            async for _ in client.migrate(messages.migrate()):
                pass

        watching = asyncio.create_task(watch())
        await agent.copying.wait()
        await server.stop(grace_s=0.1)
        with pytest.raises(LlumletError) as caught:
            await watching
        assert caught.value.reason == Reason.SHUTTING_DOWN
        assert agent.completed == []


async def test_stopping_the_server_waits_for_what_ends_in_time() -> None:
    agent = FakeAgent()
    agent.delays["commit"] = 0.2
    async with await serve(agent) as server, LlumletClient(server.address) as client:
        committing = asyncio.create_task(client.commit(messages.commit()))
        await until(lambda: agent.asked("commit"))
        await server.stop(grace_s=2.0)
        await committing
        with pytest.raises(LlumletUnreachable):
            await client.get_instance_status()
        assert agent.completed == ["commit"]


async def test_a_slow_reader_loses_no_event(client: LlumletClient, agent: FakeAgent) -> None:
    ids = [f"r-{number}" for number in range(200)]
    events = []
    async for event in client.migrate(messages.migrate(request_ids=ids)):
        if len(events) % 50 == 0:
            await asyncio.sleep(0.02)
        events.append(event)
    assert len(events) == 3 * len(ids) + 1
    assert events[-1].summary.moved == len(ids)


@pytest.mark.parametrize("how", ["leaves", "deadline"])
async def test_adopting_agent_learns_that_its_caller_left(client: LlumletClient, agent: FakeAgent, how: str) -> None:
    agent.delays["adopt"] = 30.0
    adopting = asyncio.create_task(client.adopt(messages.adopt(), deadline_s=0.5 if how == "deadline" else 30.0))
    await until(lambda: agent.asked("adopt"))
    assert not agent.given_up.is_set()
    if how == "leaves":
        adopting.cancel()
    with pytest.raises((asyncio.CancelledError, LlumletUnreachable)):
        await adopting
    await until(agent.given_up.is_set)
