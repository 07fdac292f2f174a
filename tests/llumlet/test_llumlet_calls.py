# SPDX-License-Identifier: Apache-2.0
"""Every call over a real connection: what is asked arrives, what is answered returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.contract.proto import llumlet_pb2
from llumlet.contract.types import (
    AbortMigrateInRequest,
    AbortRequest,
    AbortResponse,
    CacheChanges,
    DrainRequest,
    Handover,
    MigrateEvent,
    Mode,
    MovePhase,
    Reason,
    WatchCacheRequest,
)
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent

pytestmark = pytest.mark.asyncio

READS = {
    "GetInstanceStatus": "get_instance_status",
    "GetInstanceMetadata": "get_instance_metadata",
    "ListRequests": "list_requests",
}
STREAMS = {
    "Migrate": ("migrate", messages.migrate()),
    "MigrateIn": ("migrate_in", messages.migrate_in()),
}
CALLS = {
    "Abort": ("abort", AbortRequest(request_ids=["r-1"])),
    "AbortMigrateIn": ("abort_migrate_in", AbortMigrateInRequest(request_ids=["r-1"])),
    "Reserve": ("reserve", messages.reserve()),
    "CopyRound": ("copy_round", messages.copy_round()),
    "Commit": ("commit", messages.commit()),
    "Withdraw": ("withdraw", messages.settle()),
    "Cancel": ("cancel", messages.settle()),
    "Peer.Abort": ("abort_handover", messages.settle()),
    "Close": ("close_handover", messages.settle()),
    "Query": ("query", messages.settle()),
    "Adopt": ("adopt", messages.adopt()),
    "CachedPrefix": ("cached_prefix", messages.cached_prefix()),
    "Claim": ("claim", messages.claim()),
    "EndClaim": ("end_claim", messages.end_claim()),
}


async def collect(client: LlumletClient, method: str, request: Message) -> list[MigrateEvent]:
    return [event async for event in getattr(client, method)(request)]


async def test_every_method_of_the_contract_is_tested_here() -> None:
    services = llumlet_pb2.DESCRIPTOR.services_by_name
    contract = {method.name for method in services["Llumlet"].methods}
    contract |= {"Peer.Abort" if method.name == "Abort" else method.name for method in services["Peer"].methods}
    assert contract == READS.keys() | STREAMS.keys() | CALLS.keys() | {"Drain", "WatchCache"}


async def test_a_drain_reports_until_it_is_done(client: LlumletClient, agent: FakeAgent) -> None:
    request = DrainRequest(engine_id="fake-a", destinations=["127.0.0.1:4000"], timeout_s=3)
    *progress, last = [event async for event in client.drain(request)]
    assert agent.asked("drain") == [request]
    assert [event.done for event in progress] == [False]
    assert last.done


async def test_a_cache_is_watched_until_the_caller_leaves(client: LlumletClient, agent: FakeAgent) -> None:
    agent.cache = [CacheChanges(number=1, reset=True, stored=b"12345678"), CacheChanges(number=2)]
    request = WatchCacheRequest(engine_id="fake-a", incarnation="i-1", interval_s=0.5)
    told = []
    async for changes in client.watch_cache(request):
        told.append(changes)
        if len(told) == 2:
            break
    assert told == agent.cache
    assert agent.asked("watch_cache") == [request]
    async with asyncio.timeout(2):
        await agent.left.wait()


async def test_a_watch_is_refused_in_words(client: LlumletClient, agent: FakeAgent) -> None:
    agent.failures["watch_cache"] = LlumletError(Reason.WRONG_INSTANCE, "another life")
    with pytest.raises(LlumletError, match="another life"):
        await anext(client.watch_cache(WatchCacheRequest()))
    for nonsense in (-1.0, float("nan"), 61.0):
        with pytest.raises(LlumletError, match="interval_s"):
            await anext(client.watch_cache(WatchCacheRequest(interval_s=nonsense)))


@pytest.mark.parametrize(("method", "request_"), CALLS.values(), ids=CALLS.keys())
async def test_a_call_reaches_the_agent_unchanged(
    client: LlumletClient, agent: FakeAgent, method: str, request_: Message
) -> None:
    await getattr(client, method)(request_)
    assert agent.asked(method) == [request_]


@pytest.mark.parametrize("method", READS.values())
async def test_a_question_reaches_the_agent(client: LlumletClient, agent: FakeAgent, method: str) -> None:
    answer = await getattr(client, method)()
    assert answer.instance_id == "fake-a"
    assert agent.completed == [method]


@pytest.mark.parametrize(("method", "request_"), STREAMS.values(), ids=STREAMS.keys())
async def test_a_stream_reports_phases_in_order_and_ends_with_the_summary(
    client: LlumletClient, agent: FakeAgent, method: str, request_: Message
) -> None:
    events = await collect(client, method, request_)
    assert agent.asked(method) == [request_]
    phases = [event.progress.phase for event in events[:-1]]
    assert phases == [MovePhase.SELECTED, MovePhase.COPYING, MovePhase.MOVED]
    assert events[-1].WhichOneof("event") == "summary"
    assert (events[-1].summary.selected, events[-1].summary.moved) == (1, 1)


async def test_a_report_carries_its_numbers(client: LlumletClient) -> None:
    *_, last, _summary = await collect(client, "migrate", messages.migrate())
    progress = last.progress
    assert progress.copied_bytes == 5 << 32
    assert progress.mode == Mode.LIVE
    assert dict(progress.phase_ms) == {"reserving": 1.5, "copying": 40.25, "pull": 9.5}
    assert (progress.epoch.term, progress.epoch.hop) == (0, 1)


async def test_selecting_nothing_is_no_error(client: LlumletClient, agent: FakeAgent) -> None:
    agent.requests.clear()
    events = await collect(client, "migrate", messages.migrate_by_rule(num_reqs=-1))
    assert [event.WhichOneof("event") for event in events] == ["summary"]
    assert events[0].summary.selected == 0


async def test_opaque_bytes_and_large_numbers_survive(client: LlumletClient, agent: FakeAgent) -> None:
    request = messages.reserve(request_state=bytes(range(256)) * 4096)
    await client.reserve(request)
    assert agent.asked("reserve")[0].request_state == request.request_state
    assert (await client.copy_round(messages.copy_round())).copied_bytes == 1 << 33


async def test_answers_per_request_id(client: LlumletClient) -> None:
    answer = await client.abort(AbortRequest(request_ids=["cmpl-7-0a1b2c3d", "nobody"]))
    outcomes: list[Any] = [result.outcome for result in answer.results]
    assert outcomes == [AbortResponse.ABORTED, AbortResponse.NOT_FOUND]
    aborted = await client.abort_migrate_in(AbortMigrateInRequest(migration_ids=["m-1"], request_ids=["r-1"]))
    assert [result.id for result in aborted.results] == ["m-1", "r-1"]
    assert {result.state for result in aborted.results} == {Handover.BARRED}
