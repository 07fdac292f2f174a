# SPDX-License-Identifier: Apache-2.0
"""Streams whose owner is lost go on at another engine: a real llumlet server with a fake agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason

from llumlet.contract.errors import LlumletError
from llumlet.contract.server import serve
from llumlet.contract.types import AdoptRequest, Reason
from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import origin, owners, replay, streams
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import (
    DIGEST,
    FIRST_HOP,
    FakeEngine,
    FakePeer,
    next_outputs,
    output,
    relayed,
    request,
    tokens_of,
    until,
)
from tests.llumlet.fake_agent import FakeAgent
from vllm_llumnix.frontend import calls
from vllm_llumnix.frontend.liveness import LOOK_SECONDS
from vllm_llumnix.wire.request_wire import RequestState, decode_state

pytestmark = pytest.mark.asyncio
Health = wire.Health
RAISED = Epoch(1, 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers here speak only when a test has them speak; on a slow machine that may be too late for an engine that is
    to be sent requests, or for one at whose address nobody listens."""
    monkeypatch.setattr(owners, "SUSPECT_SECONDS", 30.0)
    monkeypatch.setattr(origin, "PROBE_SECONDS", 30.0)


@pytest_asyncio.fixture
async def rescuer() -> AsyncIterator[FakeAgent]:
    """An engine that adopts requests: what its llumlet was asked."""
    agent = FakeAgent("rescuer")
    server = await serve(agent)
    agent.address = str(server.address)  # type: ignore[attr-defined]
    yield agent
    await server.stop(grace_s=0.2)


@pytest_asyncio.fixture
async def rescue(new_peer: NewPeer, rescuer: FakeAgent) -> FakePeer:
    """The relay's end of `rescuer`."""
    peer = new_peer("rescuer", llumlet=rescuer.address)  # type: ignore[attr-defined]
    await peer.hello()
    await peer.heartbeat()  # has been answered: the origin knows it
    return peer


async def start(client: Any, engine: FakeEngine, *token_ids: int, **changes: Any) -> None:
    await client.add_request_async(request("r", **changes))
    await engine.added()
    for token_id in token_ids:
        await engine.send(output("r", token_id))
    assert await tokens_of(client, len(token_ids)) == list(token_ids)


async def adoption(agent: FakeAgent, number: int = 1) -> tuple[Epoch, RequestState]:
    """The `number`th call of Adopt: its epoch, and the request."""
    await until(lambda: len(agent.asked("adopt")) >= number)
    asked: AdoptRequest = agent.asked("adopt")[number - 1]
    assert asked.compatibility_digest == DIGEST
    return Epoch(asked.epoch.term, asked.epoch.hop), decode_state(asked.request_state)


