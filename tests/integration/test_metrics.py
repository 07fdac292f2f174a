# SPDX-License-Identifier: Apache-2.0
"""What an API server's `/metrics` says of the moves of its engines."""

from __future__ import annotations

import asyncio
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import Engines
from tests.support.client import Client
from tests.support.harness import Server
from tests.support.moves import migrate, move_stream

pytestmark = pytest.mark.asyncio

DEADLINE_SECONDS = 20.0


def sample(server: Server, name: str, **labels: str) -> float:
    """The sum of all that have these labels."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        one.value
        for family in families
        for one in family.samples
        if one.name == f"llumlet_{name}" and labels.items() <= one.labels.items()
    )


async def grown(server: Server, before: float, name: str, **labels: str) -> float:
    """By how much, once it has."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (now := sample(server, name, **labels)) == before:
        assert time.monotonic() < deadline, f"{name} {labels} is still {before}"
        await asyncio.sleep(0.1)
    return now - before


async def test_moves_by_outcome_and_way(engines: Engines, conserved: object) -> None:
    how = {"mode": "live", "transport": "local"}
    moved = {**how, "outcome": "moved", "reason": "", "engine": "0", "trigger_policy": "benchmark"}
    stayed = {"outcome": "stayed", "reason": "unknown_request", "mode": "live"}
    before = [
        sample(engines.a, name, **labels)
        for name, labels in (
            ("migrations_total", moved),
            ("migrations_total", stayed),
            ("migration_copied_bytes_total", how),
            ("migration_stall_seconds_count", how),
            ("migration_stall_seconds_sum", how),
        )
    ]
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(list(range(100, 180)), 200, ignore_eos=True)
        await stream.wait_for(20)
        (refused,) = await migrate(engines.a, engines.b, request_ids=["nobody"])
        assert (refused.phase, refused.reason) == ("stayed", "unknown_request")
        move = await move_stream(engines.a, engines.b, stream)
        await stream.result()
    assert move.live
    assert await grown(engines.a, before[0], "migrations_total", **moved) == 1
    assert await grown(engines.a, before[1], "migrations_total", **stayed) == 1
    assert await grown(engines.a, before[2], "migration_copied_bytes_total", **how) == move.copied_bytes
    assert await grown(engines.a, before[3], "migration_stall_seconds_count", **how) == 1
    stall_ms = sum(move.phase_ms.get(phase, 0.0) for phase in ("freezing", "committing"))
    assert 1e3 * await grown(engines.a, before[4], "migration_stall_seconds_sum", **how) == pytest.approx(stall_ms)
