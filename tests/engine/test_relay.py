# SPDX-License-Identifier: Apache-2.0
"""Which origins the engine's relay takes for dead, and what it keeps of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from llumlet.process.credentials import NONE
from llumlet.protocol import wire
from llumlet.protocol.errors import Refused
from llumlet.protocol.ids import Epoch
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.engine.service import relay_sender as relay_module
from vllm_llumnix.engine.service.relay_sender import OriginUnreachable, Relay

pytestmark = pytest.mark.asyncio

EPOCH = Epoch(0, 1)
HELLO = wire.Hello(wire.RELAY_VERSION, "b", "1", "127.0.0.1:1", "digest")
SECONDS = 15.0
ORIGIN_SECONDS = 1.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(relay_module, "ORIGIN_SECONDS", ORIGIN_SECONDS)


class Origin:
    """An API server's end of the relay. Answers heartbeats if it is told to."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receives(self, kind: type[Any]) -> Any:
        """The next message of this kind; what comes before it is lost."""
        async with asyncio.timeout(SECONDS):
            while True:
                self._identity, data = await self._socket.recv_multipart()
                message = wire.decode_to_origin(data)
                if isinstance(message, kind):
                    return message

    async def sends(self, message: wire.ToEngine) -> None:
        """To whom it has last received something from."""
        await self._socket.send_multipart([self._identity, wire.encode(message)])

    async def hears(self, kind: type[Any]) -> bool:
        """Whether such a message is among what has arrived."""
        while await self._socket.poll(0):
            if isinstance(wire.decode_to_origin((await self._socket.recv_multipart())[1]), kind):
                return True
        return False

    async def answers(self) -> None:
        """Every heartbeat from now on."""
        while True:
            identity, data = await self._socket.recv_multipart()
            if isinstance(wire.decode_to_origin(data), wire.Heartbeat):
                await self._socket.send_multipart([identity, wire.encode(wire.HeartbeatAck([]))])

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest_asyncio.fixture
async def origin() -> AsyncIterator[Origin]:
    context = zmq.asyncio.Context()
    origin = Origin(context)
    yield origin
    origin.close()
    context.term()


@pytest.fixture
def dismissed() -> asyncio.Queue[tuple[str, list[tuple[str, Epoch]]]]:
    return asyncio.Queue()


@pytest.fixture
def parts() -> asyncio.Queue[tuple[str, wire.InputPart]]:
    return asyncio.Queue()


@pytest_asyncio.fixture
async def relay(dismissed: asyncio.Queue[Any], parts: asyncio.Queue[Any]) -> AsyncIterator[Relay]:
    def dismiss(origin: str, requests: list[tuple[str, Epoch]]) -> None:
        if requests:
            dismissed.put_nowait((origin, requests))

    relay = Relay(HELLO, dismiss, lambda origin, part: parts.put_nowait((origin, part)), lambda: wire.Health.OK, NONE)
    yield relay
    await relay.close()


def guest(relay: Relay, origin: Origin, request_id: str = "r") -> int:
    """A request of this origin; returns its client index."""
    relay.welcome(request_id, Residence(origin.address, request_id, None, EPOCH))
    return relay.client_index(origin.address)


async def test_a_dead_origin_is_forgotten_with_its_requests(
    relay: Relay, dismissed: asyncio.Queue[Any], origin: Origin
) -> None:
    index = guest(relay, origin)
    assert await asyncio.wait_for(dismissed.get(), SECONDS) == (origin.address, [("r", EPOCH)])
    relay.send(index, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])]))
    assert not relay._by_index
    assert relay.residence_of("r") is None
    # It was only cut off.
    again = guest(relay, origin, "s")
    assert again != index
    relay.send(again, EngineCoreOutputs(outputs=[EngineCoreOutput("s", [2])]))
    batch = await origin.receives(wire.TokenBatch)
    assert [output.request_id for output in batch.outputs] == ["s"]


async def test_a_stopped_engine_buries_nobody(relay: Relay, dismissed: asyncio.Queue[Any], origin: Origin) -> None:
    answering = asyncio.create_task(origin.answers())
    guest(relay, origin)
    await asyncio.sleep(ORIGIN_SECONDS)
    time.sleep(2 * ORIGIN_SECONDS)  # noqa: ASYNC251 - what a stopped process does
    await asyncio.sleep(ORIGIN_SECONDS)
    assert dismissed.empty()
    assert relay.residence_of("r") is not None
    answering.cancel()


