# SPDX-License-Identifier: Apache-2.0
"""The rescheduler with its defaults over a cluster of simulated instances, which report over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from llumlet.contract.types import Reason
from llumsched.cluster.view import View
from llumsched.cms.embedded import EmbeddedStore
from llumsched.rescheduling.executing.records import Outcome
from llumsched.rescheduling.planning.moves import Purpose
from llumsched.rescheduling.rescheduler import Rescheduler
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim.live import SimulatedCluster, SimulatedInstance, SimulatedRequest, engine_model
from tests.llumlet.fake_agent import until
from tests.llumsched.rescheduling.cluster import instance

pytestmark = pytest.mark.asyncio

MODEL = engine_model(speed=0.1, num_blocks=1024)
"""Of 16,384 tokens; a request decodes for longer than a test lasts."""


@contextlib.asynccontextmanager
async def cluster_of(store: EmbeddedStore, size: int) -> AsyncIterator[SimulatedCluster]:
    async with SimulatedCluster(size, str(store.address), model=MODEL) as cluster:
        await until(lambda: len(store.view) == size and all(one.status for one in store.view.values()))
        yield cluster


@contextlib.asynccontextmanager
async def rescheduling(view: View, config: ReschedulingConfig | None = None) -> AsyncIterator[Rescheduler]:
    rescheduler = Rescheduler(view, config or ReschedulingConfig())
    task = asyncio.create_task(rescheduler.run())
    try:
        yield rescheduler
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rescheduler.close()


def used(one: SimulatedInstance) -> float:
    return 1 - one.engine.blocks.num_free / one.engine.config.num_blocks


async def load(one: SimulatedInstance, num_requests: int, length: int = 300) -> list[SimulatedRequest]:
    requests = [one.submit(length + 7 * number, 1000) for number in range(num_requests)]
    await until(lambda: all(request.output for request in requests))
    return requests


async def test_defaults_even_out_a_skewed_cluster(store: EmbeddedStore) -> None:
    async with cluster_of(store, 4) as cluster:
        requests = await load(cluster[0], 24)
        assert used(cluster[0]) > 0.5
        async with rescheduling(store.view) as rescheduler:
            await until(lambda: max(map(used, cluster.instances.values())) < 0.25)
        assert all(used(one) > 0.05 for one in cluster.instances.values())
        hops = [len(request.moved_through) for request in requests]
        assert max(hops) == 1, "nobody moves twice"
        assert [dict(record.refusals) for record in rescheduler.records.moves if record.refusals] == []
        assert sum(one.engine.num_preemptions for one in cluster.instances.values()) == 0


async def test_a_new_empty_instance_fills(store: EmbeddedStore) -> None:
    async with cluster_of(store, 2) as cluster, rescheduling(store.view):
        for one in list(cluster.instances.values()):
            await load(one, 16)
        new = await cluster.add()
        await until(lambda: used(new) > 0.2)


async def test_an_instance_that_closes_is_emptied_over_all_others(store: EmbeddedStore) -> None:
    async with cluster_of(store, 4) as cluster:
        await load(cluster[0], 8, 40)
        cluster[0].is_schedulable = False
        cluster[0].tell()
        async with rescheduling(store.view) as rescheduler:
            await until(lambda: not cluster[0].engine.requests)
        assert all(one.engine.requests for one in list(cluster.instances.values())[1:])
        assert {record.move.policy for record in rescheduler.records.moves if record.num_moved} >= {"neutral_failover"}


async def test_a_destination_that_refuses_is_passed_over(store: EmbeddedStore) -> None:
    async with cluster_of(store, 3) as cluster:
        cluster[1].agent.refusals["reserve"] = Reason.DESTINATION_FULL
        await load(cluster[0], 12)
        async with rescheduling(store.view) as rescheduler:
            await until(lambda: used(cluster[2]) > 0.1)
        refused = [record for record in rescheduler.records.moves if record.refusals]
        assert len(refused) == 1, "and then it is left alone"
        assert refused[0].outcome is Outcome.STAYED


async def test_a_hanging_source_holds_up_nobody(store: EmbeddedStore) -> None:
    config = ReschedulingConfig(grpc_timeout_s=300.0)
    async with cluster_of(store, 4) as cluster:
        for number in (0, 1):
            await load(cluster[number], 12)
        cluster[0].agent.delays["list_requests"] = 300.0
        async with rescheduling(store.view, config) as rescheduler:
            await until(lambda: used(cluster[1]) < 0.25)
            assert any(record.outcome is Outcome.OPEN for record in rescheduler.records.moves)


async def test_the_interval_is_the_upper_bound_and_load_wakes_earlier() -> None:
    view = View()
    async with rescheduling(view, ReschedulingConfig(interval_ms=60_000)) as rescheduler:
        passes = rescheduler.records.passes
        await until(lambda: len(passes) == 1)
        hot = instance("a", 0.9, incarnation="x")
        view.put_metadata(hot.metadata)
        view.put_status(hot.status)
        await until(lambda: len(passes) == 2)
        assert passes[-1].woken_by == "load"
        for number in range(20):
            little = instance("a", 0.9 + number / 1000, incarnation="x", update_id=number + 1).status
            view.put_status(little)
        await asyncio.sleep(0.1)
        assert len(passes) == 2, "little by little wakes nobody"
        view.remove("a")
        await until(lambda: len(passes) == 3)
    async with rescheduling(view, ReschedulingConfig(interval_ms=30)) as rescheduler:
        await until(lambda: len(rescheduler.records.passes) >= 3)
        assert rescheduler.records.passes[-1].woken_by == "interval"


async def test_imminent_preemption_wakes_once() -> None:
    view, update_ids = View(), itertools.count(1)

    def tell(num_lacking: int) -> None:
        one = instance("a", 0.9, incarnation="x", update_id=next(update_ids), num_lacking_blocks=num_lacking)
        view.put_metadata(one.metadata)
        view.put_status(one.status)

    async with rescheduling(view, ReschedulingConfig(interval_ms=60_000)) as rescheduler:
        passes = rescheduler.records.passes
        tell(0)
        await until(lambda: len(passes) == 2)
        for expected in (3, 4):
            tell(1)
            await until(lambda expected=expected: len(passes) == expected)
            assert passes[-1].woken_by == "shortage"
            tell(2)
            tell(0)
            await asyncio.sleep(0.1)
            assert len(passes) == expected


async def test_many_changes_make_few_passes() -> None:
    view, began_s = View(), time.monotonic()
    async with rescheduling(view, ReschedulingConfig(debounce_ms=50)) as rescheduler:
        for number in range(100):
            one = instance("a", (number % 10) / 10, incarnation="x", update_id=number + 1)
            view.put_metadata(one.metadata)
            view.put_status(one.status)
            await asyncio.sleep(0.002)
        assert len(rescheduler.records.passes) <= (time.monotonic() - began_s) / 0.05 + 2


async def test_a_lost_store_is_not_planned_with() -> None:
    now_s = 100.0
    view = View(lambda: now_s)
    for one in (instance("a", 0.9), instance("b")):
        view.put_metadata(one.metadata)
        view.put_status(one.status)
    rescheduler = Rescheduler(view, ReschedulingConfig(), clock=lambda: now_s)
    view.connected, view.heard_s = False, now_s
    now_s = 103.0
    lost = rescheduler.run_pass()
    assert lost.skipped == "the view is 3 s old: its store is lost"
    assert lost.moves == ()
    now_s = 300.0
    view.connected = True
    for one in (instance("a", 0.9, update_id=1), instance("b", update_id=1)):
        view.put_status(one.status)
    found = rescheduler.run_pass()
    assert len(found.moves) == 1
    assert found.to_dict()["policies"][-1]["num_moves"] == 1
    await rescheduler.close()


async def test_a_pass_that_breaks_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    rescheduler = Rescheduler(View(), ReschedulingConfig(interval_ms=10, debounce_ms=1), registry=registry)

    def broken(*_: object) -> None:
        raise RuntimeError("of the test")

    rescheduler._plan = broken
    task = asyncio.create_task(rescheduler.run())
    name = "scheduler_rescheduling_broken_passes_total"
    await until(lambda: (registry.get_sample_value(name) or 0) >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "a rescheduling pass failed" in caplog.text
    last = rescheduler.records.passes[-1]
    assert (last.number, last.skipped) == (len(rescheduler.records.passes), "it failed: RuntimeError('of the test')")
    assert last.woken_by == "interval"


async def test_a_policy_that_breaks_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    rescheduler = Rescheduler(View(), ReschedulingConfig(), registry=registry)
    selector = SimpleNamespace(name="broken", purpose=Purpose.BALANCE, pair=lambda *_: 1 / 0)
    first, *rest = rescheduler._policies
    rescheduler._policies = (replace(first, selector=selector), *rest)
    record = rescheduler.run_pass()
    assert [one["error"] for one in record.to_dict()["policies"]].count("ZeroDivisionError('division by zero')") == 1
    assert f"rescheduling policy {first.name} failed" in caplog.text
    assert registry.get_sample_value("scheduler_rescheduling_broken_passes_total") == 1
    assert not record.skipped
    await rescheduler.close()


@pytest.mark.parametrize(("asked", "told"), [(0, []), (1, [3]), (2, [2, 3]), (100, [1, 2, 3])])
async def test_as_many_records_as_are_asked_for(asked: int, told: list[int]) -> None:
    rescheduler = Rescheduler(View(), ReschedulingConfig())
    for _ in range(3):
        rescheduler.run_pass()
    shown = rescheduler.records.to_dict(asked, asked)
    assert [one["number"] for one in shown["passes"]] == told
    assert shown["moves"] == []


async def test_an_interval_of_zero_makes_no_pass() -> None:
    async with rescheduling(View(), replace(ReschedulingConfig(), interval_ms=0)) as rescheduler:
        await asyncio.sleep(0.05)
        assert not rescheduler.records.passes
