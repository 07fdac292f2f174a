# SPDX-License-Identifier: Apache-2.0
"""The gRPC service against messages nobody should send: a refusal, nothing left behind, and the next call works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llumlet.contract.client import LlumletClient
from llumlet.contract.proto import llumlet_pb2
from llumlet.contract.server import RunningServer, serve
from llumlet.contract.types import (
    MAX_MESSAGE_BYTES,
    AbortMigrateInRequest,
    AbortRequest,
    DrainRequest,
    MigrateRequest,
    WatchCacheRequest,
)
from tests.fuzz.hostile import anything, filled, worsened
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent, request_info, until

EXAMPLES: dict[str, Message] = {
    "Llumlet/Migrate": messages.migrate(),
    "Llumlet/MigrateIn": messages.migrate_in(),
    "Llumlet/WatchCache": WatchCacheRequest(engine_id="fake-a", incarnation="i-1", interval_s=0.5),
    "Llumlet/Drain": DrainRequest(destinations=["127.0.0.1:4001"], timeout_s=5),
    "Llumlet/Abort": AbortRequest(request_ids=["r"]),
    "Llumlet/AbortMigrateIn": AbortMigrateInRequest(request_ids=["r"]),
    "Peer/Reserve": messages.reserve(),
    "Peer/CopyRound": messages.copy_round(),
    "Peer/Commit": messages.commit(),
    "Peer/Withdraw": messages.settle(),
    "Peer/Cancel": messages.settle(),
    "Peer/Abort": messages.settle(),
    "Peer/Close": messages.settle(),
    "Peer/Query": messages.settle(),
    "Peer/Adopt": messages.adopt(),
    "Peer/CachedPrefix": messages.cached_prefix(),
    "Peer/Claim": messages.claim(),
    "Peer/EndClaim": messages.end_claim(),
}
STREAMS = {"Llumlet/Migrate", "Llumlet/MigrateIn", "Llumlet/Drain", "Llumlet/WatchCache"}
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT}
NOT_A_MESSAGE = grpc.StatusCode.UNKNOWN
"""gRPC's own answer, before our code runs."""
thorough = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Harness:
    """A server and a loop that runs only while something is asked of it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        agent = FakeAgent(requests=[request_info()])
        agent.cache_ends = True
        self.server: RunningServer = runner.run(serve(agent))
        self.channel = runner.run(self._open())

    async def _open(self) -> aio.Channel:
        return aio.insecure_channel(str(self.server.address), options=[("grpc.max_send_message_length", -1)])

    def send(self, method: str, data: bytes) -> grpc.StatusCode:
        return self._runner.run(self._send(method, data))

    async def _send(self, method: str, data: bytes) -> grpc.StatusCode:
        try:
            if method in STREAMS:
                async for _ in self.channel.unary_stream(f"/llumlet.{method}")(data, timeout=10):
                    pass
            else:
                await self.channel.unary_unary(f"/llumlet.{method}")(data, timeout=10)
        except aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def check(self) -> None:
        """It still works."""

        async def ask() -> None:
            async with LlumletClient(self.server.address) as client:
                assert (await client.get_instance_status()).instance_id == "fake-a"
                assert (await client.reserve(messages.reserve())).dst_incarnation == "i-1"

        self._runner.run(ask())

    def num_calls(self) -> int:
        return len(self.server._calls._tasks)

    def close(self) -> None:
        self._runner.run(self.channel.close())
        self._runner.run(self.server.stop(0.2))


@pytest.fixture
def harness() -> Iterator[Harness]:
    with asyncio.Runner() as runner:
        harness = Harness(runner)
        try:
            harness.check()
            assert harness.send("Peer/Query", messages.settle().SerializeToString()) is grpc.StatusCode.OK
            before = num_sockets()
            yield harness
            harness.check()
            assert harness.num_calls() == 0
            runner.run(until(lambda: num_sockets() <= before))
        finally:
            harness.close()


def num_sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


@pytest.mark.parametrize("method", EXAMPLES)
@settings(parent=thorough, max_examples=40)
@given(data=st.data())
def test_bytes(harness: Harness, method: str, data: st.DataObject) -> None:
    """Damaged messages: gRPC cannot read them, or we can and say what is wrong, or they are legal after all."""
    sent = data.draw(anything(EXAMPLES[method].SerializeToString()))
    code = harness.send(method, sent)
    try:
        message = type(EXAMPLES[method]).FromString(sent)
    except DecodeError:
        assert code is NOT_A_MESSAGE
    else:
        assert code in legal_answers(message)


@pytest.mark.parametrize("method", EXAMPLES)
@settings(parent=thorough, max_examples=60)
@given(data=st.data())
def test_values(harness: Harness, method: str, data: st.DataObject) -> None:
    """Well-formed messages with hostile values are refused, or legal; nothing else."""
    example = EXAMPLES[method]
    message = data.draw(st.one_of(filled(type(example)), worsened(example)))
    assert harness.send(method, message.SerializeToString()) in legal_answers(message)


def legal_answers(message: Message) -> set[grpc.StatusCode]:
    """The order of a rescheduler is refused if a message before it had a higher term."""
    has_term = isinstance(message, MigrateRequest) and message.leader_term > 0
    return REFUSALS | {grpc.StatusCode.OK} | ({grpc.StatusCode.FAILED_PRECONDITION} if has_term else set())


def test_every_method_is_covered() -> None:
    services = llumlet_pb2.DESCRIPTOR.services_by_name
    takes_arguments = {
        f"{name}/{method.name}"
        for name in ("Llumlet", "Peer")  # Cms: test_fuzz_cms.py
        for method in services[name].methods
        if method.input_type.fields
    }
    assert takes_arguments == EXAMPLES.keys()


@pytest.mark.parametrize("method", ["Peer/Reserve", "Llumlet/Migrate", "Peer/Adopt"])
def test_too_large(harness: Harness, method: str) -> None:
    assert harness.send(method, bytes(MAX_MESSAGE_BYTES + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_method_that_is_none(harness: Harness) -> None:
    assert harness.send("Peer/Steal", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert harness.send("Llumlet/", b"") is grpc.StatusCode.UNIMPLEMENTED


@settings(parent=thorough, max_examples=30)
@given(st.sampled_from([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]), st.binary(max_size=1000))
def test_llumlet_survives_bytes_that_are_not_http(harness: Harness, start: bytes, rest: bytes) -> None:
    with socket.create_connection(tuple(harness.server.address), timeout=5) as connection:
        connection.sendall(start + rest)


def test_connections_that_say_nothing(harness: Harness) -> None:
    connections: list[Any] = [socket.create_connection(tuple(harness.server.address)) for _ in range(100)]
    harness.check()
    for connection in connections:
        connection.close()
