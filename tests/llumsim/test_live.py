# SPDX-License-Identifier: Apache-2.0
"""Simulated instances do what is written of them: otherwise what is tested with them means nothing."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletUnreachable
from llumlet.contract.types import (
    AbortRequest,
    DrainRequest,
    Health,
    MigrateEvent,
    MigrateRequest,
    MovePhase,
    MoveSummary,
    Reason,
    RequestInfo,
)
from llumsim.live import SimulatedCluster, SimulatedInstance, engine_model
from llumsim.live.api import token_ids_of
from llumsim.live.world import next_token
from tests.llumlet.fake_agent import until

pytestmark = pytest.mark.asyncio
FAST = engine_model(step_s=0.004, decode_s=0, prefill_s=0)
SLOW = engine_model(step_s=0.05, decode_s=0, prefill_s=0)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def move(
    source: SimulatedInstance, destination: SimulatedInstance, **selection: object
) -> tuple[MoveSummary, list[MigrateEvent]]:
    request = MigrateRequest(
        src_engine_id=source.id, dst_engine_id=destination.id, dst_engine_ip="127.0.0.1", **selection
    )
    request.dst_engine_port = destination.address.port
    async with LlumletClient(source.address) as client:
        events = [event async for event in client.migrate(request, deadline_s=10)]
    return events[-1].summary, events[:-1]


async def test_requests_run_and_free_what_they_took() -> None:
    async with SimulatedCluster(1, model=FAST) as cluster:
        instance = cluster[0]
        requests = [instance.submit([length, 2, 3] * length, 12) for length in (5, 40, 300)]
        for request in requests:
            assert await request.done() == "length"
            assert request.output == expected(list(request.prompt), 12)
        assert instance.engine.blocks.num_free == FAST.engine.num_blocks
        assert instance.status.num_running_requests == instance.status.num_used_gpu_tokens == 0
        assert len(instance.status.recent_waiting_requests) == 3


async def test_full_cache_makes_requests_wait_and_preempts() -> None:
    model = engine_model(num_blocks=10, block_size=4, step_s=0.004)
    async with SimulatedCluster(1, model=model) as cluster:
        instance = cluster[0]
        requests = [instance.submit([index] * 12, 20) for index in range(1, 4)]
        await until(lambda: instance.engine.num_preemptions > 0)
        assert instance.status.num_waiting_requests > 0
        for request in requests:
            await request.done()
            assert request.output == expected(list(request.prompt), 20)
        assert instance.engine.blocks.num_free == 10
        with pytest.raises(ValueError, match="do not fit"):
            instance.submit(30, 20)


async def test_a_long_prompt_is_computed_in_chunks() -> None:
    model = engine_model(max_num_batched_tokens=10, max_num_seqs=10, step_s=0.02)
    async with SimulatedCluster(1, model=model) as cluster:
        cluster[0].submit(2000, 2)
        await until(lambda: 0 < cluster[0].status.num_uncomputed_tokens_scheduler_running_prefills < 1990)
        async with LlumletClient(cluster[0].address) as client:
            (info,) = (await client.list_requests()).requests
        assert info.phase == RequestInfo.PREFILL


async def test_requests_move_with_their_tokens() -> None:
    async with SimulatedCluster(2, model=SLOW) as cluster:
        source, destination = cluster[0], cluster[1]
        requests = [source.submit([index] * 40, 4000) for index in range(1, 4)]
        await until(lambda: all(request.output for request in requests))
        rule = {"migration_type": "NUM_REQ", "migration_req_policy": "SR", "num_reqs": 2}
        summary, events = await move(source, destination, **rule)
        assert (summary.selected, summary.moved) == (2, 2)
        assert {event.progress.phase for event in events} >= {MovePhase.RESERVING, MovePhase.COPYING, MovePhase.MOVED}
        assert destination.status.num_running_requests == 2
        assert (source.status.num_migrate_out_reqs, destination.status.num_migrate_in_reqs) == (0, 0)
        counts = [len(request.output) for request in requests]
        await until(lambda: all(len(request.output) > count for request, count in zip(requests, counts, strict=True)))
        for request in requests:
            assert request.output == expected(list(request.prompt), len(request.output))
        async with LlumletClient(source.address) as here, LlumletClient(destination.address) as there:
            for client in (here, there):
                await client.abort(AbortRequest(request_ids=[request.request_id for request in requests]))
        for one in (source, destination):
            await until(lambda one=one: one.engine.blocks.num_free == SLOW.engine.num_blocks)  # type: ignore[misc]


async def test_a_refused_move_changes_nothing() -> None:
    async with SimulatedCluster(2, model=SLOW) as cluster:
        source, destination = cluster[0], cluster[1]
        request = source.submit(40, 4000)
        await until(lambda: request.output)
        for method in ("reserve", "commit"):
            destination.agent.refusals = {method: Reason.DESTINATION_FULL}
            summary, events = await move(source, destination, request_ids=[request.request_id])
            assert (summary.moved, summary.stayed) == (0, 1)
            assert events[-1].progress.reason == Reason.DESTINATION_FULL
        count = len(request.output)
        await until(lambda: len(request.output) > count)
        assert request.owner == source.id
        summary, events = await move(source, destination, request_ids=["nobody"])
        assert (summary.selected, summary.stayed) == (1, 1)
        assert events[-1].progress.reason == Reason.UNKNOWN_REQUEST
        await until(lambda: not destination.coming)
        assert destination.engine.blocks.num_free == SLOW.engine.num_blocks


async def test_hung_instance_reports_it() -> None:
    async with SimulatedCluster(1, model=FAST) as cluster:
        request = cluster[0].submit(40, 4000)
        await until(lambda: request.output)
        cluster[0].hang()
        await until(lambda: cluster[0].status.health == Health.HUNG)
        count = len(request.output)
        await asyncio.sleep(0.05)
        assert len(request.output) == count
        cluster[0].resume()
        await until(lambda: len(request.output) > count)


async def test_slow_instance_goes_on_slowly() -> None:
    async with SimulatedCluster(1, model=FAST) as cluster:
        request = cluster[0].submit(40, 4000)
        await until(lambda: request.output)
        cluster[0].slow_down(50)
        count, began_s = len(request.output), time.monotonic()
        await until(lambda: len(request.output) > count + 2)
        assert time.monotonic() - began_s > 0.3
        cluster[0].slow_down(1)
        await until(lambda: len(request.output) > count + 50, seconds=5.0)


async def test_killed_instance_ends_its_requests_with_error() -> None:
    async with SimulatedCluster(2, model=SLOW) as cluster:
        request, address = cluster[0].submit(40, 4000), cluster[0].address
        await cluster[0].kill()
        assert await request.done() == "error"
        async with LlumletClient(address) as client:
            with pytest.raises(LlumletUnreachable):
                await client.get_instance_status(deadline_s=2)


async def test_a_drain_empties_the_instance() -> None:
    async with SimulatedCluster(2, model=SLOW) as cluster:
        request = cluster[0].submit(40, 4000)
        await until(lambda: request.output)
        asked = DrainRequest(destinations=[str(cluster[1].address)], timeout_s=5)
        async with LlumletClient(cluster[0].address) as client:
            events = [event async for event in client.drain(asked)]
        assert (events[-1].done, events[-1].num_moved, events[-1].num_cut) == (True, 1, 0)
        assert not cluster[0].status.schedulable
        assert request.owner == cluster[1].id
        assert request.output == expected(list(request.prompt), len(request.output))


async def test_api_streams_and_continues_from_token_ids() -> None:
    async with SimulatedCluster(1, model=FAST, api=True) as cluster, aiohttp.ClientSession() as session:
        base = f"http://{cluster[0].api_address}"
        whole = {"prompt": "one two 3", "max_tokens": 12}
        async with session.post(f"{base}/v1/completions", json=whole, headers={"X-Request-Id": "r-1"}) as answer:
            document = await answer.json()
        text = document["choices"][0]["text"]
        assert document["id"] == "cmpl-r-1"
        assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
        assert "r-1" in cluster[0].status.recent_waiting_requests
        delivered = [int(word) for word in text.split()[:5]]
        rest = {"prompt": [*token_ids_of("one two 3"), *delivered], "max_tokens": 7, "stream": True}
        rest |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{base}/v1/completions", json=rest) as answer:
            lines = [line.decode().strip() for line in [line async for line in answer.content] if line.strip()]
        assert lines[-1] == "data: [DONE]"
        *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        before = "".join(f" {token}" for token in delivered)
        assert before + "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert chunks[0]["choices"][0]["prompt_token_ids"] == rest["prompt"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 7


async def test_api_refuses_and_aborts_when_the_client_leaves() -> None:
    async with SimulatedCluster(1, model=SLOW, api=True) as cluster, aiohttp.ClientSession() as session:
        instance, base = cluster[0], f"http://{cluster[0].api_address}"
        assert instance.metadata.api_server_port == cluster[0].api_address.port  # type: ignore[union-attr]
        async with session.post(f"{base}/v1/completions", json={"prompt": {}}) as answer:
            assert answer.status == 400
        messages = [{"role": "user", "content": "a b"}]
        body = {"messages": messages, "max_tokens": 4000, "stream": True}
        async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            assert instance.status.num_running_requests == 1
        await until(lambda: instance.status.num_running_requests == 0)
        instance.is_schedulable = False
        async with session.post(f"{base}/v1/completions", json={"prompt": "a"}) as answer:
            assert answer.status == 503
        instance.is_schedulable = True
        async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            await instance.kill()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