async def test_a_hung_engine_loses_its_stream_to_another(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    await start(client, engine, 10, 11, sampling_params=SamplingParams(max_tokens=7, seed=3, temperature=0.5))
    await home.heartbeat(health=Health.SUSPECT)
    await asyncio.sleep(0.5)
    assert rescuer.asked("adopt") == [], "a suspect is only watched"
    await home.heartbeat(health=Health.HUNG)
    epoch, state = await adoption(rescuer)
    assert epoch == RAISED
    assert (state.prompt_token_ids, state.output_token_ids) == ([1, 2, 3], [10, 11])
    assert state.origin == client.relay_address
    assert b"seed" in bytes(state.sampling_params)
    assert rescuer.asked("adopt")[0].holder.address == home.llumlet, "the KV cache may still be there"
    assert await home.answer() == wire.Dismissal([("r", Epoch(0, 0))]), "who wakes up learns that it counts no more"
    # The late tokens of the old owner are nobody's.
    await engine.send(output("r", 12))
    await rescue.tokens(relayed("r", 2, 20, epoch=RAISED, base=2))
    await engine.send(output("r", 13, finish=FinishReason.LENGTH))
    await rescue.tokens(relayed("r", 3, 21, epoch=RAISED, base=2, finish=FinishReason.STOP))
    assert await tokens_of(client, 2) == [20, 21]
    assert await rescue.heartbeat("r", epoch=RAISED) == ["r"], "the stream has ended"


async def test_a_request_that_makes_every_engine_hang_does_not_wander(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second hang has to last longer."""
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.3)
    await start(client, engine, 10)
    await home.heartbeat(health=Health.HUNG)
    await adoption(rescuer)
    assert await home.answer() == wire.Dismissal([("r", Epoch(0, 0))])
    for _ in range(3):
        await rescue.heartbeat("r", epoch=RAISED, health=Health.HUNG)
        await asyncio.sleep(0.2)
    assert len(rescuer.asked("adopt")) == 1
    await home.heartbeat()
    await asyncio.sleep(0.7)
    assert await rescue.answer() == wire.Dismissal([("r", RAISED)])


async def test_each_attempt_has_an_epoch_of_its_own(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """The first attempt may have succeeded although its answer was an error."""
    await start(client, engine, 10)
    rescuer.failures["adopt"] = LlumletError(Reason.HANDOVER_OPEN, "still here")
    await home.heartbeat(health=Health.HUNG)
    assert (await adoption(rescuer))[0] == Epoch(1, 0)
    del rescuer.failures["adopt"]
    epoch, _ = await adoption(rescuer, 2)
    assert epoch == Epoch(2, 0)
    await rescue.tokens(relayed("r", 1, 66, epoch=Epoch(1, 0), base=1))
    assert await rescue.answer() == wire.Dismissal([("r", Epoch(1, 0))])
    await rescue.tokens(relayed("r", 1, 20, epoch=epoch, base=1))
    assert await tokens_of(client, 1) == [20]


def num_replays() -> float:
    return REGISTRY.get_sample_value("llumlet_replays_total", {"model_name": "model"}) or 0.0


async def test_a_destination_that_is_never_heard_of(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source says whom it handed the request to; nobody listens there."""
    monkeypatch.setattr(origin, "PROBE_SECONDS", 0.5)
    await start(client, engine, 10, 11)
    before = num_replays()
    await home.send(wire.HandedOver("r", FIRST_HOP, "gone", "1", "127.0.0.1:3"))
    epoch, state = await adoption(rescuer)
    assert (epoch, state.output_token_ids) == (RAISED, [10, 11])
    await until(lambda: num_replays() == before + 1)


async def test_a_request_sent_after_a_hang_was_reported(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """The engine may have woken up since: only a heartbeat that is later than the request counts."""
    await home.heartbeat(health=Health.HUNG)
    await start(client, engine, 10)
    await rescue.heartbeat()
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert rescuer.asked("adopt") == []
    await home.heartbeat(health=Health.HUNG)
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]
    assert rescuer.asked("adopt")[0].holder.address == home.llumlet


async def test_an_owner_that_does_not_claim_the_request(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "CONFIRM_SECONDS", 2.0)
    await start(client, engine, 10)
    await home.send(wire.HandedOver("r", FIRST_HOP, "rescuer", "1", rescue.llumlet))
    for _ in range(24):
        assert await rescue.heartbeat("r") == []
        await asyncio.sleep(0.1)
    assert rescuer.asked("adopt") == []
    while not rescuer.asked("adopt"):
        # Not waited for: the answer to the last one may be that the request is to be released.
        await rescue.send(wire.Heartbeat("rescuer", "1", Health.OK, []))
        await asyncio.sleep(0.05)
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]


async def test_tokens_that_are_missing_are_produced_again(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "GAP_SECONDS", 0.3)
    await start(client, engine, 10)
    await rescue.tokens(relayed("r", 5, 15, base=5))
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]


