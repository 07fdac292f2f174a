# SPDX-License-Identifier: Apache-2.0
"""The client's streams after a death: who goes on at once, who is tried, and who ends. Engines are sockets, and their
records of steps are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from vllm.v1.engine import FinishReason

from llumlet.contract.errors import LlumletError
from llumlet.contract.server import RunningServer, serve
from llumlet.contract.types import Reason
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import origin, owners, replay
from llumlet.protocol.recovery.suspects import TRIAL_TOKENS
from llumlet.protocol.wire import Health
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import FakeEngine, FakePeer, next_outputs, output, relayed, request, tokens_of, until
from tests.llumlet.fake_agent import FakeAgent
from vllm_llumnix.frontend import asgi, endings
from vllm_llumnix.frontend.liveness import LOOK_SECONDS
from vllm_llumnix.steps import step_record
from vllm_llumnix.steps.step_record import StepRecord
from vllm_llumnix.wire.request_wire import decode_state

pytestmark = pytest.mark.asyncio
RESCUER = "b" * 32
RAISED = Epoch(1, 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers here speak only when a test has them speak, on a machine that may stand still for seconds."""
    monkeypatch.setattr(owners, "SUSPECT_SECONDS", 30.0)
    monkeypatch.setattr(owners, "LOST_SECONDS", 30.0)
    monkeypatch.setattr(origin, "PROBE_SECONDS", 30.0)
    monkeypatch.setattr(replay, "CALL_SECONDS", 30.0)


@pytest.fixture(autouse=True)
def said() -> Iterator[dict[str, str]]:
    """What clients are to be told."""
    yield endings._endings
    endings._endings.clear()


class Rescuer:
    """The other engine: its llumlet, and its end of the relay. It has no record of its steps."""

    def __init__(self, agent: FakeAgent, server: RunningServer, new_peer: NewPeer) -> None:
        self.agent, self.server = agent, server
        agent.incarnation = RESCUER
        self.peer: FakePeer = new_peer(agent.instance_id, llumlet=str(server.address), incarnation=RESCUER)

    @property
    def adopted(self) -> dict[str, int]:
        """Ids of the requests that it was asked to adopt, in order, and for how many tokens on trial."""
        calls = self.agent.asked("adopt")
        return {decode_state(asked.request_state).request_id: asked.trial_tokens for asked in calls}

    async def dies(self) -> None:
        await self.server.stop(grace_s=0.0)


@pytest_asyncio.fixture
async def rescuer(new_peer: NewPeer) -> AsyncIterator[Rescuer]:
    agent = FakeAgent("rescuer")
    rescuer = Rescuer(agent, await serve(agent), new_peer)
    await rescuer.peer.hello()
    await rescuer.peer.heartbeat()  # has been answered: the origin knows it
    yield rescuer
    await rescuer.dies()


async def start(client: Any, engine: FakeEngine, *request_ids: str) -> None:
    """Each has one token."""
    for request_id in request_ids:
        await client.add_request_async(request(request_id, external_req_id=request_id))
        await engine.added()
    await engine.send(*(output(request_id, 10) for request_id in request_ids))
    await tokens_of(client, len(request_ids))


def in_step(record: StepRecord, *request_ids: str) -> None:
    record.begin(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(request_ids, 1)))


async def test_suspects_one_at_a_time_and_the_others_at_once(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord
) -> None:
    await start(client, engine, "a", "b", "other")
    await home.heartbeat()
    client.origin.core.suspects._most = lambda: 1
    in_step(record, "a", "b")
    client.origin.bury_home()
    await until(lambda: rescuer.adopted == {"a": TRIAL_TOKENS, "other": 0})
    await rescuer.peer.tokens(relayed("a", 1, *range(20, 20 + TRIAL_TOKENS - 1), epoch=RAISED, base=1))
    await tokens_of(client, TRIAL_TOKENS - 1)
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert "b" not in rescuer.adopted, "the former one has not survived enough"
    await rescuer.peer.tokens(relayed("a", TRIAL_TOKENS, 30, epoch=RAISED, base=1))
    await until(lambda: rescuer.adopted == {"a": TRIAL_TOKENS, "other": 0, "b": TRIAL_TOKENS})


async def test_tokens_count_that_come_before_the_answer(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord
) -> None:
    await start(client, engine, "a")
    await home.heartbeat()
    rescuer.agent.delays["adopt"] = 1.0
    in_step(record, "a")
    client.origin.bury_home()
    await until(lambda: "a" in rescuer.adopted)
    await rescuer.peer.tokens(relayed("a", 1, 20, epoch=RAISED, base=1))
    await tokens_of(client, 1)
    assert client.origin.core.streams.get("a").replaying, "no answer yet"
    await until(lambda: not client.origin.core.streams.get("a").replaying)
    assert client.origin.core.suspects.any_tried
    await rescuer.peer.tokens(relayed("a", 2, *range(30, 30 + TRIAL_TOKENS - 1), epoch=RAISED, base=1))
    await tokens_of(client, TRIAL_TOKENS - 1)
    assert not client.origin.core.suspects.any_tried


