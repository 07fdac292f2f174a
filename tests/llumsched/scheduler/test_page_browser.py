# SPDX-License-Identifier: Apache-2.0
"""The web page in a real browser: load, moves, health and age as they are told, in light and dark.

The screenshots are kept where PAGE_SCREENSHOTS says, to be looked at.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry

from llumlet.contract.types import Health, InstanceMetadata, InstanceStatus
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.contract import Attained
from llumsched.dispatch.dispatcher import Dispatcher, Knowledge
from llumsched.latency.fitting import Coefficients
from llumsched.latency.profile import Profile
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.prefix.hits import PrefixHits
from llumsched.prefix.index import PrefixIndex
from llumsched.rescheduling.executing.records import MoveRecord, Outcome, Records
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.scaling.load import Group
from llumsched.scaling.scaler import Advice
from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsched.scheduler import web_page as events
from llumsched.scheduler.overview import Overview
from llumsched.scheduler.recent import Attainment, RecentShares, Share
from llumsched.scheduler.scale_advice import Scaling
from tests.llumsched.scheduler import chromium

TOTAL = 32_768
PARTS = ("attainment", "cached", "urgent", "wanted", "objectives", "scaling")
"""Of the page, shown where there is something to show."""


class Cluster:
    """A view and records that a test changes."""

    def __init__(self) -> None:
        self.view = View()
        self.records = Records()
        self._updates = 0
        self._moves = 0

    def instance(self, name: str) -> None:
        self.view.put_metadata(
            InstanceMetadata(instance_id=name, incarnation="1", instance_type="neutral", model="Qwen/Qwen2.5-7B",
                             ip="10.0.0.7", api_server_port=8000, node_id="node-7")
        )  # fmt: skip

    def load(
        self, name: str, kv: float, running: int, waiting: int = 0, health: Health = Health.OK, *, decodes: int = 0,
        urgent: int = 0, prefill_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._updates += 1
        self.view.put_status(
            InstanceStatus(instance_id=name, incarnation="1", update_id=self._updates, schedulable=True, health=health,
                           num_total_gpu_tokens=TOTAL, num_used_gpu_tokens=int(kv * TOTAL),
                           num_running_requests=running, num_waiting_requests=waiting, num_urgent_requests=urgent,
                           scheduler_running_to_decode_requests_num=decodes,
                           num_uncomputed_tokens_all_waiting_prefills=prefill_tokens)
        )  # fmt: skip

    def dispatcher(self) -> Dispatcher:
        """By the objectives of the policy `slo`."""
        account = Account(time.monotonic, 10.0)
        profile = Profile("Qwen/Qwen2.5-7B", Coefficients(0.01, 1e-4, 1e-8, 1e-4, 1e-6), 100, 0.01, "here")
        policy = load_policy("slo", Mode.FULL, Overrides(constants={"ttft_slo": 500.0, "tpot_slo": 50.0}))
        hits = PrefixHits(PrefixIndex(1000))
        return Dispatcher(self.view, policy, account, time.monotonic, knowledge=Knowledge([profile], hits))

    def begin(self, source: str, destination: str) -> MoveRecord:
        self._moves += 1
        selection = Selection(Unit.NUM_REQ, Order.SR, 1.0)
        move = Move("neutral_load", Purpose.BALANCE, source, destination, selection, 1024.0)
        record = MoveRecord(self._moves, move, time.time())
        self.records.began(record)
        return record

    def settle(self, record: MoveRecord, outcome: Outcome = Outcome.MOVED, **refusals: int) -> None:
        record.outcome, record.seconds = outcome, time.time() - record.began_s
        record.num_selected = 1
        if outcome is Outcome.MOVED:
            record.num_moved, record.moved_tokens, record.copied_bytes = 1, 1024, 117_440_512
        record.refusals.update(refusals)
        self.records.changed(record)


def keep(file: Path) -> None:
    directory = os.environ.get("PAGE_SCREENSHOTS")
    if directory:
        (Path(directory) / file.name).write_bytes(file.read_bytes())


@pytest.mark.asyncio
async def test_the_page_shows_load_moves_health_and_age(tmp_path: Path) -> None:
    cluster, app = Cluster(), web.Application()
    events.add_routes(app, cluster.view, cluster.records)
    async with TestServer(app) as server, chromium.tab(tmp_path) as page:
        await page.open(str(server.make_url("/")))
        assert "No instance reports here" in await page.until(
            "!document.getElementById('empty').hidden && empty.innerText"
        )

        names = [f"engine-{index}" for index in range(4)]
        for name in names:
            cluster.instance(name)
        for step in range(12):
            for index, name in enumerate(names):
                cluster.load(
                    name, 0.2 + (0.06 * step if index == 0 else 0.01 * step * index), 4 + index + step, step // 4
                )
            await asyncio.sleep(0.12)
        await page.until("window.cluster.instances.size == 4")
        await page.until("document.querySelectorAll('#rows tr').length == 4")
        await page.until("document.querySelector('[data-id=engine-0] b').innerText == '86 %'")
        assert await page.value("document.getElementById('model').innerText") == "Qwen/Qwen2.5-7B"
        assert await page.value("document.getElementById('total-open').innerText") == "4 of 4"
        assert await page.value("document.getElementById('total-running').innerText") == "66"
        await page.until("document.getElementById('link').innerText == 'live'")
        assert await page.value("window.cluster.instances.get('engine-0').samples.length") > 3

        under_way = cluster.begin("engine-0", "engine-3")
        await page.until("document.querySelectorAll('path.arc.open').length == 1")
        refused = cluster.begin("engine-0", "engine-1")
        cluster.settle(refused, Outcome.STAYED, destination_full=1)
        cluster.settle(under_way)
        cluster.load("engine-0", 0.55, 12)
        cluster.load("engine-3", 0.62, 19)
        await page.until("document.getElementById('move-rows').innerText.includes('stayed: destination_full 1')")
        await page.until("document.querySelectorAll('path.arc.open').length == 0")
        await page.until("document.getElementById('total-moves').innerText == '1'")
        assert "112 MiB" in await page.value("document.getElementById('move-rows').innerText")

        cluster.load("engine-2", 0.4, 9, health=Health.HUNG)
        await page.until("document.querySelector('[data-id=engine-2] .bad')?.innerText == 'hung'")
        again = cluster.begin("engine-2", "engine-1")
        await page.until("document.querySelectorAll('path.arc.open').length == 1")
        await page.screenshot(tmp_path / "page-light.png")
        await page.show_in("dark")
        await page.value("document.querySelector('[data-metric=running]').click()")
        await page.until("document.querySelector('[data-metric=running]').ariaPressed == 'true'")
        await page.screenshot(tmp_path / "page-dark.png")
        for file in ("page-light.png", "page-dark.png"):
            assert (tmp_path / file).stat().st_size > 20_000
            keep(tmp_path / file)
        cluster.settle(again)

        cluster.view.remove("engine-3")
        await page.until("document.querySelectorAll('#rows tr').length == 3")
        cluster.view.connected = False
        await page.until("document.getElementById('link').innerText.includes('the CMS is lost')")
        assert page.problems == []


@pytest.mark.asyncio
async def test_a_name_is_text_and_a_scheduler_that_is_gone_is_said_and_found_again(tmp_path: Path) -> None:
    cluster, app = Cluster(), web.Application()
    name = "<img src=x onerror=alert(1)>"
    cluster.instance(name)
    cluster.load(name, 0.5, 1)
    events.add_routes(app, cluster.view, None)
    server = TestServer(app)
    await server.start_server()
    async with chromium.tab(tmp_path) as page:
        await page.open(str(server.make_url("/")))
        assert await page.until("document.querySelector('td.id')?.innerText") == name
        assert "does not run in this scheduler" in await page.value("document.getElementById('no-moves').innerText")
        port = server.port
        await server.close()
        await page.until("document.getElementById('link').innerText.includes('scheduler not reached')")
        later = web.Application()
        events.add_routes(later, View(), None)
        async with TestServer(later, port=port):
            await page.until("document.getElementById('link').innerText == 'live'")
            await page.until("document.querySelectorAll('#rows tr').length == 0")


@pytest.mark.asyncio
async def test_the_page_shows_objectives_and_how_many_instances_are_wanted(tmp_path: Path) -> None:
    cluster, app, registry = Cluster(), web.Application(), CollectorRegistry()
    dispatcher = cluster.dispatcher()
    attainment, cached = Attainment(time.monotonic), RecentShares(time.monotonic)
    config = ScalingConfig(bounds=Bounds(1, 8))
    assert config.bounds is not None
    scaling = Scaling(config, config.bounds, cluster.view, dispatcher.table, registry)
    events.add_routes(app, cluster.view, cluster.records, Overview(dispatcher, attainment, cached, scaling))
    async with TestServer(app) as server, chromium.tab(tmp_path) as page:
        await page.open(str(server.make_url("/")))
        await page.until("window.cluster !== undefined")
        hidden = [await page.value(f"document.getElementById('{name}').hidden") for name in PARTS]
        assert hidden == [True] * len(PARTS)

        for index in range(3):
            cluster.instance(f"engine-{index}")
            cluster.load(f"engine-{index}", 0.3 * index, 8, decodes=8, urgent=index, prefill_tokens=4000 * index)
        scaling.advice = [Advice(Group("Qwen/Qwen2.5-7B", "neutral"), 4, 3, 1, 0, 1.31, "3.93 are needed", [])]
        attainment.told("gateway", [])
        attainment.told("gateway", [Attained("Qwen/Qwen2.5-7B", 88, 12)])
        cached.add("", Share(640, 1000))
        await page.until("document.getElementById('total-attainment').innerText == '88 %'")
        await page.until("document.getElementById('total-cached').innerText == '64 %'")
        await page.until("document.getElementById('total-urgent').innerText == '3'")
        await page.until("document.getElementById('total-wanted').innerText == '4, 3 serve'")
        await page.until("document.getElementById('objective-rows').innerText.includes('88 %')")
        await page.until("document.getElementById('scaling-rows').innerText.includes('3.93 are needed')")
        late = await page.value("document.querySelector('[data-id=engine-2] .number.bad').innerText")
        assert 800 < int(late.removesuffix(" ms")) < 900  # 8,000 tokens in four steps, at 0.1 ms each
        title = await page.value("document.querySelector('[data-id=engine-1]').cells[7].title")
        assert title.endswith("% left of 500 ms")
        assert await page.value("document.querySelector('[data-id=engine-2]').cells[4].innerText") == "2"
        await page.screenshot(tmp_path / "page-objectives.png")
        keep(tmp_path / "page-objectives.png")
    dispatcher.close()