async def test_the_last_tokens_of_the_source_are_repeated_by_the_destination(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """Tokens 11 and 12 died inside the source; what comes of them late counts no more."""
    await start(client, engine, 10)
    await rescue.tokens(relayed("r", 0, 10, 11, 12, base=3), relayed("r", 3, 13, base=3))
    assert await tokens_of(client, 3) == [11, 12, 13]
    await engine.send(output("r", 11, 12))
    await rescue.tokens(relayed("r", 4, 14, base=3))
    assert await tokens_of(client, 1) == [14]
    assert rescuer.asked("adopt") == []


async def test_an_abort_that_nobody_asked_for(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    await start(client, engine, 10)
    await engine.send(output("r", finish=FinishReason.ABORT))
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]
    await rescue.tokens(relayed("r", 1, 20, epoch=RAISED, base=1))
    await rescue.tokens(relayed("r", 2, epoch=RAISED, base=1, finish=FinishReason.ABORT))
    epoch, state = await adoption(rescuer, 2)
    assert epoch > RAISED
    assert state.output_token_ids == [10, 20]


async def test_an_engine_that_gives_the_request_up_before_it_has_answered(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """It has taken it, and shuts down: what it says on the relay overtakes its answer."""
    await start(client, engine, 10)
    rescuer.delays["adopt"] = 5.0
    await engine.send(output("r", finish=FinishReason.ABORT))
    await adoption(rescuer)
    given_up = rescuer.given_up
    rescuer.delays.clear()
    await rescue.tokens(relayed("r", 1, 20, epoch=RAISED, base=1))
    await rescue.tokens(relayed("r", 2, epoch=RAISED, base=1, finish=FinishReason.ABORT))
    epoch, state = await adoption(rescuer, 2)
    assert epoch > RAISED
    assert state.output_token_ids == [10, 20]
    await until(given_up.is_set)
    await until(lambda: not client.origin.core.is_busy)
    assert client.origin.core.num_replayed == 1


async def test_a_destination_that_shuts_down_before_its_first_token(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """Its unasked end is the first word under its epoch, before the source has said that it handed the request over."""
    await start(client, engine, 10)
    await rescue.tokens(relayed("r", 1, base=1, finish=FinishReason.ABORT))
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]


async def test_an_abort_by_a_pause_reaches_the_client(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    await start(client, engine, 10)
    with client.origin.expecting_aborts("abort"):
        await engine.send(output("r", finish=FinishReason.ABORT))
        assert (await next_outputs(client)).outputs[0].finish_reason == FinishReason.ABORT
    assert rescuer.asked("adopt") == []


async def test_a_peer_that_was_cut_off_for_long_is_asked_again(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """It has taken this API server for dead, and sends it no heartbeats until it has a request of it again."""
    client.origin.peers._named = (rescue.llumlet,)
    await start(client, engine, 10)
    await rescue.heartbeat()
    client.origin.core.owners.named("rescuer").last_heard -= 35.0
    assert client.origin.core.targets(None) == [home.llumlet], "it may be stopped"
    client.origin.core.owners.named("rescuer").last_heard -= 15.0
    client.origin.bury_home()
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]


async def test_a_peer_that_has_parted_is_neither_lost_nor_watched(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """It has had nothing of this API server's for a while. Its silence says nothing."""
    await start(client, engine, 10)
    await rescue.heartbeat()
    await rescue.send(wire.Parting("rescuer", "1"))
    await until(lambda: client.origin.core.owners.named("rescuer").parted)
    client.origin.core.owners.named("rescuer").last_heard -= 20.0
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert rescuer.calls == [], "nobody asks it whether it is there"
    await home.send(wire.HandedOver("r", FIRST_HOP, "rescuer", "1", rescue.llumlet))
    await home.heartbeat()
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert rescuer.asked("adopt") == [], "it has just been given the request"
    client.origin.core.owners.named("rescuer").parted = True
    assert rescue.llumlet in client.origin.core.targets(None)


async def test_an_engine_that_hung_takes_its_request_back(
    client: Any, engine: FakeEngine, new_peer: NewPeer, rescuer: FakeAgent
) -> None:
    """Where it was looked for meanwhile, nobody is."""
    home = new_peer("home", llumlet=rescuer.address)  # type: ignore[attr-defined]
    await home.hello()
    client.origin.peers._named = ("127.0.0.1:3",)
    await start(client, engine, 10)
    await home.heartbeat(health=Health.HUNG)
    await until(lambda: client.origin.core.is_busy)
    assert await home.answer() == wire.Dismissal([("r", Epoch(0, 0))])
    assert rescuer.asked("adopt") == []
    await home.heartbeat()
    epoch, state = await adoption(rescuer)
    assert epoch > RAISED
    assert state.output_token_ids == [10]


async def test_without_another_engine_a_stopped_one_keeps_its_stream(
    client: Any, engine: FakeEngine, home: FakePeer
) -> None:
    """It may wake up: nothing is barred that nobody could replace."""
    await start(client, engine, 10)
    await home.heartbeat(health=Health.HUNG)
    await asyncio.sleep(0.6)
    await engine.send(output("r", 11))
    assert await tokens_of(client, 1) == [11]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
        {"sampling_params": SamplingParams(extra_args={"ec_transfer_params": {"x": 1}})},
        {"sampling_params": SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})},
    ],
    ids=["prompt logprobs", "encoder cache", "to be fetched"],
)
async def test_lost_engine_ends_unreplayable_request_with_error(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent, changes: dict[str, Any]
) -> None:
    await start(client, engine, **changes)
    client.origin.bury_home()
    last = await next_outputs(client)
    assert last.outputs[0].finish_reason == FinishReason.ERROR
    assert rescuer.asked("adopt") == []


