# SPDX-License-Identifier: Apache-2.0
"""What every store promises, whether it is embedded, a Redis, or another process that is watched."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from llumlet.contract.cms import redis_reports
from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.proto.llumlet_pb2_grpc import CmsServicer, add_CmsServicer_to_server
from llumlet.contract.types import ViewChange
from llumlet.process.addresses import Address
from llumlet.process.tasks import end
from llumsched.cluster.instance import Instance
from llumsched.cms import watch_store as watch_module
from llumsched.cms.embedded import EmbeddedStore
from llumsched.cms.intake import Patience
from llumsched.cms.redis import RedisStore
from llumsched.cms.store import Store
from llumsched.cms.watch_store import WatchStore
from llumsim.live import SimulatedCluster, SimulatedInstance
from tests.llumlet.fake_agent import until
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.asyncio
PATIENCE = Patience(silent_s=6.0, cut_s=0.5)


@dataclasses.dataclass
class Source:
    """A store under test, and what is behind it: where instances report, and how that goes away and comes back."""

    store: Store
    reports: str
    lose: Callable[[], Awaitable[None]]
    find: Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(params=["embedded", "redis", "watch"])
async def source(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    if request.param == "redis":
        async with RedisServer("secret") as server:
            store = RedisStore(server.url, patience=PATIENCE)
            await store.start()
            yield Source(store, server.url, server.kill, server.start)
            await store.close()
        return
    embedded = EmbeddedStore(patience=PATIENCE)
    await embedded.start()
    address = embedded.address
    again: list[EmbeddedStore] = []

    async def find() -> None:
        again.append(EmbeddedStore(*address, patience=PATIENCE))
        await again[0].start()

    if request.param == "watch":
        watch = WatchStore(Address(*address))
        await watch.start()
        yield Source(watch, str(address), embedded.close, find)
        await watch.close()
    else:
        yield Source(embedded, str(address), embedded.close, find)
    for store in (embedded, *again):
        await store.close()


async def reported(store: Store, instance: SimulatedInstance) -> None:
    """The view shows this life as it is now."""
    await until(
        lambda: (
            instance.id in store.view
            and (status := store.view[instance.id].status) is not None
            and (status.incarnation, status.update_id) == (instance.incarnation, instance.num_changes)
        )
    )


async def test_instances_appear_change_and_leave(source: Source) -> None:
    async with SimulatedCluster(2, source.reports) as cluster:
        for instance in cluster.instances.values():
            await reported(source.store, instance)
        view = source.store.view
        assert view["sim-0"].llumlet == cluster[0].address
        assert view.connected
        assert view.age_s == 0
        await cluster[0].submit(40, 8).done()
        await reported(source.store, cluster[0])
        await cluster[1].stop()
        await until(lambda: "sim-1" not in view)
        assert "sim-0" in view
    await until(lambda: not view)
    assert not len(view.lost), "they said good-bye"


async def test_an_adapter_that_is_loaded_later_is_served(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    # Redis is told at once, not just when the metadata is written anew.
    monkeypatch.setattr(redis_reports, "METADATA_EVERY_S", 3600.0)
    monkeypatch.setattr(redis_reports, "TTL_S", 3600)
    async with SimulatedCluster(1, source.reports) as cluster:
        await reported(source.store, cluster[0])
        for models in (["simulated", "adapter"], ["simulated"]):
            cluster[0].serve(*models)
            await until(lambda models=models: [*source.store.view["sim-0"].metadata.served_models] == models)  # type: ignore[misc]
        assert source.store.view["sim-0"].metadata.incarnation == cluster[0].incarnation


async def test_an_idle_instance_stays(source: Source) -> None:
    async with SimulatedCluster(1, source.reports) as cluster:
        await reported(source.store, cluster[0])
        before = source.store.view["sim-0"].received_s
        await until(lambda: source.store.view["sim-0"].received_s > before)


async def test_silent_instance_is_removed(source: Source) -> None:
    async with SimulatedCluster(2, source.reports) as cluster:
        for instance in cluster.instances.values():
            await reported(source.store, instance)
        await cluster[0].kill()
        await until(lambda: "sim-0" not in source.store.view)
        await until(lambda: "sim-1" in source.store.view)
        assert [instance.id for instance in source.store.view.lost.within(60.0)] == ["sim-0"]
        await reported(source.store, await cluster.add("sim-0"))
        assert not len(source.store.view.lost)


async def test_a_restarted_instance_is_a_new_one(source: Source) -> None:
    async with SimulatedCluster(1, source.reports) as cluster:
        old = cluster[0]
        await old.submit(40, 8).done()
        await reported(source.store, old)
        new = await cluster.add("sim-0")
        await reported(source.store, new)
        assert source.store.view["sim-0"].metadata.incarnation == new.incarnation != old.incarnation


async def test_the_old_life_changes_nothing_any_more(source: Source) -> None:
    async with SimulatedCluster(1, source.reports) as cluster:
        old, changes = cluster[0], 0
        new = await cluster.add("sim-0")
        await reported(source.store, new)
        ghost = Reporter(source.reports, lambda: old.metadata, lambda: old.status)
        haunting = asyncio.create_task(ghost.run())
        try:
            for _ in range(20):
                ghost.changed()
                await asyncio.sleep(0.05)
                new.tell()
                changes += source.store.view["sim-0"].metadata.incarnation != new.incarnation
        finally:
            await end(haunting)
        assert changes == 0


async def test_a_lost_source_leaves_the_last_view_and_is_found_again(source: Source) -> None:
    view = source.store.view
    async with SimulatedCluster(2, source.reports) as cluster:
        for instance in cluster.instances.values():
            await reported(source.store, instance)
        await source.lose()
        if not isinstance(source.store, EmbeddedStore):  # which goes with its own process
            await until(lambda: not view.connected)
            assert set(view) == {"sim-0", "sim-1"}
            before = view.age_s
            await until(lambda: view.age_s > before + 0.2)
        await source.find()
        if not isinstance(source.store, EmbeddedStore):
            await until(lambda: view.connected)
            await cluster[0].submit(40, 8).done()
            await reported(source.store, cluster[0])
            await reported(source.store, cluster[1])
            assert set(view) == {"sim-0", "sim-1"}


class RaisesAtFirst:
    """An observer that breaks its promise, once for each kind of change."""

    def __init__(self) -> None:
        self.raised: list[str] = []

    def appeared(self, instance: Instance) -> None:
        self._raise("appeared")

    def changed(self, instance: Instance) -> None:
        self._raise("changed")

    def left(self, instance: Instance) -> None:
        self._raise("left")

    def _raise(self, change: str) -> None:
        if change not in self.raised:
            self.raised.append(change)
            raise RuntimeError(f"of the test: {change}")


async def test_an_observer_that_raises_does_not_end_a_store(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    view, observer = source.store.view, RaisesAtFirst()
    view.observe(observer)
    async with SimulatedCluster(2, source.reports) as cluster:
        for instance in cluster.instances.values():
            await reported(source.store, instance)
        await cluster[0].kill()
        await until(lambda: "sim-0" not in view)
        await cluster[1].submit(40, 8).done()
        await reported(source.store, cluster[1])
        await until(lambda: view.connected)
    await until(lambda: not view)
    assert observer.raised == ["appeared", "changed", "left"]
    for change in observer.raised:
        assert f"of the test: {change}" in caplog.text


class SilentCms(CmsServicer):
    """It says that it is there, and nothing more."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def Watch(self, request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        self.num_asked += 1
        await context.write(ViewChange(complete=True))
        await asyncio.Event().wait()


async def test_a_watched_cms_that_falls_silent_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.2)
    silent, server = SilentCms(), aio.server()
    add_CmsServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watch = WatchStore(Address("127.0.0.1", port))
    await watch.start()
    await until(lambda: watch.view.connected)
    await until(lambda: watch.problem == "nothing was heard for 0.2 s")
    assert not watch.view.connected
    await until(lambda: silent.num_asked == 2)
    await watch.close()
    await server.stop(None)
