# SPDX-License-Identifier: Apache-2.0
"""What an origin says to other engines' llumlets, and what it hears of them: real servers with fake agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from vllm.lora.request import LoRARequest

from llumlet.contract.block_hashes import HASH_BYTES, adapter_mask, chain, root_of
from llumlet.contract.server import RunningServer, serve
from llumlet.process.credentials import NONE, CredentialFiles, Credentials
from llumlet.protocol.errors import Reason
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import replay_words as words
from tests.frontend.fakes import request, until
from tests.llumlet.fake_agent import FakeAgent
from tests.support.authority import token_file
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.frontend.calls import MOST_COMPARING, Calls
from vllm_llumnix.frontend.origin import ClientStream
from vllm_llumnix.wire.addresses import Reach
from vllm_llumnix.wire.peer_clients import PeerClients
from vllm_llumnix.wire.request_wire import decode_state

pytestmark = pytest.mark.asyncio
RELAY = "tcp://127.0.0.1:7001"
SIZE = 16


class Caller:
    """`Calls`, and what it was answered."""

    def __init__(self, credentials: Credentials = NONE) -> None:
        self.clients = PeerClients(credentials, Reach(anywhere=False))
        cache: Any = SimpleNamespace(block_size=SIZE)
        self.calls = Calls(self.clients, credentials, lambda: RELAY, Adapters(None), cache, self._answered)
        self._answers: asyncio.Queue[tuple[str, int, words.ReplayEvent]] = asyncio.Queue()

    def _answered(self, request_id: str, attempt: int, event: words.ReplayEvent) -> None:
        self._answers.put_nowait((request_id, attempt, event))

    async def identify(self, address: str, seconds: float = 10.0) -> words.ReplayEvent:
        self.calls.identify(words.Identify("r", 3, address, seconds))
        return await self.answer()

    async def answer(self) -> words.ReplayEvent:
        """To the attempt that every call here belongs to."""
        request_id, attempt, event = await asyncio.wait_for(self._answers.get(), 30.0)
        assert (request_id, attempt) == ("r", 3)
        return event

    @property
    def num_answers(self) -> int:
        return self._answers.qsize()


@pytest_asyncio.fixture
async def caller() -> AsyncIterator[Caller]:
    caller = Caller()
    yield caller
    await caller.clients.close()


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent("there")


@pytest_asyncio.fixture
async def server(agent: FakeAgent) -> AsyncIterator[RunningServer]:
    running = await serve(agent)
    yield running
    await running.stop(grace_s=0.0)


def adopt(address: str, seconds: float = 10.0) -> tuple[words.Adopt, ClientStream]:
    stream = ClientStream(request("r"), "home")
    effect = words.Adopt(
        stream=stream,
        attempt=3,
        address=address,
        epoch=Epoch(1, 0),
        delivered=[10, 11],
        digest="d",
        weight_version="",
        trial_tokens=0,
        holder=None,
        seconds=seconds,
    )
    return effect, stream


async def test_identity_of_the_listener_is_told(caller: Caller, server: RunningServer) -> None:
    assert await caller.identify(str(server.address)) == words.Identified("there", "i-1")


async def test_the_credentials_are_shown(agent: FakeAgent, tmp_path: Path) -> None:
    credentials = Credentials.load(CredentialFiles(token_file=str(token_file(tmp_path))))
    member, stranger = Caller(credentials), Caller()
    async with await serve(agent, credentials=credentials) as server:
        assert await member.identify(str(server.address)) == words.Identified("there", "i-1")
        refusal = await stranger.identify(str(server.address))
        assert isinstance(refusal, words.AdoptRefused)
        assert refusal.reason is Reason.UNAUTHENTICATED
        await member.clients.close()
        await stranger.clients.close()


async def test_the_next_engine_at_the_same_address(caller: Caller, server: RunningServer) -> None:
    """The client that is kept of the first finds the second, if not at its first try: a connection that was refused is
    tried again up to a second later."""
    address = str(server.address)
    assert await caller.identify(address) == words.Identified("there", "i-1")
    await server.stop(grace_s=0.0)
    assert isinstance(await caller.identify(address), words.AnswerLost)
    heir = FakeAgent("heir")
    heir.incarnation = "i-2"
    async with await serve(heir, port=server.address.port):
        found = await caller.identify(address)
        while isinstance(found, words.AnswerLost):
            await asyncio.sleep(0.05)
            found = await caller.identify(address)
        assert found == words.Identified("heir", "i-2")


async def test_an_answer_that_does_not_come_in_time(caller: Caller, server: RunningServer, agent: FakeAgent) -> None:
    agent.delays["get_instance_metadata"] = agent.delays["adopt"] = 60.0
    began = time.monotonic()
    identified = await caller.identify(str(server.address), 0.2)
    effect, stream = adopt(str(server.address), 0.2)
    caller.calls.adopt(effect, stream.request)
    for lost in identified, await caller.answer():
        assert isinstance(lost, words.AnswerLost)
        assert lost.detail.endswith("no answer before the deadline")
    assert time.monotonic() - began < 30.0


async def test_an_address_that_is_not_to_be_called(caller: Caller) -> None:
    refusal = await caller.identify("10.1.2.3:40001")
    assert isinstance(refusal, words.AdoptRefused)
    assert refusal.reason is Reason.ADDRESS_REFUSED


async def test_invalid_address_counts_as_no_answer(caller: Caller) -> None:
    assert await caller.identify("nowhere") == words.AnswerLost(broken=False)


async def test_the_state_of_the_request_is_what_was_delivered(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
    effect, stream = adopt(str(server.address))
    caller.calls.adopt(effect, stream.request)
    assert await caller.answer() == words.Adopted("there", "i-1")
    state = decode_state(agent.asked("adopt")[0].request_state)
    assert (state.output_token_ids, state.origin) == ([10, 11], RELAY)


async def test_called_off_attempt_is_not_awaited(caller: Caller, server: RunningServer, agent: FakeAgent) -> None:
    agent.delays["adopt"] = 60.0
    effect, stream = adopt(str(server.address))
    caller.calls.adopt(effect, stream.request)
    await until(lambda: agent.asked("adopt"))
    caller.calls.call_off(words.CallOff("r", 3))
    await asyncio.wait_for(agent.given_up.wait(), 30.0)
    assert caller.num_answers == 0


async def test_an_abort_is_carried_out_although_nobody_waits(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
    caller.calls.abort(words.AbortAt("r", str(server.address)))
    await until(lambda: agent.asked("abort"))
    assert list(agent.asked("abort")[0].request_ids) == ["r"]


PROMPT = list(range(100, 140))
DELIVERED = list(range(200, 230))


def ask_cached(caller: Caller, *addresses: str, seconds: float = 30.0, **changes: Any) -> None:
    stream = ClientStream(request("r", prompt_token_ids=PROMPT, **changes), "home")
    effect = words.AskCached(stream, 3, list(addresses), DELIVERED, seconds)
    caller.calls.ask_cached(effect, stream.request)


async def test_cached_tokens_of_engines_are_collected(caller: Caller, server: RunningServer, agent: FakeAgent) -> None:
    """By names of the prompt and of what was delivered, in whole blocks; who cannot answer has nothing."""
    agent.num_cached = 48
    other = FakeAgent("other")
    async with await serve(other) as beside:
        places = str(server.address), str(beside.address), "127.0.0.1:1", "nowhere", "10.1.2.3:40001"
        ask_cached(caller, *places)
        assert await caller.answer() == words.CachedKnown(dict(zip(places, (48, 0, 0, 0, 0), strict=True)))
    for one in (agent, other):
        (asked,) = one.asked("cached_prefix")
        assert asked.block_size == SIZE
        assert asked.blocks == b"".join(chain(PROMPT + DELIVERED, SIZE, root_of(SIZE)))
        assert len(asked.blocks) == 4 * HASH_BYTES


async def test_salt_and_adapter_are_in_the_names(caller: Caller, server: RunningServer, agent: FakeAgent) -> None:
    adapter = LoRARequest("story", 1, "/nowhere")
    ask_cached(caller, str(server.address), cache_salt="salt", lora_request=adapter)
    await caller.answer()
    (asked,) = agent.asked("cached_prefix")
    plain = chain(PROMPT + DELIVERED, SIZE, root_of(SIZE, "salt"))
    masked = [int.from_bytes(name, "little") ^ adapter_mask("story") for name in plain]
    assert asked.blocks == b"".join(name.to_bytes(HASH_BYTES, "little") for name in masked)


async def test_late_answer_about_cached_tokens_is_not_awaited(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
    agent.delays["cached_prefix"] = 60.0
    async with await serve(quick := FakeAgent("quick")) as beside:
        quick.num_cached = 64
        began = time.monotonic()
        ask_cached(caller, str(server.address), str(beside.address), seconds=1.0)
        known = await caller.answer()
    assert time.monotonic() - began < 30.0
    assert known == words.CachedKnown({str(server.address): 0, str(beside.address): 64})


async def test_of_many_requests_at_once_some_are_not_asked_about(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
    agent.delays["cached_prefix"] = 60.0
    stream = ClientStream(request("r", prompt_token_ids=PROMPT), "home")
    for number in range(MOST_COMPARING):
        effect = words.AskCached(stream, 100 + number, [str(server.address)], [], 60.0)
        caller.calls.ask_cached(effect, stream.request)
    await until(lambda: len(agent.asked("cached_prefix")) == MOST_COMPARING)
    ask_cached(caller, str(server.address))
    assert await caller.answer() == words.CachedKnown({}), "at once"
    for number in range(MOST_COMPARING):
        caller.calls.call_off(words.CallOff("r", 100 + number))
    agent.delays.clear()
    agent.num_cached = 32
    known: words.ReplayEvent = words.CachedKnown({})
    while known == words.CachedKnown({}):
        await asyncio.sleep(0.01)
        ask_cached(caller, str(server.address))
        known = await caller.answer()
    assert known == words.CachedKnown({str(server.address): 32})
