# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.gateway`: its ratios, and the reports by which a scheduler knows mock engines."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.gateway import Target, _row, with_ratios
from benchmarks.reporting import report
from llumlet.process.tasks import cancel
from llumsched.cms.embedded import EmbeddedStore
from tests.llumlet.fake_agent import until
from tests.llumsched.conftest import store

__all__ = ["store"]


def _measured(name: str, latency_s: float, cpu_s: float, *, is_slow: bool = False, workers: int = 1) -> Target:
    target = Target(name, workers, 0, None, is_slow)
    for stream in (True, False):
        target.latencies_s[stream] = [latency_s] * 10
        target.elapsed_s[stream], target.cpu_s[stream] = 1.0, cpu_s
    return target


def test_ratios_are_of_the_same_load() -> None:
    found = [
        _measured("direct", 0.010, 0.0),
        _measured("ours", 0.015, 1.0),
        _measured("ours", 0.011, 3.0, workers=2),
        _measured("ours, TLS", 0.020, 2.0),
        _measured("direct", 0.100, 0.0, is_slow=True),
        _measured("ours", 0.110, 4.0, is_slow=True),
    ]
    rows = with_ratios([_row(target, stream=True) for target in found])
    assert [row["p50_to_direct"] for row in rows] == [1.0, 1.5, 1.1, 2.0, 1.0, 1.1]
    assert [row["cpu_to_plain"] for row in rows] == [0.0, 1.0, 3.0, 2.0, 0.0, 1.0]


@pytest.mark.asyncio
async def test_mock_engines_are_known_to_a_scheduler(store: EmbeddedStore) -> None:
    reporting = asyncio.create_task(report(str(store.address), "mock", [9001, 9002]))
    await until(lambda: sum(one.status is not None for one in store.view.values()) == 2)
    assert {str(one.api_server) for one in store.view.values()} == {"127.0.0.1:9001", "127.0.0.1:9002"}
    await cancel(reporting)
