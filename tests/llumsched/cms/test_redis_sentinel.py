# SPDX-License-Identifier: Apache-2.0
"""A Redis that Sentinels look after: everybody goes on with the new master, and nobody stays with the old one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.exceptions import RedisError

from llumlet.contract.cms import redis_reports
from llumlet.contract.cms.stores import open_directory
from llumlet.process.redis_client import connect
from llumsched.cms import redis as redis_module
from llumsched.cms.redis import RedisStore
from llumsched.rescheduling import leadership
from llumsched.rescheduling.leadership import LEASE_S, Lease
from llumsim.live import SimulatedCluster
from tests.llumlet.fake_agent import until
from tests.support.redis_server import SERVICE, RedisServer, SentinelGroup, eventually

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def group() -> AsyncIterator[SentinelGroup]:
    async with SentinelGroup() as running:
        yield running


async def test_all_go_on_with_the_new_master(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An instance, a scheduler, an instance that looks for others, a rescheduler; and the old one comes back."""
    monkeypatch.setattr(redis_module, "RESCAN_S", 3600.0)  # what is seen was published
    store, lease, directory = RedisStore(group.url), Lease(group.url, "one"), open_directory(group.url)
    await store.start()
    await lease.start()

    async def finds(instance_id: str) -> bool:
        return instance_id in {peer.instance_id for peer in (await directory.peers((), "")).peers}

    async with SimulatedCluster(1, group.url) as cluster:
        await until(lambda: "sim-0" in store.view and lease.term)
        await eventually(lambda: finds("sim-0"))
        term = lease.term
        promoted_s = await group.lose_the_master()
        began_s = time.monotonic()
        await until(lambda: store.view["sim-0"].received_s > began_s)
        seen_s = time.monotonic() - began_s
        # It goes on with its term if nobody else has led.
        await until(lambda: lease.term >= term and lease._until_s > began_s + LEASE_S)
        led_s = time.monotonic() - began_s
        print(f"promoted after {promoted_s:.1f} s, seen {seen_s:.1f} s later, led {led_s:.1f} s later")
        assert await finds("sim-0")
        await group.servers[0].start()
        await eventually(lambda: group.follows(0))
        cluster[0].submit(200, 1000)
        await until(lambda: (seen := store.view["sim-0"].status) is not None and seen.num_running_requests == 1)
    await until(lambda: "sim-0" not in store.view)
    await lease.close()
    await directory.close()
    await store.close()
    assert "secret" not in caplog.text
    assert "watchword" not in caplog.text


async def test_a_master_that_the_sentinels_gave_up_is_left(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, takes writes, and nobody else hears of them: a network that is parted."""
    monkeypatch.setattr(redis_module, "RESCAN_S", 0.2)
    monkeypatch.setattr(redis_reports, "METADATA_EVERY_S", 0.2)
    monkeypatch.setattr(leadership, "RENEW_S", 0.2)
    store, lease, directory = RedisStore(group.url), Lease(group.url), open_directory(group.url)
    await store.start()
    await lease.start()
    async with SimulatedCluster(1, group.url):
        await until(lambda: "sim-0" in store.view and lease.term)
        await directory.peers((), "d")
        old, new = group.servers
        assert await num_clients(old) >= 4
        for sentinel in group.sentinels:  # else they make it a replica again
            await sentinel.tell("SENTINEL", "REMOVE", SERVICE)
        await new.tell("REPLICAOF", "NO", "ONE")
        for sentinel in group.sentinels:
            await sentinel.tell("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(new.port), "2")
            await sentinel.tell("SENTINEL", "SET", SERVICE, "auth-pass", "secret")
        await directory.peers((), "d")

        async def left() -> bool:
            return await num_clients(old) == 0

        await eventually(left)
        began_s = time.monotonic()
        await until(lambda: store.view.connected and store.view["sim-0"].received_s > began_s)
        await until(lambda: lease.term > 0)
    await lease.close()
    await directory.close()
    await store.close()


async def num_clients(server: RedisServer) -> int:
    """But for who asks, Sentinels and replicas."""
    listed = b"".join([await server.tell("CLIENT", "LIST", "TYPE", kind) for kind in ("normal", "pubsub")]).decode()
    return sum("cmd=client" not in line and "name=sentinel" not in line for line in listed.splitlines())


async def test_a_master_that_is_a_replica_by_now_is_left(group: SentinelGroup) -> None:
    (old, new), client = group.servers, connect(group.url)
    await client.set("llumnix:x", "1")
    for sentinel in group.sentinels:
        await sentinel.tell("SENTINEL", "REMOVE", SERVICE)
    await new.tell("REPLICAOF", "NO", "ONE")
    await old.tell("REPLICAOF", "127.0.0.1", str(new.port))
    with pytest.raises(RedisError, match="now a slave"):
        await client.set("llumnix:x", "2")
    for sentinel in group.sentinels:
        await sentinel.tell("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(new.port), "2")
    await client.set("llumnix:x", "3")
    assert await new.tell("GET", "llumnix:x") == b"3"
    await client.aclose()


async def test_sentinels_that_cannot_be_asked(group: SentinelGroup) -> None:
    for url, word in (
        (group.url.replace("watchword", "guess"), "AuthenticationError"),
        (group.url.replace(SERVICE, "another"), "No master found for 'another'"),
        (group.url.replace(":secret@", ":wrong@"), "invalid username-password pair"),
    ):
        store = RedisStore(url)
        await store.start()
        await until(lambda store=store: store.problem != "not connected yet")
        assert word in store.problem
        assert not [hidden for hidden in ("guess", "watchword", "secret", "<redis") if hidden in store.problem]
        await store.close()


async def test_a_sentinel_that_is_gone_is_not_missed(group: SentinelGroup) -> None:
    await group.sentinels[0].kill()
    store = RedisStore(group.url)
    await store.start()
    async with SimulatedCluster(1, group.url):
        await until(lambda: "sim-0" in store.view)
    await store.close()
