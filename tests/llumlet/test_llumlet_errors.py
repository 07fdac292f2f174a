# SPDX-License-Identifier: Apache-2.0
"""Refusals and silences: what the agent raises, and what the caller then sees."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import pytest
from grpc import aio

from llumlet.contract.client import Deadlines, LlumletClient, failure_of
from llumlet.contract.errors import (
    REASON_METADATA,
    STATUS_OF_REASON,
    LlumletCallFailed,
    LlumletError,
    LlumletUnreachable,
    NotALlumlet,
)
from llumlet.contract.proto.llumlet_pb2_grpc import PeerStub
from llumlet.contract.server import RunningServer
from llumlet.contract.types import MAX_MESSAGE_BYTES, Reason, parse_reason, reason_word
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent

pytestmark = pytest.mark.asyncio

REASONS = [value for value in Reason.values() if value != Reason.REASON_NONE]


@pytest.mark.parametrize("reason", REASONS, ids=map(reason_word, REASONS))
async def test_every_reason_crosses_the_wire(
    client: LlumletClient, server: RunningServer, agent: FakeAgent, reason: Reason
) -> None:
    agent.failures["reserve"] = LlumletError(reason, "wanted 12 blocks, free 3")
    with pytest.raises(LlumletError) as caught:
        await client.reserve(messages.reserve())
    assert caught.value.reason == reason
    assert caught.value.detail == "wanted 12 blocks, free 3"
    assert caught.value.address == str(server.address)

    async with aio.insecure_channel(str(server.address)) as channel:
        with pytest.raises(aio.AioRpcError) as raw:
            await PeerStub(channel).Reserve(messages.reserve())
    assert raw.value.code() == STATUS_OF_REASON[reason]
    assert raw.value.details() == "wanted 12 blocks, free 3"
    assert dict(raw.value.trailing_metadata())[REASON_METADATA] == reason_word(reason)


async def test_a_stream_is_refused_before_its_first_event(client: LlumletClient, agent: FakeAgent) -> None:
    agent.failures["migrate"] = LlumletError(Reason.WRONG_INSTANCE, "I am fake-a")
    with pytest.raises(LlumletError, match="wrong_instance: I am fake-a"):
        _ = [event async for event in client.migrate(messages.migrate())]


async def test_an_unforeseen_exception_is_internal_and_logged_with_its_trace(
    client: LlumletClient, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.failures["list_requests"] = ZeroDivisionError("no blocks")
    with pytest.raises(LlumletError) as caught:
        await client.list_requests()
    assert caught.value.reason == Reason.INTERNAL
    assert "ZeroDivisionError: no blocks" in caught.value.detail
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "ListRequests" in record.message


async def test_a_reason_of_a_newer_llumlet_is_kept_in_the_text(server: RunningServer) -> None:
    async with LlumletClient(server.address) as client:
        error = aio.AioRpcError(
            grpc.StatusCode.ABORTED,
            aio.Metadata(),
            aio.Metadata((REASON_METADATA, "moon_in_wrong_phase")),
            "no",
            None,
        )
        failure = failure_of(error, client.address)
    assert isinstance(failure, LlumletError)
    assert failure.reason == Reason.INTERNAL
    assert "moon_in_wrong_phase" in failure.detail


async def test_bad_messages_are_refused_before_the_agent_sees_them(client: LlumletClient, agent: FakeAgent) -> None:
    with pytest.raises(LlumletError) as caught:
        _ = [event async for event in client.migrate(messages.migrate(dst_engine_port=-1))]
    assert caught.value.reason == Reason.INVALID_REQUEST
    assert "dst_engine_port -1" in caught.value.detail
    with pytest.raises(LlumletError, match="migration_id is empty"):
        await client.withdraw(messages.settle(handover=messages.handover(migration_id="")))
    assert agent.calls == []


async def test_the_deadline_of_a_call_is_kept(client: LlumletClient, agent: FakeAgent) -> None:
    agent.delays["get_instance_status"] = 30.0
    begin = time.monotonic()
    with pytest.raises(LlumletUnreachable) as caught:
        await client.get_instance_status(deadline_s=0.2)
    assert caught.value.timed_out
    assert time.monotonic() - begin < 5.0


async def test_every_kind_of_call_has_a_deadline_by_default(server: RunningServer, agent: FakeAgent) -> None:
    slow = ("get_instance_metadata", "commit", "reserve", "query", "abort", "migrate")
    agent.delays.update(dict.fromkeys(slow, 30.0))
    short = Deadlines(read=0.1, act=0.1, move=0.1, reserve=0.1, copy=0.1, settle=0.1)
    async with LlumletClient(server.address, short) as client:

        async def migrate() -> None:
            async for _ in client.migrate(messages.migrate()):
                pass

        calls = [
            client.get_instance_metadata(),
            client.commit(messages.commit()),
            client.reserve(messages.reserve()),
            client.query(messages.settle()),
            migrate(),
        ]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0)
    assert all(isinstance(result, LlumletUnreachable) and result.timed_out for result in results)


async def test_the_llumlets_own_deadline_is_a_refusal_not_a_silence(client: LlumletClient, agent: FakeAgent) -> None:
    agent.failures["commit"] = LlumletError(Reason.DEADLINE, "the copy took 5.0 s")
    with pytest.raises(LlumletError, match="deadline: the copy took"):
        await client.commit(messages.commit())


async def test_closed_port_means_unreachable(unused_tcp_port: int) -> None:
    async with LlumletClient(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(LlumletUnreachable, match="Connection refused") as caught:
            await client.get_instance_status()
    assert not isinstance(caught.value, NotALlumlet)
    assert not caught.value.timed_out
    assert caught.value.nobody_listens


async def test_a_host_that_does_not_resolve() -> None:
    async with LlumletClient("no-such-host.invalid:5000") as client:
        with pytest.raises(LlumletUnreachable, match=r"no-such-host\.invalid"):
            await client.get_instance_status()


async def test_an_http_server_is_not_a_llumlet() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with web, LlumletClient(f"127.0.0.1:{web.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(NotALlumlet):
            await client.get_instance_status()


async def test_another_grpc_server_is_not_a_llumlet() -> None:
    other = aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    async with LlumletClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(NotALlumlet, match="not a llumlet"):
            await client.get_instance_status()
    await other.stop(None)


async def test_a_message_that_is_too_large_is_not_read(
    client: LlumletClient, server: RunningServer, agent: FakeAgent
) -> None:
    request = messages.reserve(request_state=b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LlumletCallFailed, match="larger than max"):
        await client.reserve(request)
    # Nor by the server, if the client does not care.
    options = [("grpc.max_send_message_length", -1)]
    async with aio.insecure_channel(str(server.address), options=options) as channel:
        with pytest.raises(aio.AioRpcError, match="larger than max"):
            await PeerStub(channel).Reserve(request)
    assert agent.calls == []


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":80", "h:0", "h:x", "::1:80"])
async def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port must be|IPv6"):
        LlumletClient(address)


async def test_reasons_have_words_both_ways() -> None:
    for reason in Reason.values():
        assert parse_reason(reason_word(reason)) == reason
    with pytest.raises(ValueError, match="GRAVITY"):
        parse_reason("gravity")
    assert str(LlumletError(Reason.BARRED)) == "barred"
