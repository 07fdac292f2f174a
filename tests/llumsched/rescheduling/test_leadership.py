# SPDX-License-Identifier: Apache-2.0
"""One of several reschedulers leads: over a real Redis, and what llumlets make of the orders of the others."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.contract.types import MigrateEvent, MigrateRequest, MoveSummary, Reason
from llumlet.process.addresses import Address
from llumlet.process.tasks import end
from llumsched.cluster.view import View
from llumsched.rescheduling import rescheduler as rescheduling
from llumsched.rescheduling import standalone as process
from llumsched.rescheduling.leadership import LEASE_S, Lease
from llumsched.rescheduling.planning import planner
from llumsched.rescheduling.planning.planner import Plan
from llumsched.rescheduling.rescheduler import Rescheduler
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim.live import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import until
from tests.support.redis_server import RedisServer, SentinelGroup

pytestmark = pytest.mark.asyncio
TERM_KEY = "llumnix:rescheduler_term"
TAKEOVER_S = 5.0
HOUR_US = 3_600_000_000


@pytest_asyncio.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with RedisServer("secret") as server:
        yield server


async def started(redis: RedisServer | SentinelGroup, name: str) -> Lease:
    lease = Lease(redis.url, name)
    await lease.start()
    return lease


async def test_standby_follows_the_leader_at_once(redis: RedisServer) -> None:
    first = await started(redis, "first")
    await until(lambda: first.term > 0)
    second = await started(redis, "second")
    await until(lambda: "first/" in second.reason)
    assert second.term == 0
    term, began_s = first.term, time.monotonic()
    await first.close()
    await until(lambda: second.term > term)
    assert time.monotonic() - began_s < LEASE_S, "it was given back"
    await second.close()


async def test_stopped_leader_has_lost_its_lease(redis: RedisServer) -> None:
    first, second = await started(redis, "first"), await started(redis, "second")
    await until(lambda: bool(first.term or second.term))
    leader, other = (first, second) if first.term else (second, first)
    term = leader.term
    assert leader._task is not None
    await end(leader._task)
    began_s = time.monotonic()
    await until(lambda: other.term > 0)
    assert leader.term == 0, "never two"
    assert other.term > term
    assert time.monotonic() - began_s < TAKEOVER_S
    for lease in (first, second):
        await lease.close()


async def test_without_its_redis_nobody_leads_and_terms_go_on_rising(redis: RedisServer) -> None:
    lease = await started(redis, "one")
    await until(lambda: lease.term > 0)
    term = lease.term
    redis.signal(signal.SIGSTOP)
    await until(lambda: lease.term == 0)
    await redis.kill()
    await redis.start()  # and has forgotten everything
    await until(lambda: lease.term > 0)
    assert lease.term > term
    await lease.close()


def microseconds() -> int:
    return int(time.time() * 1e6)


async def a_term_ahead_of_time(redis: RedisServer) -> None:
    """As if the clock of the server that gave the last one were an hour fast."""
    await redis.tell("SET", TERM_KEY, str(microseconds() + HOUR_US))


async def test_the_next_leader_has_a_higher_term_than_one_that_its_server_never_knew() -> None:
    """A failover takes the lease and the last term with it, and the new master's clock is behind."""
    async with SentinelGroup() as group:
        first = await started(group, "first")
        await until(lambda: first.term > 0)
        second = await started(group, "second")
        await until(lambda: "first/" in second.reason)
        earlier = first.term
        await group.cut_off_the_replica()
        await a_term_ahead_of_time(group.servers[0])
        await until(lambda: first.term > earlier)
        lost = first.term
        await until(lambda: second._highest == lost)
        assert first._task is not None
        await end(first._task)
        assert int(await group.servers[1].tell("GET", TERM_KEY)) == earlier
        await group.lose_the_master()
        await until(lambda: second.term > 0)
        assert second.term > lost
        for lease in (first, second):
            await lease.close()


async def test_a_former_leader_tells_the_server_of_its_term(redis: RedisServer) -> None:
    await a_term_ahead_of_time(redis)
    first = await started(redis, "first")
    await until(lambda: first.term > 0)
    lost = first.term
    assert first._task is not None
    await end(first._task)
    await redis.tell("FLUSHALL")
    second = await started(redis, "second")
    await until(lambda: second.term > 0)
    assert second.term < lost, "nobody has told"
    first._task = asyncio.create_task(first._keep())
    await until(lambda: second.term > lost)
    assert first.term == 0
    for lease in (first, second):
        await lease.close()


