# SPDX-License-Identifier: Apache-2.0
"""What every gRPC tool expects of a server: reflection, health; and where it may listen."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from grpc import aio
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from llumlet.contract import client as client_module
from llumlet.contract import servicer
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletUnreachable
from llumlet.contract.server import RunningServer, serve
from llumlet.process.addresses import is_loopback
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent, request_info

pytestmark = pytest.mark.asyncio

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def reflect(
    server: RunningServer, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    async with aio.insecure_channel(str(server.address)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
        return answer


async def health_of(server: RunningServer, service: str) -> int:
    async with aio.insecure_channel(str(server.address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_reflection_lists_the_services(server: RunningServer) -> None:
    answer = await reflect(server, reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in answer.list_services_response.service}
    assert {"llumlet.Llumlet", "llumlet.Peer", "grpc.health.v1.Health"} <= names


async def test_reflection_describes_a_service(server: RunningServer) -> None:
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol="llumlet.Llumlet")
    answer = await reflect(server, question)
    (file,) = answer.file_descriptor_response.file_descriptor_proto
    assert b"MigrateRequest" in file
    assert b"kv_cache_usage_ratio" in file


@pytest.mark.parametrize("service", ["", "llumlet.Llumlet", "llumlet.Peer"])
async def test_health(server: RunningServer, service: str) -> None:
    assert await health_of(server, service) == SERVING
    await server.set_serving(False)
    assert await health_of(server, service) == NOT_SERVING
    await server.set_serving(True)
    assert await health_of(server, service) == SERVING


async def test_calls_are_answered_while_not_serving(server: RunningServer, client: LlumletClient) -> None:
    await server.set_serving(False)
    assert (await client.get_instance_status()).instance_id == "fake-a"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid"])
async def test_other_than_loopback_must_be_asked_for(host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        await serve(FakeAgent(), host)


async def test_other_than_loopback_if_asked_for() -> None:
    server = await serve(FakeAgent(), "0.0.0.0", insecure=True)
    async with server, LlumletClient(f"127.0.0.1:{server.port}") as client:
        assert (await client.get_instance_status()).instance_id == "fake-a"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("8.8.8.8", False)],
)
async def test_loopback_hosts_are_recognised(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot listen at"):
            await serve(FakeAgent(), port=taken.getsockname()[1])


async def test_two_servers_do_not_share_a_port(server: RunningServer) -> None:
    with pytest.raises(OSError, match="cannot listen at"):
        await serve(FakeAgent(), port=server.port)


async def test_a_port_can_be_chosen_and_is_free_again(unused_tcp_port: int) -> None:
    for _ in range(2):
        async with await serve(FakeAgent(), port=unused_tcp_port) as server:
            assert server.port == unused_tcp_port
            async with LlumletClient(server.address) as client:
                await client.get_instance_status()


async def test_bytes_that_are_no_message_are_refused(server: RunningServer) -> None:
    async with aio.insecure_channel(str(server.address)) as channel:
        call = channel.unary_unary(
            "/llumlet.Peer/Reserve",
            request_serializer=lambda _: b"\xff\xff\xff\xff",
            response_deserializer=bytes,
        )
        with pytest.raises(aio.AioRpcError):
            await call(b"")
    async with LlumletClient(server.address) as client:
        assert (await client.get_instance_status()).instance_id == "fake-a"


async def test_a_connection_that_nobody_uses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time; a call that comes just then is answered."""
    monkeypatch.setattr(client_module, "IDLE_SECONDS", 0.1)
    agent = FakeAgent()
    async with await serve(agent) as server:

        def connected() -> bool:
            found = psutil.Process().net_connections("tcp")
            return any(one.raddr and one.raddr.port == server.port and one.status == "ESTABLISHED" for one in found)

        async with LlumletClient(server.address) as client:
            for _ in range(3):
                await client.get_instance_status()
                assert connected()
                deadline = time.monotonic() + 10
                while connected():
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
            for pause in range(90, 120, 2):
                await client.get_instance_status()
                await asyncio.sleep(pause / 1e3)
            # One that is in use is not closed, though one of two calls has ended long ago.
            agent.delays["list_requests"] = 0.4
            await asyncio.gather(client.get_instance_status(), client.list_requests())
            assert connected()


async def test_caller_that_left_while_it_is_told_something_is_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC may notice at the write, before it cancels the call: the handler's error would go to the log."""

    async def gone(*_: object) -> None:
        raise cygrpc.ExecuteBatchError("Failed SendMessageOperation")

    real = servicer.tell
    monkeypatch.setattr(servicer, "tell", lambda _, message: real(cast(Any, SimpleNamespace(write=gone)), message))
    agent = FakeAgent(requests=[request_info()])
    async with await serve(agent) as running, LlumletClient(running.address) as client:
        with pytest.raises(LlumletUnreachable):
            async for _ in client.migrate(messages.migrate(), deadline_s=1.0):
                pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
