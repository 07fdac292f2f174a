# SPDX-License-Identifier: Apache-2.0
"""The gauges of instances: what Prometheus reads, and that requests are placed while it does."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from llumlet.process.tasks import end
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.document import Mode, load_policy
from llumsched.request import Request
from llumsched.scheduler.gauges import AT_ONCE, Gauge, exposition
from llumsched.scheduler.scheduler_metrics import SchedulerMetrics
from tests.llumsched import cases

pytestmark = pytest.mark.asyncio


async def test_gauges_equal_the_columns() -> None:
    names = "a", 'q"\\\n{}', "é"
    table = cases.table(*(cases.instance(name, num_used_gpu_tokens=number) for number, name in enumerate(names)))
    gauges = [
        Gauge("tokens", "Of each.", lambda columns: columns["num_used_gpu_tokens"]),
        Gauge("ratio", "Of all.", lambda columns: np.full(len(columns), math.inf)),
    ]
    text = b"".join(await exposition(gauges, table, table.instances, lambda one: {"id": one.id, "kind": "x"})).decode()
    families = list(text_string_to_metric_families(text))
    assert [(family.name, family.documentation, family.type) for family in families] == [
        ("tokens", "Of each.", "gauge"),
        ("ratio", "Of all.", "gauge"),
    ]
    assert [(sample.labels, sample.value) for sample in families[0].samples] == [
        ({"id": id, "kind": "x"}, number) for number, id in enumerate(names)
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
