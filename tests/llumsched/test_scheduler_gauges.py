# SPDX-License-Identifier: Apache-2.0
"""The gauges of instances: what Prometheus reads, and that requests are placed while it does."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from llumlet.tasks import end
from llumsched.cms.view import View
from llumsched.scheduler.gauges import AT_ONCE, Gauge, exposition
from llumsched.scheduler.metrics import SchedulerMetrics
from llumsched.scheduling.account import Account
from llumsched.scheduling.dispatch import Dispatcher
from llumsched.scheduling.load import Request
from llumsched.scheduling.policy import Mode, load_policy
from tests.llumsched import scheduling_cases as cases

pytestmark = pytest.mark.asyncio


async def test_what_is_written_is_what_is_read() -> None:
    loads = [cases.load(name, num_used_gpu_tokens=number) for number, name in enumerate(("a", 'q"\\\n{}', "é"))]
    gauges = [
        Gauge("tokens", "Of each.", lambda load: load.status.num_used_gpu_tokens),
        Gauge("ratio", "Of all.", lambda load: math.inf),
    ]
    text = b"".join(await exposition(gauges, loads, lambda load: {"id": load.instance.id, "kind": "x"})).decode()
    families = list(text_string_to_metric_families(text))
    assert [(family.name, family.documentation, family.type) for family in families] == [
        ("tokens", "Of each.", "gauge"),
        ("ratio", "Of all.", "gauge"),
    ]
    ids = [load.instance.id for load in loads]
    assert [(sample.labels, sample.value) for sample in families[0].samples] == [
        ({"id": id, "kind": "x"}, number) for number, id in enumerate(ids)
    ]
    assert [sample.value for sample in families[1].samples] == [math.inf] * 3


async def test_requests_are_placed_during_a_scrape() -> None:
    view, registry, num_instances = View(), CollectorRegistry(), 2 * AT_ONCE
    dispatcher = Dispatcher(view, load_policy("load-balance", Mode.FULL), Account(time.monotonic, 10.0), time.monotonic)
    for number in range(num_instances):
        cases.put(view, f"i{number}")
    placed = 0

    async def place() -> None:
        nonlocal placed
        while True:
            dispatcher.schedule(Request(f"r{placed}", "m", 10))
            placed += 1
            await asyncio.sleep(0)

    placing = asyncio.create_task(place())
    text = (await SchedulerMetrics(dispatcher, registry).exposition()).decode()
    await end(placing)
    num_samples = sum(line.startswith("instance_cms_") for line in text.splitlines())
    assert num_samples >= 20 * num_instances
    assert placed >= num_samples // AT_ONCE