async def test_the_second_death_ends_it(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord, said: dict[str, str]
) -> None:
    await start(client, engine, "a", "other")
    await home.heartbeat()
    in_step(record, "a")
    client.origin.bury_home()
    await until(lambda: set(rescuer.adopted) == {"a", "other"})
    await rescuer.peer.tokens(*(relayed(name, 1, 20, epoch=RAISED, base=1) for name in ("a", "other")))
    await tokens_of(client, 2)
    await rescuer.dies()
    client.origin.core.owners.named("rescuer").last_heard -= 40.0
    last = (await next_outputs(client)).outputs[0]
    assert (last.request_id, last.finish_reason) == ("a", FinishReason.ERROR)
    assert "2 engines died or hung, one after the other (home, rescuer)" in said["a"]
    assert "other" in client.origin.core.streams, "it looks for an engine"
    assert client.origin.core.suspects.deaths("other") == []


async def test_second_death_ends_a_request_known_from_a_gateway(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord, said: dict[str, str]
) -> None:
    """A gateway has seen an instance die with it."""
    await home.heartbeat()
    token = asgi.num_deaths.set(1)
    await start(client, engine, "a")
    asgi.num_deaths.reset(token)
    await start(client, engine, "other")
    in_step(record, "a", "other")
    client.origin.bury_home()
    last = (await next_outputs(client)).outputs[0]
    assert (last.request_id, last.finish_reason) == ("a", FinishReason.ERROR)
    assert "2 engines died or hung, one after the other (unknown here, home)" in said["a"]
    await until(lambda: rescuer.adopted == {"other": 0})


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_before_the_engine_can_answer(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescuer: Rescuer,
    record: StepRecord,
    said: dict[str, str],
    how: str,
) -> None:
    """It hangs in its first step, or ends of an error there."""
    await start(client, engine, "a")
    await home.heartbeat()
    rescuer.agent.delays["adopt"] = 60.0
    in_step(record, "a")
    client.origin.bury_home()
    await until(lambda: "a" in rescuer.adopted)
    theirs = StepRecord(RESCUER, 8, 2)
    in_step(theirs, "a")
    if how == "hangs":
        await rescuer.peer.heartbeat(health=Health.HUNG)
    else:
        await rescuer.dies()
    assert (await next_outputs(client)).outputs[0].finish_reason == FinishReason.ERROR
    assert "(home, rescuer)" in said["a"]
    theirs.close()


async def test_a_refused_trial_is_no_death(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord
) -> None:
    """Another API server's suspect is on trial there."""
    await start(client, engine, "a")
    await home.heartbeat()
    rescuer.agent.failures["adopt"] = LlumletError(Reason.DESTINATION_BUSY, "another request is on trial here")
    in_step(record, "a")
    client.origin.bury_home()
    await until(lambda: len(rescuer.agent.asked("adopt")) > 1)
    del rescuer.agent.failures["adopt"]
    await until(lambda: not client.origin.core.streams.get("a").replaying)
    assert [engine.instance for engine in client.origin.core.suspects.deaths("a")] == ["home"]


@pytest.mark.parametrize("leaving", [False, True], ids=["idle", "on its way out"])
async def test_engines_that_nobody_has_killed(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord, leaving: bool
) -> None:
    await start(client, engine, "a")
    await home.heartbeat()
    if leaving:
        in_step(record, "a")
        record.leave()
    client.origin.bury_home()
    await until(lambda: rescuer.adopted == {"a": 0})


@pytest.mark.parametrize(
    ("health", "age_s", "tried"),
    [(Health.HUNG, 0.0, True), (Health.OK, 2.0, True), (Health.OK, -30.0, False)],
    ids=["its loop hangs", "it is silent, and stands still in a step", "it is silent, and gets on"],
)
async def test_an_owner_that_lives(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescuer: Rescuer,
    record: StepRecord,
    monkeypatch: pytest.MonkeyPatch,
    health: Health,
    age_s: float,
    tried: bool,
) -> None:
    """A step that does not end is as good as a death; an engine that gets on has only been cut off."""
    await start(client, engine, "a")
    await home.heartbeat(health=health)
    with monkeypatch.context() as patch:
        now = step_record.time.monotonic()
        patch.setattr(step_record.time, "monotonic", lambda: now - age_s)
        in_step(record, "a")
    if health is Health.OK:
        client.origin.core.owners.named("home").last_heard -= 40.0
    await until(lambda: rescuer.adopted == {"a": TRIAL_TOKENS if tried else 0})


async def test_nothing_is_kept_of_streams_that_end(
    client: Any, engine: FakeEngine, home: FakePeer, rescuer: Rescuer, record: StepRecord
) -> None:
    await start(client, engine, "a", "b")
    await home.heartbeat()
    client.origin.core.suspects._most = lambda: 1
    in_step(record, "a", "b")
    client.origin.bury_home()
    await until(lambda: set(rescuer.adopted) == {"a"})
    await client.abort_requests_async(["b"])
    await rescuer.peer.tokens(relayed("a", 1, 20, epoch=RAISED, base=1, finish=FinishReason.STOP))
    await until(lambda: not len(client.origin.core.suspects))
    await until(lambda: not client.origin.core.is_busy)
    assert set(rescuer.adopted) == {"a"}
