# SPDX-License-Identifier: Apache-2.0
"""Redis as a CMS: its layout, and what other writers, lost messages and a stuck server do."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from llumlet.contract.cms.redis_reports import LEAST_INTERVAL_S, MOST_WRITES_PER_S, TTL_S, Layout, RedisLink
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.redis_client import connect
from llumsched.cms import redis as redis_module
from llumsched.cms.intake import Patience
from llumsched.cms.redis import RedisStore
from llumsim.live import SimulatedCluster
from tests.llumlet.fake_agent import until
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with RedisServer() as running:
        yield running


@pytest_asyncio.fixture
async def redis(server: RedisServer) -> AsyncIterator[Any]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest_asyncio.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    following = RedisStore(server.url, patience=Patience(silent_s=6, cut_s=1))
    await following.start()
    async with asyncio.timeout(60):
        await following.complete.wait()
    yield following
    await following.close()


def metadata(name: str, **fields: Any) -> bytes:
    return InstanceMetadata(
        instance_id=name, incarnation="1", ip="127.0.0.1", instance_type="neutral", **fields
    ).SerializeToString()


def status(name: str, update_id: int = 1, **fields: Any) -> bytes:
    message = InstanceStatus(instance_id=name, incarnation="1", update_id=update_id, timestamp_ms=1, **fields)
    return message.SerializeToString()


async def test_the_layout(server: RedisServer, redis: Any) -> None:
    async with SimulatedCluster(1, server.url) as cluster:
        key = "llumnix:instance_metadata:sim-0"
        for _ in range(6000):
            if await redis.exists("llumnix:instance_status:sim-0"):
                break
            await asyncio.sleep(0.01)
        assert InstanceMetadata.FromString(await redis.get(key)).incarnation == cluster[0].incarnation
        assert InstanceStatus.FromString(await redis.get("llumnix:instance_status:sim-0")).instance_id == "sim-0"
        assert 0 < await redis.ttl(key) <= TTL_S
    assert await redis.keys("llumnix:*") == []


async def test_a_leaving_life_does_not_take_the_next_with_it(server: RedisServer, redis: Any) -> None:
    async with SimulatedCluster(1, server.url) as cluster:
        for _ in range(6000):
            if await redis.exists("llumnix:instance_status:sim-0"):
                break
            await asyncio.sleep(0.01)
        await redis.set("llumnix:instance_metadata:sim-0", metadata("sim-0"))
        await cluster[0].stop()
        assert await redis.exists("llumnix:instance_metadata:sim-0")


async def test_other_writers_are_seen_when_they_publish(store: RedisStore, redis: Any) -> None:
    await redis.set("llumnix:instance_metadata:x", metadata("x"))
    await redis.publish("llumnix:changes", "x")
    await until(lambda: "x" in store.view)
    await redis.set("llumnix:instance_status:x", status("x", num_running_requests=7))
    await redis.publish("llumnix:changes", "x")
    await until(lambda: (seen := store.view["x"].status) is not None and seen.num_running_requests == 7)
    await redis.delete("llumnix:instance_metadata:x", "llumnix:instance_status:x")
    await redis.publish("llumnix:changes", "x")
    await until(lambda: "x" not in store.view)


async def test_a_missed_message_is_made_good_by_a_scan(
    store: RedisStore, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "RESCAN_S", 0.2)
    await redis.set("llumnix:instance_metadata:x", metadata("x"))
    await redis.set("llumnix:instance_status:x", status("x"))
    await until(lambda: "x" in store.view and store.view["x"].status is not None)
    await until(lambda: "x" not in store.view)  # it repeats nothing


async def test_rubbish_is_refused_and_said_once(
    store: RedisStore, redis: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_module, "RESCAN_S", 0.1)
    await redis.set("llumnix:instance_metadata:rubbish", b"\xff\xff\xff")
    await redis.set("llumnix:instance_metadata:liar", metadata("somebody"))
    await redis.set("llumnix:instance_metadata:minus", metadata("minus"))
    await redis.set("llumnix:instance_status:minus", status("minus", num_running_requests=-1))
    await redis.set(b"llumnix:instance_metadata:\xff\xfe", metadata("x"))
    await redis.set("llumnix:instance_metadata:" + "x" * 1000, metadata("x"))
    await redis.set("llumnix:instance_metadata:good", metadata("good"))
    for garbage in (b"", b"\xff", b"y" * 5000, b"nobody"):
        await redis.publish("llumnix:changes", garbage)
    await until(lambda: "num_running_requests is -1" in caplog.text)
    assert set(store.view) == {"good", "minus"}
    assert store.view["minus"].status is None
    assert caplog.text.count("it is not a valid message") == 1
    assert "that of 'somebody'" in caplog.text


async def test_a_server_that_stands_still(store: RedisStore, server: RedisServer) -> None:
    async with SimulatedCluster(1, server.url):
        await until(lambda: "sim-0" in store.view)
        server.signal(signal.SIGSTOP)
        try:
            await until(lambda: not store.view.connected)
            assert "sim-0" in store.view
            assert store.view.age_s > 0
        finally:
            server.signal(signal.SIGCONT)
        await until(lambda: store.view.connected)
        before = store.view["sim-0"].received_s
        await until(lambda: store.view["sim-0"].received_s > before)


async def test_a_wrong_password_is_a_problem_not_a_crash() -> None:
    async with RedisServer("right") as server:
        store = RedisStore(server.url.replace("right", "wrong"))
        await store.start()
        await until(lambda: "password" in store.problem)
        assert not store.view.connected
        assert "wrong" not in store.problem.replace("wrong number", "")
        await store.close()


async def wait_for(redis: Any, key: str) -> None:
    async with asyncio.timeout(60):
        while not await redis.exists(key):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_writers_keep_a_pace_that_readers_of_a_large_cluster_bear(server: RedisServer, redis: Any) -> None:
    link = RedisLink(server.url)
    described = InstanceMetadata.FromString(metadata("x"))
    await link.open(described, lambda: None)
    assert link.min_interval_s == LEAST_INTERVAL_S
    (now_s, _) = await redis.time()
    await redis.zadd("llumnix:instances", {f"i-{number}": now_s for number in range(999)})
    await link.describe(described)
    assert link.min_interval_s == 1000 / MOST_WRITES_PER_S
    await link.leave()
    assert await redis.zcard("llumnix:instances") == 999
    await link.close()


async def test_clusters_in_one_redis_do_not_wake_each_other(server: RedisServer, redis: Any) -> None:
    urls = [server.url, f"{server.url}/2", f"{server.url}?cluster=blue", f"{server.url}/2?cluster=blue"]
    layouts = [Layout.of(url) for url in urls]
    assert [layout.channel for layout in layouts] == [
        "llumnix:changes", "llumnix:changes:2", "llumnix:blue:changes", "llumnix:blue:changes:2"
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        stores = []
        for url in urls:
            store = RedisStore(url)
            stack.push_async_callback(store.close)
            await store.start()
            stores.append(store)
        clients = [await stack.enter_async_context(connect(url)) for url in urls]
        async with asyncio.timeout(60):
            for store in stores:
                await store.complete.wait()
        for number, (client, layout) in enumerate(zip(clients, layouts, strict=True)):
            name = f"of-{number}"
            await client.set(layout.metadata + name, metadata(name))
            await client.publish(layout.channel, name)
        async with asyncio.timeout(60):
            while not all(store.view for store in stores):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [list(store.view) for store in stores] == [["of-0"], ["of-1"], ["of-2"], ["of-3"]]


async def test_llumlets_of_the_former_release_are_heard_in_any_database(
    server: RedisServer, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llumsched.cms.redis.RESCAN_S", 3600.0)
    url = f"{server.url}/2"
    async with contextlib.AsyncExitStack() as stack:
        store = RedisStore(url)
        stack.push_async_callback(store.close)
        await store.start()
        client = await stack.enter_async_context(connect(url))
        await stack.enter_async_context(asyncio.timeout(60))
        await store.complete.wait()
        await client.set(Layout.of(url).metadata + "old", metadata("old"))
        await client.publish("llumnix:changes", "of another database")
        await client.publish("llumnix:changes", "old")
        while list(store.view) != ["old"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_name_of_a_cluster_that_is_none_is_a_fault() -> None:
    for name in ("", "a_b", "a:b", "x" * 65):
        with pytest.raises(ValueError, match="has a cluster that is not"):
            RedisStore(f"redis://127.0.0.1:1?cluster={name}")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("ssl_ca_certs=/nope", "ssl_ca_certs /nope: No such file"),
        ("ssl_certfile=/nope&ssl_keyfile=/none", "ssl_certfile /nope: .*; ssl_keyfile /none: "),
        ("ssl_ciphers=bogus", "TLS options that do not work .ssl_ciphers.: "),
        ("ssl_min_version=zz", "Invalid value for 'ssl_min_version'"),
    ],
)
@pytest.mark.parametrize("url", ["rediss://127.0.0.1:1", "rediss+sentinel://127.0.0.1:1/service"])
async def test_options_that_cannot_work_are_named_at_start(url: str, option: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RedisStore(f"{url}?{option}")
    with pytest.raises(ValueError, match=said):
        RedisLink(f"{url}?{option}")


async def test_two_instances_with_one_id_are_told_apart(
    store: RedisStore, redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each writes over the other one's records."""
    lives = [
        InstanceMetadata(
            instance_id="x", incarnation=str(number), ip="127.0.0.1", api_server_port=8000 + number,
            instance_type="neutral", utc_create=100.0 + number,
        ).SerializeToString()
        for number in range(2)
    ]  # fmt: skip
    for described in (lives[1], lives[0], lives[1]):
        await redis.set("llumnix:instance_metadata:x", described)
        await redis.publish("llumnix:changes", "x")
        before = store.view.heard_s
        await until(lambda before=before: store.view.heard_s > before and "x" in store.view)
    assert store.view["x"].metadata.incarnation == "1"
    await until(lambda: "127.0.0.1:8000 and 127.0.0.1:8001 both report as 'x'" in caplog.text)
    assert "--llumlet-instance-id" in caplog.text