async def test_servers_with_the_same_memory_give_no_term_twice(redis: RedisServer) -> None:
    async with RedisServer("secret") as twin:
        ahead = str(microseconds() + HOUR_US)
        for server in (redis, twin):
            await server.tell("SET", TERM_KEY, ahead)
        first, second = await started(redis, "first"), await started(twin, "second")
        await until(lambda: first.term and second.term)
        assert first.term != second.term
        for lease in (first, second):
            await lease.close()


async def test_a_leader_whose_orders_are_refused_gets_a_higher_term(redis: RedisServer) -> None:
    """The former one led by the fast clock of a server that is gone, and nobody who is left has heard of it."""
    config = ReschedulingConfig(policies=("neutral_load",), interval_ms=100)
    async with SimulatedCluster(2, redis.url, model=engine_model(speed=0.05)) as cluster:
        async with LlumletClient(str(cluster[0].address)) as client:
            await order(client, cluster[1].address, microseconds() + 3_000_000)
        running = await process.serve(redis.url, config)
        for number in range(12):
            cluster[0].submit(200 + number, 1000)
        await until(lambda: any("not_leader" in move.error for move in running.rescheduler.records.moves))
        await until(lambda: len(cluster[0].engine.requests) < 9)
        await running.close()


async def order(client: LlumletClient, destination: Address, term: int) -> int:
    """From sim-0 to sim-1. The number of requests that are to move."""
    request = MigrateRequest(
        src_engine_id="sim-0", dst_engine_id="sim-1", dst_engine_ip=destination.host,
        dst_engine_port=destination.port, migration_type="NUM_REQ", migration_req_policy="SR", num_reqs=1,
        leader_term=term,
    )  # fmt: skip
    return max([event.summary.selected async for event in client.migrate(request)])


async def test_of_two_reschedulers_one_moves_and_the_other_takes_over(redis: RedisServer) -> None:
    config = ReschedulingConfig(policies=("neutral_load",), interval_ms=100)
    async with SimulatedCluster(2, redis.url, model=engine_model(speed=0.05)) as cluster:
        running = [await process.serve(redis.url, config) for _ in range(2)]
        for number in range(12):
            cluster[0].submit(200 + number, 1000)
        await until(lambda: len(cluster[0].engine.requests) < 9)
        [leader] = [one for one in running if one.rescheduler.records.moves]
        [standby] = [one for one in running if one is not leader]
        await until(lambda: any(" leads" in one.skipped for one in standby.rescheduler.records.passes))
        await leader.close()
        for number in range(24):
            cluster[1].submit(200 + number, 1000)
        await until(lambda: bool(standby.rescheduler.records.moves))
        await standby.close()


async def test_a_pass_during_which_the_lease_runs_out_gives_no_orders_of_nobody(redis: RedisServer) -> None:
    """A term of 0 is a person's, whom every llumlet obeys."""
    lease = await started(redis, "one")
    await until(lambda: lease.term > 0)
    term = lease.term
    assert lease._task is not None
    await end(lease._task)  # nothing prolongs it, and it does not run out before its time
    lease._until_s = math.inf
    async with SimulatedCluster(2, model=engine_model(speed=0.05)) as cluster:
        view = View()
        for instance in cluster.instances.values():
            for number in range(12 if instance is cluster[0] else 0):
                instance.submit(200 + number, 1000)
        await until(lambda: len(cluster[0].engine.running) == 12)
        for instance in cluster.instances.values():
            view.put_metadata(instance.metadata)
            view.put_status(instance.status)
        rescheduler = Rescheduler(view, ReschedulingConfig(policies=("neutral_load",)), lease=lease)
        sent: list[int] = []

        async def migrate(client: LlumletClient, request: MigrateRequest, **_: object) -> AsyncIterator[MigrateEvent]:
            sent.append(request.leader_term)
            yield MigrateEvent(summary=MoveSummary())

        def plan(*arguments: Any, **more: Any) -> Plan:
            made = planner.plan(*arguments, **more)
            lease._until_s = 0.0
            return made

        with mock.patch.object(LlumletClient, "migrate", migrate), mock.patch.object(rescheduling, "plan", plan):
            assert rescheduler.run_pass().moves
            assert lease.term == 0
            await until(lambda: bool(sent))
            assert set(sent) == {term}
            assert "leads" in rescheduler.run_pass().skipped
        await rescheduler.close()
    await lease.close()


async def test_orders_of_an_earlier_leader_are_refused() -> None:
    async with SimulatedCluster(2) as cluster, LlumletClient(str(cluster[0].address)) as client:
        there = cluster[1].address
        assert [await order(client, there, term) for term in (5, 5, 7, 0)] == [0, 0, 0, 0]
        with pytest.raises(LlumletError, match="a rescheduler of term 7 gives the orders, not 6") as refused:
            await order(client, there, 6)
        assert refused.value.reason is Reason.NOT_LEADER
        assert await order(client, there, 0) == 0, "a person's"
