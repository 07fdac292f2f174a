# SPDX-License-Identifier: Apache-2.0
"""The reporter: newest only, never in the way of the engine, whatever the CMS does."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from llumlet.contract.cms import reporter as reporter_module
from llumlet.contract.cms import stores
from llumlet.contract.cms.reporter import Reporter, cms_faults
from llumlet.contract.cms.stores import LEAST_INTERVAL_S, GrpcLink
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.credentials import NONE
from llumlet.process.tasks import end as finished
from llumsched.cluster.instance import Instance
from llumsched.cms import embedded as embedded_module
from llumsched.cms.embedded import MOST_STATUSES_PER_S, EmbeddedStore
from llumsched.cms.watch_store import WatchStore
from tests.llumlet.fake_agent import until
from tests.support.cms import embedded_store

pytestmark = pytest.mark.asyncio


class Load:
    """What an engine would say; counts how often it is asked."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.update_id = 0
        self.asked = 0
        self.broken = False

    def metadata(self) -> InstanceMetadata:
        return InstanceMetadata(instance_id=self.name, incarnation="1", ip="127.0.0.1", instance_type="neutral")

    def status(self) -> InstanceStatus:
        self.asked += 1
        if self.broken:
            raise RuntimeError("the engine has no status")
        return InstanceStatus(instance_id=self.name, incarnation="1", update_id=self.update_id)


class Seen:
    def __init__(self) -> None:
        self.statuses: list[InstanceStatus] = []

    def appeared(self, instance: Instance) -> None: ...

    def left(self, instance: Instance) -> None: ...

    def changed(self, instance: Instance) -> None:
        if instance.status is not None:
            self.statuses.append(instance.status)


@pytest_asyncio.fixture
async def stuck() -> AsyncIterator[str]:
    """The address of something that takes connections and says nothing."""
    silent: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in silent:
        writer.close()


