# SPDX-License-Identifier: Apache-2.0
"""`llumnix rescheduler` as its own process, over a watched CMS and over Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from llumsched.testing import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import until
from tests.support.cms import cms_of

pytestmark = pytest.mark.asyncio
ROOT = Path(__file__).resolve().parents[3]


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
