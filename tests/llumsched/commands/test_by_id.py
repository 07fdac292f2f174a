# SPDX-License-Identifier: Apache-2.0
"""`llumnix ps`, `status`, `migrate` and `drain` by the ids of instances, through a CMS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from llumsched.cli import main, prepare
from llumsched.cms.embedded import EmbeddedStore
from llumsim.live import SimulatedCluster, engine_model
from tests.llumlet.fake_agent import until
from tests.llumsched.conftest import Llumnix
from tests.support.redis_server import RedisServer


@pytest_asyncio.fixture
async def cluster(store: EmbeddedStore) -> AsyncIterator[SimulatedCluster]:
    async with SimulatedCluster(2, str(store.address), model=engine_model(step_s=0.05)) as running:
        await until(lambda: len(store.view) == 2)
        yield running


@pytest.mark.asyncio
async def test_all_instances_of_the_cms(llumnix: Llumnix, store: EmbeddedStore, cluster: SimulatedCluster) -> None:
    done = await llumnix("status", "--cms", str(store.address), "--json")
    assert [line["status"]["instance_id"] for line in done.lines] == ["sim-0", "sim-1"]
    cluster[1].submit(20, 4000, external_id="cmpl-x")
    done = await llumnix("ps", "sim-1", "--cms", str(store.address))
    assert (done.code, done.err) == (0, "")
    assert "cmpl-x" in done.out


@pytest.mark.asyncio
async def test_migrate_and_drain_by_id(llumnix: Llumnix, store: EmbeddedStore, cluster: SimulatedCluster) -> None:
    request = cluster[0].submit(20, 4000)
    await until(lambda: request.output)
    done = await llumnix("migrate", "--from", "sim-0", "--to", "sim-1", "--all", "--cms", str(store.address))
    assert (done.code, request.owner) == (0, "sim-1"), done.err
    done = await llumnix("drain", "sim-1", "--to", "sim-0", "--cms", str(store.address), "--timeout", "10")
    assert (done.code, request.owner) == (0, "sim-0"), done.err
    await until(lambda: "sim-1" not in store.view)


@pytest.mark.asyncio
async def test_an_unknown_instance(llumnix: Llumnix, store: EmbeddedStore, cluster: SimulatedCluster) -> None:
    done = await llumnix("ps", "nobody", "--cms", str(store.address))
    assert (done.code, done.out) == (4, "")
    assert f"the CMS at {store.address}: it knows no instance nobody (known: sim-0, sim-1)" in done.err
    done = await llumnix("drain", "nobody", "--cms", str(store.address), "--json")
    assert done.code == 4
    assert done.lines[0]["error"]["address"] == str(store.address)


@pytest.mark.asyncio
async def test_a_cms_that_is_not_there(llumnix: Llumnix, unused_tcp_port: int) -> None:
    done = await llumnix("ps", "--cms", f"127.0.0.1:{unused_tcp_port}")
    assert done.code == 4
    assert "Connection refused" in done.err
    done = await llumnix(
        "migrate", "--from", "a", "--to", "b", "--all", "--cms", f"redis://127.0.0.1:{unused_tcp_port}"
    )
    assert done.code == 4
    assert "--llumlet-cms" in done.err


@pytest.mark.asyncio
async def test_through_redis(llumnix: Llumnix) -> None:
    async with RedisServer("secret") as server, SimulatedCluster(1, server.url):
        await until_reported(llumnix, server.url)
        done = await llumnix("ps", "sim-9", "--cms", server.url)
        assert done.code == 4
        assert "secret" not in done.err


async def until_reported(llumnix: Llumnix, url: str) -> None:
    for _ in range(5):
        if "sim-0" in (await llumnix("status", "--cms", url)).out:
            return
    pytest.fail("the instance did not appear")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["ps", "--cms", "nowhere"], "--cms 'nowhere' is not HOST:PORT"),
        (["ps", "--cms", "redis://"], "--cms the redis:// URL names no host"),
        (["ps", "--cms", "listen://127.0.0.1:1"], "a command does not listen"),
        (["ps", "engine:1x"], "INSTANCE 'engine:1x': the port must be a number"),
        (["ps", "--llumlet", "engine-1"], "--llumlet 'engine-1' is not HOST:PORT"),
        (["ps", "--cluster", "a/b"], "--cluster 'a/b' is neither HOST nor HOST:PORT"),
        (["drain"], "INSTANCE is missing: the id of the instance that is to end, or --llumlet HOST:PORT"),
        (["drain", "a:1", "--llumlet", "a:2"], "INSTANCE and --llumlet exclude each other"),
        (["migrate", "--from", "a", "--to", "a", "--all", "--cms", "c:1"], "--from and --to are the same llumlet, a"),
    ],
)
def test_faults(capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str) -> None:
    assert main(arguments) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "environ", "cms", "scheduler"),
    [
        ([], {}, "127.0.0.1:8003", "127.0.0.1:8002"),
        (["--cluster", "a"], {}, "a:8003", "a:8002"),
        (["--cluster", "a:7000"], {}, "a:7001", "a:7000"),
        (["--cluster", "::1"], {}, "[::1]:8003", "[::1]:8002"),
        (["--cluster", "[::1]:7"], {}, "[::1]:8", "[::1]:7"),
        ([], {"LLUMNIX_CLUSTER": "b"}, "b:8003", "b:8002"),
        ([], {"LLUMNIX_CMS": "redis://c"}, "redis://c", None),
        (["--cms", "c:1"], {"LLUMNIX_CLUSTER": "b"}, "c:1", "b:8002"),
        (["--cluster", "a"], {"LLUMNIX_CMS": "c:1"}, "a:8003", "a:8002"),
        (["--cluster", "a", "--cms", "c:1"], {}, "c:1", "a:8002"),
    ],
)
def test_cluster_is_named_by_its_scheduler(
    words: list[str], environ: dict[str, str], cms: str, scheduler: str | None
) -> None:
    top = prepare("top", ["top", "--once", *words], environ)
    assert not top.faults
    assert (top.config.cms, top.config.scheduler and str(top.config.scheduler)) == (cms, scheduler)
    for command in ("ps", "status"):
        assert prepare(command, [command, *words], environ).config[0].cms == cms
    assert prepare("drain", ["drain", "sim-0", *words], environ).config.places.cms == cms
    if "--cms" not in words:
        explained = prepare("explain", ["explain", *words], environ).config
        assert str(explained.scheduler) == (scheduler or "127.0.0.1:8002")


@pytest.mark.asyncio
async def test_error_names_the_ways_to_a_cluster(llumnix: Llumnix, unused_tcp_port: int) -> None:
    place = f"127.0.0.1:{unused_tcp_port}"
    for words in (["status"], ["ps"], ["drain", "sim-0"], ["explain"]):
        done = await llumnix(*words, "--cluster", place)
        assert done.code == 4
        assert "--cluster HOST[:PORT] (or LLUMNIX_CLUSTER)" in done.err
        assert "Traceback" not in done.err
        assert "ssl:default" not in done.err
