# SPDX-License-Identifier: Apache-2.0
"""vLLM's data-parallel client: its own bookkeeping of requests in flight must come out right after moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import zmq.asyncio
from vllm.v1.engine import FinishReason

from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from tests.frontend.fakes import FakeEngine, FakePeer, next_outputs, output, relayed, request, tokens_of

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def peer(context: zmq.asyncio.Context, dp_client: Any) -> AsyncIterator[FakePeer]:
    peer = FakePeer(context, dp_client.relay_address)
    yield peer
    peer.close()


async def start(client: Any, engines: list[FakeEngine], rank: int, request_id: str) -> None:
    await client.add_request_async(request(request_id, data_parallel_rank=rank))
    await engines[rank].added()


def in_flight(client: Any) -> list[int]:
    return [client.engine_inflight[engine] for engine in client.core_engines]


async def test_vllms_own_hook_still_runs(dp_client: Any, rank_engines: list[FakeEngine]) -> None:
    await start(dp_client, rank_engines, 1, "r")
    assert in_flight(dp_client) == [0, 1]
    await rank_engines[1].send(output("r", 10, finish=FinishReason.STOP), finished_requests={"r"})
    await tokens_of(dp_client, 1)
    assert in_flight(dp_client) == [0, 0]
    assert dp_client.reqs_in_flight == {}


async def test_relayed_outputs_bear_the_home_rank(
    dp_client: Any, rank_engines: list[FakeEngine], peer: FakePeer
) -> None:
    await start(dp_client, rank_engines, 0, "zero")
    await start(dp_client, rank_engines, 1, "one")
    await peer.tokens(relayed("one", 0, 11), relayed("zero", 0, 10))
    batches = [await next_outputs(dp_client) for _ in range(2)]
    assert {batch.engine_index: batch.outputs[0].request_id for batch in batches} == {0: "zero", 1: "one"}


async def test_a_relayed_finish_settles_the_counters(
    dp_client: Any, rank_engines: list[FakeEngine], peer: FakePeer
) -> None:
    await start(dp_client, rank_engines, 1, "r")
    await peer.tokens(relayed("r", 0, 10, finish=FinishReason.LENGTH))
    await tokens_of(dp_client, 1)
    assert dp_client.reqs_in_flight == {}
    assert in_flight(dp_client) == [0, 0]


async def test_a_finish_that_waited_for_a_home_token_settles_the_counters(
    dp_client: Any, rank_engines: list[FakeEngine], peer: FakePeer
) -> None:
    await start(dp_client, rank_engines, 0, "r")
    await peer.tokens(relayed("r", 1, 11, base=1, finish=FinishReason.STOP))
    assert await peer.heartbeat() == []
    assert in_flight(dp_client) == [1, 0]
    await rank_engines[0].send(output("r", 10))
    assert await tokens_of(dp_client, 2) == [10, 11]
    assert in_flight(dp_client) == [0, 0]


async def test_abort_of_a_moved_request_settles_the_counters(
    dp_client: Any, rank_engines: list[FakeEngine], peer: FakePeer
) -> None:
    await start(dp_client, rank_engines, 1, "r")
    await peer.tokens(relayed("r", 0, 10))
    await tokens_of(dp_client, 1)
    await dp_client.abort_requests_async(["r"])
    assert await rank_engines[1].aborted() == ["r"]
    assert await peer.answer() == wire.Dismissal([("r", Epoch(0, 1))])
    assert in_flight(dp_client) == [0, 0]


async def test_abort_of_a_request_that_vllm_has_forgotten(
    dp_client: Any, rank_engines: list[FakeEngine], peer: FakePeer
) -> None:
    """Its home engine has reported it as finished there: vLLM's client would drop the abort."""
    await start(dp_client, rank_engines, 1, "gone")
    await start(dp_client, rank_engines, 0, "here")
    await rank_engines[1].send(output("gone", 10), finished_requests={"gone"})
    await tokens_of(dp_client, 1)
    assert "gone" not in dp_client.reqs_in_flight
    await dp_client.abort_requests_async(["gone", "here"])
    assert await rank_engines[0].aborted() == ["here"]
    assert await rank_engines[1].aborted() == ["gone"]
    assert in_flight(dp_client) == [0, 0]


async def test_aborts_of_requests_at_home_are_sent_once(dp_client: Any, rank_engines: list[FakeEngine]) -> None:
    await start(dp_client, rank_engines, 0, "r")
    await dp_client.abort_requests_async(["r"])
    assert await rank_engines[0].aborted() == ["r"]
    assert await rank_engines[0].silent()
    # The engine's own report comes after we have settled; the count must not go below zero.
    await rank_engines[0].send(output("x", 1), finished_requests={"r"})
    await tokens_of(dp_client, 1)
    assert in_flight(dp_client) == [0, 0]