async def test_an_engine_that_dies_before_its_first_word(client: Any, engine: FakeEngine, rescue: FakePeer) -> None:
    """It says hello when the first request comes, and nothing else tells where that one could go on."""
    await start(client, engine)
    client.origin.bury_home()
    last = await next_outputs(client)
    assert last.outputs[0].finish_reason == FinishReason.ERROR
    await until(lambda: not client._finalizer.alive)


async def test_the_client_leaves_while_its_request_looks_for_an_engine(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    await start(client, engine, 10)
    rescuer.delays["adopt"] = 0.5
    client.origin.bury_home()
    await adoption(rescuer)
    await client.abort_requests_async(["r"])
    await until(lambda: "abort" in rescuer.completed)
    assert rescuer.asked("abort")[0].request_ids == ["r"]


@pytest.mark.parametrize("sign", ["silence", "hang"])
async def test_abandoned_engine_is_told(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    sign: str,
) -> None:
    """Both ways: its call is cancelled, and its epoch released on the relay."""
    monkeypatch.setattr(replay, "CALL_SECONDS", 0.5 if sign == "silence" else 30.0)
    await start(client, engine, 10)
    rescuer.delays["adopt"] = 30.0
    client.origin.bury_home()
    epoch, _ = await adoption(rescuer)
    given_up = rescuer.given_up
    rescuer.delays.clear()
    if sign == "hang":
        await rescue.heartbeat("r", epoch=epoch, health=Health.HUNG)
    assert await rescue.answer() == wire.Dismissal([("r", epoch)])
    await until(given_up.is_set)
    await rescue.send(wire.Heartbeat("rescuer", "1", Health.OK, []))
    later, _ = await adoption(rescuer, 2)
    assert later > epoch


async def test_a_call_that_cannot_be_made_is_made_again(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was wrong with it."""
    await start(client, engine, 10)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "state_of", lambda *_: 1 / 0)
        client.origin.bury_home()
        await until(lambda: client.origin.core.replays["r"].attempt > 1)
    _, state = await adoption(rescuer)
    assert state.output_token_ids == [10]


async def test_slow_engine_keeps_its_attempt(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling a grammar, say: it takes longer than an engine may be silent."""
    monkeypatch.setattr(replay, "CALL_SECONDS", 30.0)
    await start(client, engine, 10)
    rescuer.delays["adopt"] = 1.5
    client.origin.bury_home()
    epoch, _ = await adoption(rescuer)
    client.origin.core.replays["r"]._asked_at -= 40.0
    while "adopt" not in rescuer.completed:
        assert await rescue.heartbeat("r", epoch=epoch) == []
        await asyncio.sleep(0.1)
    await until(lambda: client.origin.core.num_replayed == 1)
    assert len(rescuer.asked("adopt")) == 1
    await rescue.tokens(relayed("r", 1, 20, epoch=epoch, base=1))
    assert await tokens_of(client, 1) == [20]


async def test_a_client_that_stands_still_takes_nobody_for_dead(
    client: Any,
    engine: FakeEngine,
    home: FakePeer,
    rescue: FakePeer,
    rescuer: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process was stopped, or starved: it has heard nobody."""
    monkeypatch.setattr(owners, "LOST_SECONDS", 1.0)
    await start(client, engine, 10)
    time.sleep(2.5)  # noqa: ASYNC251 - nothing of this process runs
    for _ in range(4):
        await asyncio.sleep(LOOK_SECONDS)
        await home.heartbeat()
    assert rescuer.asked("adopt") == []
    await adoption(rescuer)  # it is silent from here on


async def test_the_engines_own_farewell_ends_no_stream(
    client: Any, engine: FakeEngine, home: FakePeer, rescue: FakePeer, rescuer: FakeAgent
) -> None:
    """vLLM's engine says that it is dying; its client would end every stream on hearing that."""
    await start(client, engine, 10)
    await engine.farewell()
    await adoption(rescuer)
    await rescue.tokens(relayed("r", 1, 20, epoch=RAISED, base=1))
    assert await tokens_of(client, 1) == [20]
    assert client.resources.engine_dead
