# SPDX-License-Identifier: Apache-2.0
"""A cluster whose parts share a Redis: two schedulers, a rescheduler of its own, two engines."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from llumsched.up.ports import free_port
from tests.integration.test_cluster import AT, LENGTH, NUM_BLOCKS, PROMPT, assert_relieved, begin, homes
from tests.support.client import Client, Stream
from tests.support.control import Control, start
from tests.support.failures import failure
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


LONG = 2 * LENGTH
"""Of a stream that lasts until others have begun."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    redis: RedisServer
    engines: Sequence[Server]
    control: Control
    rescheduler_url: str
    expected: list[int]
    """The tokens of an undisturbed stream."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_dir: Path, log_dir: Path) -> AsyncIterator[Cluster]:
    logs = log_dir / "redis"
    async with RedisServer() as redis:
        flags = ("--dtype", "float32", "--llumlet-cms", redis.url)
        spec = ServerSpec(model_dir, max_model_len=4096, num_kv_blocks=NUM_BLOCKS, flags=flags)
        specs = [dataclasses.replace(spec, name=name, instance_id=name) for name in ("ra", "rb")]
        with Fleet(logs) as fleet:
            async with Control(logs, redis.url, model=model_dir, schedulers=[(), ()]) as control:
                port = str(free_port())
                arguments = ("--standalone-rescheduling-mode", "--cms", redis.url, "--port", port)
                beside = start("rescheduler", *arguments, log=logs / "rescheduler.log")
                try:
                    engines = await asyncio.to_thread(fleet.start, *specs)
                    async with Client(engines[0].base_url) as client:
                        stream = await (await client.complete(PROMPT, LENGTH, ignore_eos=True)).result()
                    yield Cluster(redis, engines, control, f"http://127.0.0.1:{port}", stream.token_ids)
                finally:
                    await asyncio.to_thread(beside.stop)


async def is_spread(cluster: Cluster, streams: list[Stream]) -> bool:
    found = await homes(cluster.engines, streams)
    return sorted(found.values()) == [len(streams) / 2] * 2


async def begun(client: Client) -> Stream:
    """One that its engine has reported."""
    stream = await begin(client, LONG)
    await stream.wait_for(AT)
    return stream


@pytest.mark.full
async def test_a_hot_engine_is_relieved(cluster: Cluster) -> None:
    """By the rescheduler, which nobody tells of these streams but the engines' own reports."""
    await cluster.control.knows(2)
    await assert_relieved(cluster.rescheduler_url, cluster.engines, cluster.expected)


@failure("the Redis of a cluster stands still", "decoding", "streams go on; new ones by the last view")
@pytest.mark.rest
async def test_streams_continue_while_redis_hangs(cluster: Cluster) -> None:
    await cluster.control.knows(2)
    cluster.redis.signal(signal.SIGSTOP)
    try:
        async with Client(cluster.control.gateway_url) as client:
            streams = [await begin(client) for _ in range(4)]
            for stream in streams:
                await stream.wait_for(AT)
            assert await is_spread(cluster, streams)
            for stream in streams:
                assert (await stream.result()).token_ids == cluster.expected
    finally:
        cluster.redis.signal(signal.SIGCONT)


@failure("one of two schedulers is killed", "decoding", "streams go on; the other one places new ones")
@pytest.mark.rest
async def test_the_other_scheduler_knows_as_much(cluster: Cluster) -> None:
    await cluster.control.knows(2)
    async with Client(cluster.control.gateway_url) as client:
        streams = [await begun(client) for _ in range(4)]
        for pid in (await cluster.control.scheduler_in_use()).pids():
            os.kill(pid, signal.SIGKILL)
        streams += [await begun(client) for _ in range(2)]
        assert await is_spread(cluster, streams)
        for stream in streams:
            assert (await stream.result()).token_ids[:LENGTH] == cluster.expected
    await cluster.control.knows(2)
