# SPDX-License-Identifier: Apache-2.0
"""What shares a failure domain with an instance that crashed: through real stores, from the crash to the move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
import pytest_asyncio

from llumsched.cluster.domains import FailoverDomain
from llumsched.cluster.view import View
from llumsched.cms.intake import PATIENCE, SWEEP_S, Intake
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.request import Request
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.scheduler.process import RunningScheduler, SchedulerConfig, serve
from llumsim.live import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import until
from tests.llumsched import cases
from tests.support.redis_server import RedisServer

SLOW = engine_model(speed=0.05)
STALENESS_S = 600.0
"""Longer than the test: what moves is moved because of the crash, not because of the silence after it."""


@pytest_asyncio.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.full)])
async def scheduler(request: pytest.FixtureRequest) -> AsyncIterator[RunningScheduler]:
    """Nodes fail as a whole."""
    async with AsyncExitStack() as stack:
        cms = "listen://127.0.0.1:0"
        if request.param == "redis":
            cms = (await stack.enter_async_context(RedisServer())).url
        policy = load_policy("load-balance", Mode.FULL, Overrides(failover_domain="node", staleness_s=STALENESS_S))
        rescheduling = ReschedulingConfig(
            ("neutral_failover",), failover_domain=FailoverDomain.NODE, staleness_s=STALENESS_S
        )
        config = SchedulerConfig(policy, "127.0.0.1", 0, cms, warms_up_s=0.0, rescheduling=rescheduling)
        running = await serve(config)
        stack.push_async_callback(running.close)
        yield running


def cms_of(scheduler: RunningScheduler) -> str:
    address = getattr(scheduler.store, "address", None)
    return str(address) if address is not None else scheduler.store._url  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_the_node_of_a_crashed_instance_is_emptied_and_gets_nothing(scheduler: RunningScheduler) -> None:
    async with SimulatedCluster(0, cms_of(scheduler), model=SLOW) as cluster, aiohttp.ClientSession() as http:
        for name, node in (("a", "n0"), ("b", "n0"), ("c", "n1")):
            await cluster.add(name, node_id=node)
        await until(lambda: len(scheduler.view) == 3 and all(one.status for one in scheduler.view.values()))
        neighbour, other = cluster.instances["b"], cluster.instances["c"]
        running = neighbour.submit(100, 2000)
        await until(lambda: bool(running.num_tokens > 102))
        await cluster.instances["a"].kill()
        await until(lambda: running.owner == other.id)
        url = f"http://127.0.0.1:{scheduler.port}"
        async with http.post(f"{url}/debug/schedule", json={"model": "", "prompt_num_tokens": 5}) as answer:
            (stage,) = (await answer.json())["stages"]
        assert stage["chosen"] == "c"
        (refused,) = (one for one in stage["instances"] if one["instance_id"] == "b")
        assert refused["refused_by"][0]["reason"] == "shares its node with a failed instance"
        async with http.get(f"{url}/debug/view") as answer:
            assert list((await answer.json())["lost"]) == ["a"]
        await cluster.add("a", node_id="n0")
        await until(lambda: "a" in scheduler.view and scheduler.view["a"].status is not None)
        requests = [Request(f"r{number}", prompt_num_tokens=10) for number in range(6)]
        assert {"a", "b"} <= {scheduler.dispatcher.schedule(one)[0].instance.id for one in requests}


@pytest.mark.asyncio
@pytest.mark.parametrize(("staleness_s", "gone_s"), [(None, 10.0), (5.0, 10.0), (30.0, 30.0)])
async def test_an_instance_is_gone_after_the_silence_that_was_set(staleness_s: float | None, gone_s: float) -> None:
    """Or after ten seconds, if that is less: then it is there, and refused for its old status."""
    policy = load_policy("load-balance", Mode.FULL, Overrides(staleness_s=staleness_s))
    assert policy.staleness_s == (staleness_s or 10.0)
    running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
    try:
        intake, now_s = running.store._intake, 0.0  # type: ignore[attr-defined]
        intake._clock = lambda: now_s
        intake.metadata(cases.metadata("a", incarnation="1"))
        for now_s, is_there in ((gone_s - 0.5, True), (gone_s + 0.5, False)):
            intake._swept_s = now_s - SWEEP_S
            intake.sweep()
            assert ("a" in running.view) is is_there
        assert "a" in running.view.lost
    finally:
        await running.close()


def test_a_good_bye_counts_after_a_silence_too() -> None:
    now_s = 0.0
    view = View(lambda: now_s)
    intake = Intake(view, PATIENCE, lambda: now_s)
    intake.metadata(cases.metadata("a", incarnation="1"))
    now_s += PATIENCE.silent_s + 1.0
    intake._swept_s = now_s - SWEEP_S  # nobody was held up
    intake.sweep()
    assert "a" in view.lost
    intake.left("a", "1")
    assert "a" not in view.lost


def test_the_dead_are_forgotten_after_a_while() -> None:
    now_s = 0.0
    view = View(lambda: now_s)
    for name in "ab":
        cases.put(view, name)
        view.lose(name)
        now_s += 10.0
    view.lose("never there")
    assert [instance.id for instance in view.lost.within(30.0)] == ["a", "b"]
    assert [instance.id for instance in view.lost.within(15.0)] == ["b"]
    assert view.lost.ages_s() == {"a": 20.0, "b": 10.0}
    view.remove("a")
    cases.put(view, "b")
    assert not len(view.lost)
