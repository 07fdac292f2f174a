# SPDX-License-Identifier: Apache-2.0
"""The rescheduler inside the scheduler process."""

from __future__ import annotations

import aiohttp
import pytest

from llumsched.policy.document import Mode, load_policy
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.scheduler.process import SchedulerConfig, serve
from llumsim.live import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import until


@pytest.mark.asyncio
async def test_it_balances_what_reports_to_the_scheduler() -> None:
    policy = load_policy("load-balance", Mode.FULL)
    config = SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", rescheduling=ReschedulingConfig())
    running = await serve(config)
    try:
        async with SimulatedCluster(3, str(running.store.address), model=engine_model(speed=0.05)) as cluster:
            for number in range(15):
                cluster[0].submit(200 + number, 1000)
            await until(lambda: all(len(one.engine.requests) > 2 for one in cluster.instances.values()))
            url = f"http://127.0.0.1:{running.port}"
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
                async with client.get(f"{url}/debug/rescheduling") as answer:
                    shown = await answer.json()
                async with client.get(f"{url}/metrics") as answer:
                    text = await answer.text()
        assert {move["policy"] for move in shown["moves"]} == {"neutral_load"}
        assert "scheduler_rescheduling_total{" in text
    finally:
        await running.close()
