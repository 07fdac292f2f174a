# SPDX-License-Identifier: Apache-2.0
"""The relay socket of vLLM's real client against engines that send what they like."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.engine.core_client import AsyncMPClient

from llumlet.process.credentials import NONE
from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import origin, owners
from tests.frontend.conftest import llumlet_enabled
from tests.frontend.fakes import FakeEngine, FakePeer, close_client, new_client, relayed, request, tokens_of
from tests.fuzz.hostile import anything, integers, texts
from vllm_llumnix.engine.service.relay_sender import Relay as EngineRelay
from vllm_llumnix.frontend.metrics import MoveMetrics

__all__ = ["llumlet_enabled"]

EXAMPLES = [
    wire.Hello(wire.RELAY_VERSION, "b", "1", "127.0.0.1:1", "digest"),
    wire.TokenBatch("b", "1", "127.0.0.1:1", [relayed("victim", 0, 5, 6, base=0)]),
    wire.Heartbeat("b", "1", wire.Health.OK, [("victim", Epoch(0, 1))]),
    wire.HandedOver("victim", Epoch(0, 2), "c", "1", "127.0.0.1:2"),
    wire.FenceQuestion(1, "victim", Epoch(0, 1)),
]
numbers = integers(-(2**63), 2**63 - 1)
lists = st.lists(numbers, max_size=3)
epochs = st.builds(Epoch, numbers, numbers)
ids = st.one_of(st.just("victim"), texts)
outputs = st.builds(
    wire.TokenOutput,
    ids,
    epochs,
    numbers,
    numbers,
    st.lists(numbers, max_size=5),
    st.none() | numbers,
    st.none() | numbers | texts,
    st.none()
    | st.builds(wire.Logprobs, st.lists(st.lists(numbers)), st.lists(st.lists(st.floats())), st.lists(numbers)),
    numbers,
)
hostile = st.one_of(
    st.builds(wire.Hello, numbers, texts, texts, texts, texts),
    st.builds(wire.TokenBatch, texts, texts, texts, st.lists(outputs, max_size=4), st.none() | texts),
    st.builds(
        wire.Heartbeat,
        texts,
        texts,
        st.sampled_from(wire.Health),
        st.lists(st.tuples(ids, epochs), max_size=5),
        st.dictionaries(ids, numbers, max_size=3),
    ),
    st.builds(wire.HandedOver, ids, epochs, texts, texts, texts),
    st.builds(wire.FenceQuestion, numbers, ids, epochs),
)
thorough = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Harness:
    """A client with one stream that is being attacked, and one that has nothing to do with it."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self._runner = runner
        self._next = 0
        self._marks = itertools.count()
        runner.run(self._start(directory))

    async def _start(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._engine = FakeEngine(self._context, directory)
        self.client: Any = new_client(AsyncMPClient, directory)
        await self.client.add_request_async(request("bystander"))
        self._friend = FakePeer(self._context, self.client.relay_address, name="friend")
        await self._friend.hello()
        self._attacker = FakePeer(self._context, self.client.relay_address, name="attacker")

    def attack(self, *frames: bytes) -> None:
        self._runner.run(self._attack(frames))

    async def _attack(self, frames: tuple[bytes, ...]) -> None:
        if "victim" not in self.client.origin.core.streams:
            await self.client.add_request_async(request("victim"))
        await self._attacker.socket.send_multipart(frames)
        # A heartbeat is answered, so all that came before it has been dealt with. By name: attacks are answered, too.
        mark = f"nobody-{next(self._marks)}"
        await self._attacker.send(wire.Heartbeat("attacker", "1", wire.Health.OK, [(mark, Epoch(0, 0))]))
        while await self._attacker.answer() != wire.HeartbeatAck([mark]):
            pass
        while not self.client.outputs_queue.empty():
            await self.client.get_output_async()

    def check(self) -> None:
        """The bystander's next token arrives, and only it."""
        self._runner.run(self._check())

    async def _check(self) -> None:
        await self._friend.tokens(relayed("bystander", self._next, 7))
        assert await tokens_of(self.client, 1) == [7]
        self._next += 1
        assert self.client.origin.complaints.counts["internal"] == 0

    def num_tasks(self) -> int:
        return len(asyncio.all_tasks(self._runner.get_loop()))

    def close(self) -> None:
        async def close() -> None:
            close_client(self.client)
            for each in (self._attacker, self._friend, self._engine):
                each.close()
            self._context.destroy(linger=0)
            await asyncio.sleep(0)

        self._runner.run(close())


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    # Everybody is silent while examples are made up, for however long that takes.
    monkeypatch.setattr(origin, "PROBE_SECONDS", 600.0)
    monkeypatch.setattr(owners, "LOST_SECONDS", 600.0)
    monkeypatch.setattr(MoveMetrics, "look", lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="llx-") as directory, asyncio.Runner() as runner:
        harness = Harness(runner, Path(directory))
        try:
            harness.check()
            tasks = harness.num_tasks()
            yield harness
            harness.check()
            assert harness.num_tasks() <= tasks
            assert len(harness.client.origin.core.streams) <= 2
        finally:
            harness.close()


@settings(parent=thorough)
@given(anything(*map(wire.encode, EXAMPLES)))
def test_bytes(harness: Harness, data: bytes) -> None:
    harness.attack(data)
    harness.check()


@settings(parent=thorough)
@given(hostile)
def test_values(harness: Harness, message: Any) -> None:
    harness.attack(wire.encode(message))
    harness.check()


@settings(parent=thorough, max_examples=50)
@given(st.lists(st.binary(max_size=20), min_size=2, max_size=20))
def test_frames(harness: Harness, frames: list[bytes]) -> None:
    harness.attack(*frames)
    harness.check()


@settings(parent=thorough, max_examples=50)
@given(
    st.recursive(
        st.none() | numbers | st.floats() | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
    )
)
def test_msgpack_of_other_things(harness: Harness, value: Any) -> None:
    harness.attack(msgspec.msgpack.encode(value))
    harness.check()


DEEP = b"\x91" * 100_000
NOT_TEXT = wire.encode(wire.HeartbeatAck(["xyz"])).replace(b"xyz", b"\xff\xff\xff")


@pytest.mark.parametrize("data", [DEEP, b"\x81\xa1x" + DEEP, NOT_TEXT], ids=["deep", "deep in a field", "not text"])
def test_relay_survives_all_decoding_errors(harness: Harness, data: bytes) -> None:
    harness.attack(data)
    harness.check()
    assert harness.client.origin.complaints.counts["bad_message"] == 1


@pytest.mark.asyncio
async def test_an_engine_and_an_origin_that_sends_nonsense() -> None:
    """The engine's end goes on hearing the origin."""
    context = zmq.asyncio.Context()
    origin: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    origin.bind("tcp://127.0.0.1:*")
    address = origin.getsockopt_string(zmq.LAST_ENDPOINT)
    dismissed: asyncio.Queue[Any] = asyncio.Queue()
    relay = EngineRelay(
        EXAMPLES[0],
        lambda *dismissal: dismissed.put_nowait(dismissal),
        lambda *part: None,
        lambda: wire.Health.OK,
        NONE,
    )
    relay.meet(address)
    identity, _ = await origin.recv_multipart()
    for data in (b"", b"\x00", DEEP, NOT_TEXT, wire.encode(EXAMPLES[2]), b"\xff" * 1000):
        await origin.send_multipart([identity, data])
    await origin.send_multipart([identity, wire.encode(wire.Dismissal([("r", Epoch(0, 1))]))])
    assert await asyncio.wait_for(dismissed.get(), 5) == (address, [("r", Epoch(0, 1))])
    await relay.close()
    origin.close(linger=0)
    context.term()
