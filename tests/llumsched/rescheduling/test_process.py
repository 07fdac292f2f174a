# SPDX-License-Identifier: Apache-2.0
"""`llumnix rescheduler` as its own process, over a watched CMS and over Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from llumlet.contract.block_hashes import chain, root_of
from llumlet.contract.server import serve as serve_llumlet
from llumlet.contract.types import CacheChanges
from llumsched.rescheduling.standalone import serve as serve_rescheduler
from llumsim.live import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import FakeAgent, until
from tests.llumsched.rescheduling.cluster import balancing, instance
from tests.support.cms import cms_of, embedded_store

pytestmark = pytest.mark.asyncio
ROOT = Path(__file__).resolve().parents[3]
SIZE = 16
HELD = b"".join(chain(range(200), SIZE, root_of(SIZE)))


@pytest_asyncio.fixture(params=["watch", "redis"])
async def cms(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async with cms_of(request.param) as url:
        yield url


async def test_it_balances_and_says_so(cms: str) -> None:
    command = [sys.executable, "-m", "llumsched.cli", "rescheduler", "--standalone-rescheduling-mode"]
    command += ["--cms", cms, "--port", "0"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    async with SimulatedCluster(2, cms, model=engine_model(speed=0.05)) as cluster:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environ)
        assert process.stderr is not None
        try:
            for number in range(12):
                cluster[0].submit(200 + number, 1000)
            async with asyncio.timeout(120):
                line = (await process.stderr.readline()).decode()
            assert "neutral_load" in line, line
            assert "secret" not in line
            url = line.split()[-1]
            await until(lambda: cluster[1].engine.requests)
            await until(lambda: len(cluster[0].engine.requests) < 9)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
                async with client.get(f"{url}/healthz") as answer:
                    assert (answer.status, (await answer.json())["instances"]) == (200, 2)
                async with client.get(f"{url}/metrics") as answer:
                    text = await answer.text()
                async with client.get(f"{url}/debug/rescheduling?passes=5&moves=3") as answer:
                    shown = await answer.json()
                async with client.get(f"{url}/debug/rescheduling?passes=many") as answer:
                    assert answer.status == 400
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                _, err = await asyncio.wait_for(process.communicate(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise
        assert process.returncode == 0, err
    assert (
        'scheduler_rescheduling_total{rescheduling_req_select_order="SR",rescheduling_req_select_rule="TOKEN"}' in text
    )
    assert "scheduler_rescheduling_failed_total 0.0" in text
    assert 1 <= len(shown["passes"]) <= 5
    assert shown["moves"][0]["policy"] == "neutral_load"
    assert (shown["moves"][0]["source"], shown["moves"][0]["destination"]) == ("sim-0", "sim-1")


async def test_it_hears_what_caches_hold_and_weighs_it() -> None:
    """The planner's `test_cached_blocks_at_the_destination_are_not_copied`, over real streams."""
    config = balancing(interval_ms=0, link_bytes_per_s=4e10)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(embedded_store())
        for name, load, held in (("a", 0.9, HELD), ("b", 0.5, b""), ("c", 0.52, HELD)):
            agent = FakeAgent(name)
            agent.cache = [CacheChanges(number=1, reset=True, stored=held)]
            llumlet = await stack.enter_async_context(await serve_llumlet(agent))
            life = {"incarnation": "i-1", "update_id": 1, "llumlet_port": llumlet.port}
            one = instance(name, load, bytes_per_block=1 << 28, cache_block_size=SIZE, **life)
            assert one.status is not None
            store.view.put_metadata(one.metadata)
            assert store.view.put_status(one.status)
        address = str(store.address)
        blind = await serve_rescheduler(address, config)
        stack.push_async_callback(blind.close)
        aware = await serve_rescheduler(address, config, num_cached_blocks=1000, port=0)
        stack.push_async_callback(aware.close)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        text = ""
        async with asyncio.timeout(60):
            known = "scheduler_prefix_index_blocks 12.0", "scheduler_prefix_instances_in_sync 3.0"
            while not all(one in text for one in known):
                await asyncio.sleep(0.02)
                text = await _metrics(client, aware.port)
        await until(lambda: len(blind.store.view) == 3)
        assert [result.num_moves for result in blind.rescheduler.run_pass().results] == [0]
        assert [result.num_moves for result in aware.rescheduler.run_pass().results] == [1]
        [move] = aware.rescheduler.records.moves
        assert (move.move.source, move.move.destination) == ("a", "c")


async def _metrics(client: aiohttp.ClientSession, port: int) -> str:
    async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
        return await answer.text()
