# SPDX-License-Identifier: Apache-2.0
"""What an origin says to other engines' llumlets, and what it hears of them: real servers with fake agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from llumlet.credential_files import CredentialFiles
from llumlet.credentials import NONE, Credentials
from llumlet.protocol import replay_words as words
from llumlet.protocol.errors import Reason
from llumlet.protocol.ids import Epoch
from llumlet.server import RunningServer, serve
from tests.frontend.fakes import request, until
from tests.llumlet.fake_agent import FakeAgent
from tests.support.authority import token_file
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.frontend.calls import Calls
from vllm_llumnix.frontend.origin import ClientStream
from vllm_llumnix.peer_clients import PeerClients
from vllm_llumnix.reach import Reach
from vllm_llumnix.request_wire import decode_state

pytestmark = pytest.mark.asyncio
RELAY = "tcp://127.0.0.1:7001"


class Caller:
    """`Calls`, and what it was answered."""

    def __init__(self, credentials: Credentials = NONE) -> None:
        self.clients = PeerClients(credentials, Reach(anywhere=False))
        self.calls = Calls(self.clients, credentials, lambda: RELAY, Adapters(None), self._answered)
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


async def test_who_is_there(caller: Caller, server: RunningServer) -> None:
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


async def test_what_is_no_address_is_an_answer_that_is_lost(caller: Caller) -> None:
    assert await caller.identify("nowhere") == words.AnswerLost(broken=False)


async def test_the_state_of_the_request_is_what_was_delivered(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
    effect, stream = adopt(str(server.address))
    caller.calls.adopt(effect, stream.request)
    assert await caller.answer() == words.Adopted("there", "i-1")
    state = decode_state(agent.asked("adopt")[0].request_state)
    assert (state.output_token_ids, state.origin) == ([10, 11], RELAY)


async def test_nobody_waits_for_an_attempt_that_was_called_off(
    caller: Caller, server: RunningServer, agent: FakeAgent
) -> None:
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
