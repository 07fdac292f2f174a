# SPDX-License-Identifier: Apache-2.0
"""Engines are started and leave as a scheduler says; and what becomes of those that die or never serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llumlet.process.tasks import cancel
from llumsched.scaling.scaling_config import Bounds
from llumsched.up import autoscaler
from llumsched.up.autoscaler import LEAVE_S, AutoscalePlan, Autoscaler
from llumsched.up.component import Component, ComponentDied, ComponentSpec, describe
from tests.llumlet.fake_agent import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


class FakeEngine(Component):
    """An engine without a process. `fate`: whether it comes up ("serves"), ends while it starts, or hangs."""

    def __init__(self, spec: ComponentSpec, fate: str = "serves") -> None:
        super().__init__(spec, lambda _: None)
        self.fate, self.graces = fate, list[float]()
        self._over = asyncio.Event()

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    async def wait_ended(self) -> int:
        await self._over.wait()
        return 1

    def ask_to_stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        if not grace_s:
            self.end()

    def end(self) -> None:
        self._over.set()


class World:
    """A scheduler that says what `scale` and `known` are, and an autoscaler that heeds it."""

    def __init__(self, bounds: Bounds) -> None:
        self.scale: dict[str, Any] | None = None
        self.known: set[str] | None = None
        """Ids of the instances; None: all that serve."""
        self.fates: dict[str, str] = {}
        self.said: list[str] = []
        self.engines: list[FakeEngine] = [FakeEngine(_spec(place, 0)) for place in range(bounds.least)]
        self.all = list(self.engines)
        self.bounds = bounds

    def names(self) -> list[str]:
        return [one.spec.name for one in self.engines]

    def wants(self, number: int, *leave: str) -> None:
        self.scale = {"model": "m", "wanted": number, "leave": list(leave), "reason": "a test"}

    def make(self, spec: ComponentSpec) -> FakeEngine:
        self.all.append(FakeEngine(spec, self.fates.get(spec.name, "serves")))
        return self.all[-1]

    def __getitem__(self, name: str) -> FakeEngine:
        return next(one for one in self.all if one.spec.name == name)

    async def raise_up(self, component: FakeEngine, _: aiohttp.ClientSession) -> None:
        if component.fate == "ends":
            component.end()
        if component.fate != "serves":
            await asyncio.Event().wait()

    async def _scale(self, _: web.Request) -> web.Response:
        return web.json_response(self.scale) if self.scale else web.Response(status=503)

    async def _instances(self, _: web.Request) -> web.Response:
        known = set(self.names()) if self.known is None else self.known
        return web.json_response({"instances": [{"id": name} for name in known]})

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[asyncio.Task[None]]:
        app = web.Application()
        app.router.add_get("/scale", self._scale)
        app.router.add_get("/instances", self._instances)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        plan = AutoscalePlan(self.bounds, _spec, f"{url}/scale", f"{url}/instances")
        made = Autoscaler(plan, self.engines, self.make, self.raise_up, self.said.append)  # type: ignore[arg-type]
        task = asyncio.create_task(made.run())
        try:
            yield task
        finally:
            await cancel(task)
            await runner.cleanup()


def _spec(place: int, life: int) -> ComponentSpec:
    return ComponentSpec(f"engine-{place}.{life}", ("true",), "", 1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "POLL_S", 0.02)
    monkeypatch.setattr(autoscaler, "FIRST_PAUSE_S", 0.02)


async def settles(condition: Callable[[], bool]) -> None:
    await until(condition, 10.0)
    await asyncio.sleep(0.1)
    assert condition(), "and stays so"


async def test_as_many_are_started_as_are_wanted_and_no_more_than_may_be() -> None:
    world = World(Bounds(1, 3))
    async with world.runs():
        world.wants(2)
        await settles(lambda: world.names() == ["engine-0.0", "engine-1.0"])
        world.wants(9)
        await settles(lambda: world.names() == ["engine-0.0", "engine-1.0", "engine-2.0"])
    assert "engine-1.0 is started: a test" in world.said


async def test_while_the_scheduler_says_nothing_nothing_changes_but_the_least_is_kept() -> None:
    world = World(Bounds(2, 4))
    async with world.runs():
        await settles(lambda: world.names() == ["engine-0.0", "engine-1.0"])
        world["engine-0.0"].end()
        await settles(lambda: world.names() == ["engine-1.0", "engine-0.1"])
    assert "engine-0.0 ended by itself; the next one is started in 0.02 s at the earliest" in world.said


async def test_named_engine_leaves_without_a_limit() -> None:
    world = World(Bounds(1, 3))
    async with world.runs():
        world.wants(3)
        await settles(lambda: len(world.engines) == 3)
        world.wants(2, "engine-1.0")
        await settles(lambda: world["engine-1.0"].graces == [LEAVE_S])
        assert "engine-1.0 leaves, its requests move to the others: a test" in world.said
        assert "engine-1.0" in world.names(), "its process is still there, and is stopped with all others"
        world.wants(2)
        world["engine-1.0"].end()
        await settles(lambda: world.names() == ["engine-0.0", "engine-2.0"])
    assert world.said[-1] == "engine-1.0 has left"
    assert not any(one.graces for one in world.all if one.spec.name != "engine-1.0")


async def test_never_fewer_than_the_least_whoever_says_so() -> None:
    world = World(Bounds(2, 3))
    async with world.runs():
        world.wants(1, "engine-0.0", "engine-1.0")
        await settles(lambda: not any(one.graces for one in world.all))
        assert len(world.engines) == 2


async def test_the_place_of_one_that_leaves_is_free_when_its_engine_is_gone_though_its_streams_go_on() -> None:
    world = World(Bounds(1, 2))
    async with world.runs():
        world.wants(2)
        await settles(lambda: len(world.engines) == 2)
        world.wants(1, "engine-1.0")
        await settles(lambda: world["engine-1.0"].graces == [LEAVE_S])
        world.wants(2)
        await settles(lambda: len(world.all) == 2)
        world.known = {"engine-0.0"}
        await settles(lambda: world.names() == ["engine-0.0", "engine-1.0", "engine-1.1"])


async def test_engine_that_ends_at_start_is_replaced() -> None:
    world = World(Bounds(1, 2))
    world.fates["engine-1.0"] = "ends"
    async with world.runs():
        world.wants(2)
        await settles(lambda: world.names() == ["engine-0.0", "engine-1.1"])
    assert any(f"engine-1.0 ended {describe(1)}, and never served" in one for one in world.said)


async def test_when_none_is_left_and_none_comes_up_it_is_over() -> None:
    world = World(Bounds(1, 1))
    world.fates = {f"engine-0.{life}": "ends" for life in range(1, 20)}
    async with world.runs() as task:
        world["engine-0.0"].end()
        with pytest.raises(ComponentDied, match="no engine is left, and 5 in a row died or never served"):
            await asyncio.wait_for(task, 20.0)


async def test_pauses_double() -> None:
    world = World(Bounds(1, 2))
    world.fates = {f"engine-1.{life}": "ends" for life in range(20)}
    async with world.runs():
        world.wants(2)
        await until(lambda: sum("never served" in one for one in world.said) >= 4, 10.0)
    pauses = [one.split("in ")[-1].split(" s")[0] for one in world.said if "never served" in one]
    assert pauses[:4] == ["0.02", "0.04", "0.08", "0.16"]


async def test_the_last_one_that_serves_stays_while_another_starts() -> None:
    world = World(Bounds(1, 2))
    world.fates["engine-1.0"] = "hangs"
    async with world.runs():
        world.wants(2)
        await settles(lambda: len(world.engines) == 2)
        world.wants(1, "engine-0.0")
        await settles(lambda: not world["engine-0.0"].graces)


async def test_the_next_one_waits_for_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "FIRST_PAUSE_S", 30.0)
    world = World(Bounds(1, 2))
    world.fates["engine-1.0"] = "ends"
    async with world.runs():
        world.wants(2)
        await settles(lambda: [one.spec.name for one in world.all] == ["engine-0.0", "engine-1.0"])
        await until(lambda: any("never served" in one for one in world.said), 10.0)
        await settles(lambda: len(world.all) == 2)
