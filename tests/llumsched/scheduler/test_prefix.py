# SPDX-License-Identifier: Apache-2.0
"""The scheduler process and prefix caches, over real sockets: llumlets that tell, gateways that ask."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llumlet.contract.block_hashes import chain, root_of
from llumlet.contract.server import serve as serve_llumlet
from llumlet.contract.types import CacheChanges
from llumsched.policy.document import Mode, load_policy
from llumsched.scheduler.process import SchedulerConfig, serve
from tests.llumlet.fake_agent import FakeAgent, until
from tests.llumsched import cases
from tests.llumsched.scheduler.test_http import Client

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

SIZE = 16
PROMPT = list(range(200))


def named(token_ids: list[int]) -> dict[str, Any]:
    names = b"".join(chain(token_ids, SIZE, root_of(SIZE)))
    return {
        "prompt_num_tokens": len(token_ids),
        "prompt_block_size": SIZE,
        "prompt_blocks": b64encode(names).decode(),
    }


class Cluster(Client):
    """Two instances whose llumlets say what they hold."""

    agents: dict[str, FakeAgent]


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        policy = load_policy("prefix-cache", Mode.FULL)
        running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
        stack.push_async_callback(running.close)
        found = Cluster(running, await stack.enter_async_context(aiohttp.ClientSession()))
        found.agents = {}
        for number, name in enumerate("ab"):
            agent = found.agents[name] = FakeAgent(name)
            held = chain(PROMPT, SIZE, root_of(SIZE)) if name == "b" else ()
            agent.cache = [CacheChanges(number=1, reset=True, stored=b"".join(held))]
            server = await serve_llumlet(agent)
            stack.push_async_callback(server.stop, grace_s=0.0)
            fields = {"llumlet_port": server.address.port, "incarnation": "i-1", "cache_block_size": SIZE}
            cases.put(running.view, name, api_server_port=8000 + number, **fields)
        hits = running.dispatcher.hits
        assert hits is not None
        await until(lambda: hits.usual_block_size and len(hits.index) == 12)
        yield found


async def test_a_prompt_goes_where_its_prefix_is(cluster: Cluster) -> None:
    assert await cluster.schedule("r", **named(PROMPT)) == "b"
    assert await cluster.schedule("r2", **named([9, *PROMPT])) == "a"
    sent = cluster.running.dispatcher.ledger.in_flight.of("b")
    assert (sent.num_tokens, sent.num_uncomputed_prefill_tokens) == (200, 8)
    assert sent.num_uncomputed_prefill_pairs == sum(range(193, 201))
    (request,) = cluster.agents["b"].asked("watch_cache")
    assert (request.engine_id, request.incarnation) == ("b", "i-1")


async def test_the_answer_says_which_blocks_to_name_and_does_not_echo_them(cluster: Cluster) -> None:
    _, answer = await cluster.post("/schedule", {"id": "r", "model": "m", **named(PROMPT)})
    assert answer["scheduling_result"][0]["prompt_block_size"] == SIZE
    assert not {"prompt_blocks", "prompt_block_size"} & answer.keys()


async def test_token_ids_do_as_well(cluster: Cluster) -> None:
    assert await cluster.schedule("r", prompt_token_ids=PROMPT) == "b"
    _, text = await cluster.post("/debug/schedule", {"model": "m", "prompt_token_ids": PROMPT})
    told = {one["instance_id"]: one["kv_cache_hit_len"] for one in text["stages"][0]["instances"]}
    assert told == {"a": 0, "b": 192}


async def test_names_that_are_none_are_refused(cluster: Cluster) -> None:
    for wrong in ({"prompt_blocks": "YWJj"}, {"prompt_block_size": 0}, {"prompt_blocks": "?"}, {"prompt_blocks": 5}):
        status, said = await cluster.post("/schedule", {"id": "r", "model": "m", **named(PROMPT), **wrong})
        assert status == 400, said
        assert "prompt_blocks" in said


async def test_metrics_say_what_was_hit_and_how_much_is_known(cluster: Cluster) -> None:
    await cluster.schedule("r", **named(PROMPT))
    text = (await cluster.get("/metrics"))[1]
    for line in (
        "scheduler_prefix_index_blocks 12.0",
        "scheduler_prefix_instances_in_sync 2.0",
        "scheduler_prefix_resyncs_total 0.0",
        "scheduler_prefix_blocks_left_out_total 0.0",
        "scheduler_prompt_tokens_total 200.0",
        "scheduler_prefix_hit_tokens_total 192.0",
        'request_prefix_cache_hit_percent_bucket{le="90.0"} 0.0',
        'request_prefix_cache_hit_percent_bucket{le="100.0"} 1.0',
    ):
        assert line in text, text


async def test_policy_without_hits_follows_no_cache() -> None:
    async with AsyncExitStack() as stack:
        policy = load_policy("load-balance", Mode.FULL)
        for cache_aware in (False, True):
            config = SchedulerConfig(
                policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0, cache_aware=cache_aware
            )
            running = await serve(config)
            stack.push_async_callback(running.close)
            assert (running.dispatcher.hits is not None) == cache_aware
            client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
            cases.put(running.view, "a", api_server_port=8000, cache_block_size=SIZE)
            _, answer = await client.post("/schedule", {"id": "r", "model": "m", **named(PROMPT)})
            assert ("prompt_block_size" in json.dumps(answer)) == cache_aware