async def test_the_engine_keeps_to_its_own_front_end(
    relay: Relay, dismissed: asyncio.Queue[Any], origin: Origin
) -> None:
    """Whose silence ends none of its requests either, such as one that went away and came home."""
    relay.meet(origin.address)
    guest(relay, origin)
    await asyncio.sleep(2 * ORIGIN_SECONDS)
    assert dismissed.empty()
    assert relay.residence_of("r") is not None
    assert await origin.receives(wire.Heartbeat)


async def test_three_hundred_origins_one_after_the_other(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a request here for a moment: nobody is refused, and of those that have nothing here nothing stays."""
    monkeypatch.setattr(relay_module, "ORIGIN_SECONDS", 60.0)
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    own = Origin(context)
    relay.meet(own.address)
    origins = [Origin(context) for _ in range(300)]
    try:
        for number, origin in enumerate(origins):
            relay.client_index(origin.address)
            guest(relay, origin, f"r{number}")
            relay.farewell(f"r{number}")
            assert len(relay._origins) <= relay_module.MAX_ORIGINS
        monkeypatch.setattr(relay_module, "IDLE_SECONDS", 0.1)
        async with asyncio.timeout(SECONDS):
            while len(relay._origins) > 1:  # noqa: ASYNC110 - the relay knows nothing of tests
                await asyncio.sleep(0.02)
        assert list(relay._origins) == [own.address]
        assert len(relay._by_index) == 1
        for origin in (origins[0], origins[-1]):
            assert (await origin.receives(wire.Parting)).instance == HELLO.instance
    finally:
        for origin in [own, *origins]:
            origin.close()
        context.term()


async def test_only_origins_with_requests_count(relay: Relay, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_ORIGINS", 2)
    guest(relay, origin, "r")
    relay.client_index("tcp://127.0.0.1:1")
    relay.client_index("tcp://127.0.0.1:2")
    assert "tcp://127.0.0.1:1" not in relay._origins, "it had nothing here"
    relay.welcome("s", Residence("tcp://127.0.0.1:2", "s", None, EPOCH))
    with pytest.raises(Refused, match="destination_busy"):
        relay.client_index("tcp://127.0.0.1:3")
    relay.farewell("r")
    relay.client_index("tcp://127.0.0.1:3")


async def test_an_origin_that_is_being_asked_is_kept(
    relay: Relay, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "IDLE_SECONDS", 0.05)
    with pytest.raises(OriginUnreachable):
        await relay.fence(origin.address, "r", EPOCH, 0.5)
    assert not await origin.hears(wire.Parting)
    await origin.receives(wire.Parting)


async def test_an_input_in_parts(relay: Relay, parts: asyncio.Queue[Any], origin: Origin) -> None:
    """How many have come is told with each heartbeat, at once where that is asked for; those that come are passed on.
    Tokens are counted from the first answer on, and the end of one is not that of the request."""
    relay.welcome("s", Residence(origin.address, "s", None, EPOCH, base=20, next_index=20, num_parts=3))
    relay.welcome("r", Residence(origin.address, "r", None, EPOCH))
    relay.beat(origin.address)
    beat = await origin.receives(wire.Heartbeat)
    assert (dict(beat.requests), beat.num_parts) == ({"s": EPOCH, "r": EPOCH}, {"s": 3})
    part = wire.InputPart("s", EPOCH, 3, None)
    await origin.sends(part)
    assert await asyncio.wait_for(parts.get(), SECONDS) == (origin.address, part)
    index = relay.client_index(origin.address)
    for name in ("s", "r"):
        output = EngineCoreOutput(name, [7, 8], finish_reason=FinishReason.LENGTH)
        relay.send(index, EngineCoreOutputs(outputs=[output]))
        (output,) = (await origin.receives(wire.TokenBatch)).outputs
        assert (output.base, output.first) == ((20, 20) if name == "s" else (0, 0))
    assert relay.residence_of("s") is not None
    assert relay.residence_of("r") is None