async def end(reporter: Reporter, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        await reporter.leave()
        await finished(running)


async def test_changes_are_coalesced_into_the_newest(store: EmbeddedStore) -> None:
    load, seen = Load(), Seen()
    store.view.observe(seen)
    reporter = Reporter(str(store.address), load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await until(lambda: seen.statuses)
    pushed_before, changes, began = load.asked, 20000, time.monotonic()

    def change() -> None:
        for _ in range(changes):
            load.update_id += 1
            reporter.changed()

    thread = threading.Thread(target=change)
    thread.start()
    await until(lambda: seen.statuses[-1].update_id == changes)
    thread.join()
    elapsed_s = time.monotonic() - began
    assert load.asked - pushed_before <= elapsed_s / LEAST_INTERVAL_S + 2
    assert reporter.connected == {str(store.address): True}
    stamps = [status.timestamp_ms for status in seen.statuses]
    assert stamps == sorted(set(stamps))
    await end(reporter, running)
    assert not store.view


async def test_instances_of_a_large_cluster_report_less_often(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load()
    link = GrpcLink(store.address, NONE)
    await link.open(load.metadata(), lambda: None)
    assert link.min_interval_s == LEAST_INTERVAL_S
    for number in range(999):
        store.view.put_metadata(Load(f"i-{number}").metadata())
    await link.push(load.status(), load.metadata)
    assert link.min_interval_s == LEAST_INTERVAL_S
    monkeypatch.setattr(stores, "DESCRIBE_EVERY_S", 0.0)
    await link.push(load.status(), load.metadata)
    assert link.min_interval_s == 1000 / MOST_STATUSES_PER_S
    watcher = WatchStore(store.address)
    await watcher.start()
    await until(watcher.complete.is_set)
    await link.push(load.status(), load.metadata)
    assert link.min_interval_s == 2 * 1000 / MOST_STATUSES_PER_S
    await watcher.close()
    await link.close()


async def test_busy_instances_keep_the_pace_of_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change waits until the next report is due, which tells the newest state."""
    monkeypatch.setattr(embedded_module, "MOST_STATUSES_PER_S", 20.0)
    async with embedded_store() as store:
        load, seen = Load(), Seen()
        store.view.observe(seen)
        reporter = Reporter(str(store.address), load.metadata, load.status)
        running = asyncio.create_task(reporter.run())
        await until(lambda: seen.statuses)
        began_s, num_before = time.monotonic(), load.asked
        while load.update_id < 1000:
            load.update_id += 1
            reporter.changed()
            await asyncio.sleep(0.001)
        assert load.asked - num_before <= 20 * (time.monotonic() - began_s) + 2
        await until(lambda: seen.statuses[-1].update_id == 1000)
        await end(reporter, running)


async def test_the_first_change_after_a_pause_goes_out_at_once(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no timer that looks now and then."""
    monkeypatch.setattr(reporter_module, "_TICK_S", 3600.0)
    load, seen = Load(), Seen()
    store.view.observe(seen)
    reporter = Reporter(str(store.address), load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    for update_id in range(1, 8):
        await asyncio.sleep(0.05)
        load.update_id = update_id
        reporter.changed()
        await until(lambda wanted=update_id: seen.statuses and seen.statuses[-1].update_id == wanted)  # type: ignore[misc]
    await end(reporter, running)


async def test_the_clock_is_set_back(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load()
    reporter = Reporter(str(store.address), load.metadata, load.status)
    before = reporter.status_now().timestamp_ms
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert reporter.status_now().timestamp_ms == before + 1


async def test_a_stuck_cms_holds_nothing_up(
    store: EmbeddedStore, stuck: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporter_module, "PUSH_DEADLINE_S", 1.0)
    load = Load()
    reporter = Reporter(f"{stuck}, {store.address}", load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await until(lambda: "a" in store.view)
    for _ in range(100):
        load.update_id += 1
        reporter.changed()
    await until(
        lambda: "a" in store.view and (status := store.view["a"].status) is not None and status.update_id == 100
    )
    await until(lambda: f"The CMS at {stuck} does not listen" in caplog.text)
    await until(lambda: reporter.connected == {stuck: False, str(store.address): True})
    await end(reporter, running)
    assert not store.view


async def test_a_cms_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "PUSH_DEADLINE_S", 0.5)
    store, load = EmbeddedStore(), Load()
    go_on = asyncio.Event()

    async def stand_still(*_: object) -> None:
        await go_on.wait()

    await store.start()
    monkeypatch.setattr(store._servicer, "_follow", stand_still)
    reporter = Reporter(str(store.address), load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await until(lambda: reporter.connected[str(store.address)])
    pushed = load.asked
    for _ in range(6000):
        load.update_id += 1
        reporter.changed()
        if not reporter.connected[str(store.address)]:
            break
        await asyncio.sleep(0.01)
    assert not reporter.connected[str(store.address)]
    # The window of the stream, not the buffers of the connection, says how much old news can pile up.
    assert load.asked - pushed < 30
    go_on.set()
    await end(reporter, running)
    await store.close()


async def test_a_cms_that_comes_later(unused_tcp_port: int) -> None:
    load = Load()
    reporter = Reporter(f"127.0.0.1:{unused_tcp_port}", load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.5)
    store = EmbeddedStore("127.0.0.1", unused_tcp_port)
    await store.start()
    await until(lambda: "a" in store.view)
    await end(reporter, running)
    await store.close()


async def test_leaving_a_stuck_cms_is_soon_done(stuck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "PUSH_DEADLINE_S", 3600.0)
    load = Load()
    reporter = Reporter(stuck, load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.1)
    await end(reporter, running)


async def test_a_status_that_cannot_be_had(store: EmbeddedStore, caplog: pytest.LogCaptureFixture) -> None:
    load = Load()
    load.broken = True
    reporter = Reporter(str(store.address), load.metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await until(lambda: "the engine has no status" in caplog.text)
    load.broken = False
    await until(lambda: "a" in store.view and store.view["a"].status is not None)
    await end(reporter, running)


async def test_a_report_that_is_refused_again_and_again_is_said_once(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    load = Load("another")
    reporter = Reporter(str(store.address), Load("a").metadata, load.status)
    running = asyncio.create_task(reporter.run())
    await until(lambda: load.asked > 3)
    await end(reporter, running)
    assert caplog.text.count("does not listen") == 1
    assert "instance_id 'another' is not that of the metadata" in caplog.text


async def test_changed_outside_of_a_run_is_harmless(store: EmbeddedStore) -> None:
    load = Load()
    reporter = Reporter(str(store.address), load.metadata, load.status)
    reporter.changed()
    await reporter.leave()


@pytest.mark.parametrize(
    ("cms", "faults"),
    [
        ("", ["HOST:PORT or redis://HOST:PORT of a CMS is missing"]),
        ("nowhere,a:1,b:0", ["'nowhere' is not HOST:PORT", "'b:0': the port must be a number from 1 to 65535"]),
        ("http://a:1", ["'http://a:1' is neither HOST:PORT nor a redis:// URL"]),
        ("redis://:secret@", ["the redis:// URL names no host"]),
    ],
)
async def test_addresses_that_are_none(cms: str, faults: list[str]) -> None:
    assert cms_faults(cms) == faults
    with pytest.raises(ValueError, match=re.escape(faults[0])):
        Reporter(cms, InstanceMetadata, InstanceStatus)
