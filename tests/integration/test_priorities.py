# SPDX-License-Identifier: Apache-2.0
"""Priorities from a client's header to vLLM's scheduler and to the rescheduler, on real engines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumsched.up.ports import free_port
from tests.support.client import Client, Stream, StreamFailed
from tests.support.control import Control, rescheduling
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import requests

pytestmark = pytest.mark.asyncio

ONLINE, BATCH = "sk-online-0123456789", "sk-batch-0123456789"
PROMPT = [100 + index * 7 % 900 for index in range(64)]
SLOTS = 3
AGEING_S = 8.0
SECONDS = 60.0
SCHEDULER = (
    *("--scheduling-policy", "virtual-usage", "--rescheduling-neutral-load-metric", "virtual_usage"),
    *("--enable-rescheduling", "--colocated-rescheduling-mode", "--rescheduling-pair-cooldown-seconds", "1"),
)


class Cluster:
    """One engine with few slots behind a gateway with keys; another one when it is asked for."""

    def __init__(self, fleet: Fleet, model: Path, logs: Path) -> None:
        cms, keys = f"127.0.0.1:{free_port()}", logs / "keys.json"
        logs.mkdir(parents=True, exist_ok=True)
        keys.touch(0o600)
        online, batch = {"keys": [ONLINE], "best_priority": None}, {"keys": [BATCH], "best_priority": 0}
        keys.write_text(json.dumps({"online": online, "batch": batch}))
        flags = ("--dtype", "float32", "--scheduling-policy", "priority", "--max-num-seqs", str(SLOTS))
        llumlet = ("--llumlet-cms", cms, "--llumlet-priority-ageing-seconds", str(AGEING_S))
        self._spec = ServerSpec(model, max_model_len=4096, num_kv_blocks=300, flags=(*flags, *llumlet))
        self._fleet = fleet
        gateway = ("--api-key-file", str(keys))
        self.control = Control(logs, f"listen://{cms}", model=model, schedulers=[SCHEDULER], gateway=gateway)
        try:
            self.first = self.add("first")
        except BaseException:
            self.control.stop()
            raise

    def add(self, name: str) -> Server:
        (server,) = self._fleet.start(dataclasses.replace(self._spec, name=name, instance_id=name))
        return server

    def client(self, key: str, **headers: str) -> Client:
        return Client(self.control.gateway_url, {"Authorization": f"Bearer {key}", **headers})


@pytest.fixture(scope="module")
def cluster(model_dir: Path, log_dir: Path) -> Iterator[Cluster]:
    with Fleet(log_dir / "priorities") as fleet:
        cluster = Cluster(fleet, model_dir, log_dir / "priorities")
        try:
            yield cluster
        finally:
            cluster.control.stop()


async def begin(client: Client, length: int, **parameters: Any) -> Stream:
    return await client.complete(PROMPT, length, ignore_eos=True, cache_salt=uuid.uuid4().hex, **parameters)


async def is_at(server: Server, stream: Stream) -> bool:
    return any(stream.is_engine_id(info.request_id) for info in await requests(server))


async def until_serves(cluster: Cluster) -> None:
    """Like `Control.knows`, which asks the gateway for its models without a key."""
    async with asyncio.timeout(SECONDS):
        while True:
            async with cluster.client(ONLINE) as client:
                try:
                    await (await begin(client, 1)).result()
                except (StreamFailed, aiohttp.ClientConnectorError):
                    await asyncio.sleep(0.3)
                    continue
            return


async def test_a_header_has_a_waiting_request_overtake_others(cluster: Cluster) -> None:
    await until_serves(cluster)
    async with cluster.client(ONLINE) as usual, cluster.client(ONLINE, **{"X-Priority": "-2"}) as urgent:
        # One slot after the other comes free: who gets them in one step has its first token in no order.
        running = [await begin(usual, 200 + 100 * number) for number in range(SLOTS)]
        for stream in running:
            await stream.wait_for(5)
        # An answer begins with its first token: nobody waits for one before all have been sent.
        beginning = []
        for client, priority in ((usual, 7), (usual, 3), (urgent, -2)):
            own = {} if client is urgent else {"priority": priority}
            beginning.append(asyncio.create_task(begin(client, 8, **own)))
            async with asyncio.timeout(SECONDS):
                while priority not in {one.priority for one in await requests(cluster.first)}:
                    assert not any(stream.done for stream in running)
        late, middle, overtaking = [await (await one).result() for one in beginning]
        for stream in running:
            await stream.result()
        assert overtaking.times[0] < middle.times[0] < late.times[0]


async def test_a_key_may_not_ask_for_more_than_its_best_priority(cluster: Cluster) -> None:
    await until_serves(cluster)
    for headers, parameters in (({"X-Priority": "-1"}, {}), ({}, {"priority": -1})):
        async with cluster.client(BATCH, **headers) as client:
            with pytest.raises(StreamFailed, match=r"403.*this API key allows 0 or more"):
                await begin(client, 1, **parameters)
    async with cluster.client(BATCH, **{"X-Priority": "3"}) as client:
        await (await begin(client, 1)).result()


@pytest.mark.rest
async def test_waiting_request_ages_past_urgent_ones(cluster: Cluster) -> None:
    """More urgent requests than the engine has slots, all the time."""
    await until_serves(cluster)
    stop = asyncio.Event()

    async def urgent(client: Client) -> None:
        while not stop.is_set():
            await (await begin(client, 60)).result()

    async with cluster.client(ONLINE, **{"X-Priority": "-1"}) as online, cluster.client(BATCH) as batch:
        crowd = [asyncio.create_task(urgent(online)) for _ in range(3 * SLOTS)]
        await asyncio.sleep(2)
        began_s = time.monotonic()
        async with asyncio.timeout(2 * SECONDS):
            patient = await (await begin(batch, 8)).result()
        stop.set()
        await asyncio.gather(*crowd)
    assert AGEING_S < patient.times[0] - began_s < AGEING_S + 15


@pytest.mark.rest
async def test_others_move_away_from_an_urgent_request_which_stays(cluster: Cluster) -> None:
    """Although it is the shortest, and by load alone would go first."""
    second = await asyncio.to_thread(cluster.add, "second")
    async with Client(cluster.first.base_url) as past:  # the gateway, which would spread them
        others = [await past.complete(PROMPT * 10, 3400, ignore_eos=True) for _ in range(2)]
        kept = await begin(past, 3400, priority=-1)
        async with asyncio.timeout(SECONDS):
            while not all([await is_at(second, stream) for stream in others]):
                told = json.dumps(await rescheduling(cluster.control.scheduler_url))
                assert not any(stream.done for stream in (kept, *others)), told
                await asyncio.sleep(0.2)
        assert await is_at(cluster.first, kept)
        for stream in (kept, *others):
            await stream.disconnect()
