# SPDX-License-Identifier: Apache-2.0
"""An embedded CMS against instances that lie, flood or say nothing, and watchers that do not read."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from llumlet.contract.channels import open_channel
from llumlet.contract.proto.llumlet_pb2_grpc import CmsStub
from llumlet.contract.types import InstanceMetadata, InstanceReport, InstanceStatus, WatchRequest
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import end
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.cms import allowance as allowance_module
from llumsched.cms import embedded as embedded_module
from llumsched.cms import intake as intake_module
from llumsched.cms import watchers as watchers_module
from llumsched.cms.embedded import EmbeddedStore
from llumsched.cms.store import open_store, store_faults
from llumsched.cms.validation import MAX_LIST, MAX_REPORT_BYTES
from llumsched.cms.watch_store import WatchStore
from llumsched.cms.watchers import ViewWatcher
from llumsim.live import SimulatedCluster
from tests.llumlet.fake_agent import until
from tests.support.authority import Authority, credential_files, token_file

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def stub(store: EmbeddedStore) -> AsyncIterator[Any]:
    async with open_channel(store.address, NONE) as channel:
        yield CmsStub(channel)


def metadata(**fields: Any) -> InstanceMetadata:
    usual = {"instance_id": "a", "incarnation": "1", "ip": "127.0.0.1", "instance_type": "neutral", "utc_create": 5.0}
    return InstanceMetadata(**(usual | fields))


def status(**fields: Any) -> InstanceStatus:
    return InstanceStatus(**({"instance_id": "a", "incarnation": "1", "timestamp_ms": 1, "update_id": 1} | fields))


class Changes:
    """How many of one instance."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id, self.number = instance_id, 0

    def appeared(self, instance: Instance) -> None: ...

    def left(self, instance: Instance) -> None: ...

    def changed(self, instance: Instance) -> None:
        self.number += instance.id == self.instance_id


async def begin(stub: Any, **fields: Any) -> Any:
    """A stream whose metadata was taken."""
    call = stub.Report()
    await call.write(InstanceReport(metadata=metadata(**fields)))
    assert await call.read() is not aio.EOF
    return call


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(60):
        return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"instance_id": ""}, "instance_id is empty"),
        ({"instance_id": "x" * 300}, "instance_id has 300 characters"),
        ({"instance_id": "a\x1b[2J"}, "cannot be printed"),
        ({"incarnation": ""}, "incarnation is empty"),
        ({"instance_type": "boss"}, "instance_type 'boss' is not one of neutral, prefill, decode"),
        ({"llumlet_port": 70000}, "llumlet_port 70000 is not a port"),
        ({"utc_create": float("nan")}, "utc_create is nan"),
        ({"num_total_blocks": -1}, "num_total_blocks is -1"),
        ({"served_models": ["m"] * (MAX_LIST + 1)}, "too long"),
    ],
)
async def test_metadata_that_lies(store: EmbeddedStore, stub: Any, fields: dict[str, Any], fault: str) -> None:
    call = stub.Report()
    await call.write(InstanceReport(metadata=metadata(**fields)))
    code, details = await ending(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert fault in details
    assert not store.view


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"instance_id": "b"}, "instance_id 'b' is not that of the metadata"),
        ({"incarnation": "2"}, "incarnation '2' is not that of the metadata"),
        ({"num_running_requests": -4}, "num_running_requests is -4"),
        ({"kv_cache_usage_ratio_migrate_in": float("inf")}, "kv_cache_usage_ratio_migrate_in is inf"),
        ({"step_duration": float("nan"), "num_used_gpu_tokens": -1}, "num_used_gpu_tokens is -1; step_duration is nan"),
        ({"waiting_requests": ["r"] * (MAX_LIST + 1)}, "requests are listed"),
        ({"coming_ends": [0] * (MAX_LIST + 1)}, "coming steps are told"),
    ],
)
async def test_a_status_that_lies(store: EmbeddedStore, stub: Any, fields: dict[str, Any], fault: str) -> None:
    call = await begin(stub)
    await call.write(InstanceReport(status=status(**fields)))
    code, details = await ending(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert fault in details
    assert store.view["a"].status is None


async def test_a_report_that_is_too_large(store: EmbeddedStore, stub: Any) -> None:
    call = await begin(stub)
    await call.write(InstanceReport(status=status(waiting_requests=["r" * MAX_REPORT_BYTES])))
    assert (await ending(call))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_metadata_comes_first_and_soon(
    store: EmbeddedStore, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = stub.Report()
    await call.write(InstanceReport(status=status()))
    assert (await ending(call)) == (grpc.StatusCode.INVALID_ARGUMENT, "the first report must be the metadata")
    monkeypatch.setattr(embedded_module, "FIRST_REPORT_S", 0.1)
    assert (await ending(stub.Report())) == (grpc.StatusCode.INVALID_ARGUMENT, "the metadata did not come")


async def test_a_stream_is_of_one_instance(store: EmbeddedStore, stub: Any) -> None:
    call = await begin(stub)
    await call.write(InstanceReport(metadata=metadata(instance_id="b")))
    assert (await ending(call))[1] == "a stream is of one life of one instance"
    call = await begin(stub)
    await call.write(InstanceReport())
    assert (await ending(call))[1] == "a report is empty"


async def test_a_second_stream_of_a_life_ends_the_first(store: EmbeddedStore, stub: Any) -> None:
    first = await begin(stub)
    second = await begin(stub)
    assert (await ending(first))[0] == grpc.StatusCode.ABORTED
    await second.write(InstanceReport(status=status()))
    await until(lambda: store.view["a"].status is not None)


async def test_a_replaced_life_is_told_so(store: EmbeddedStore, stub: Any) -> None:
    old = await begin(stub)
    new = await begin(stub, incarnation="2", utc_create=6.0)
    await old.write(InstanceReport(status=status(update_id=9)))
    assert (await ending(old))[0] == grpc.StatusCode.INVALID_ARGUMENT
    for incarnation, why in (("1", "this life of the instance is over"), ("0", "a later life of the instance")):
        again = stub.Report()
        await again.write(InstanceReport(metadata=metadata(incarnation=incarnation)))
        code, details = await ending(again)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert why in details
    assert store.view["a"].metadata.incarnation == "2"
    assert store.view["a"].status is None
    new.cancel()


async def test_signed_off_life_does_not_return(store: EmbeddedStore, stub: Any) -> None:
    call = await begin(stub)
    await call.write(InstanceReport(leaving=True))
    assert await call.read() is not aio.EOF
    assert not store.view
    await call.write(InstanceReport(status=status()))
    assert (await ending(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert not store.view


@pytest.mark.parametrize(
    ("limit", "per_s", "report"),
    [
        ("MAX_REPORTS_PER_S", 50.0, lambda number: InstanceReport(status=status(update_id=number))),
        (
            "MAX_BYTES_PER_S",
            50_000.0,
            lambda number: InstanceReport(status=status(update_id=number, waiting_requests=["r" * 1000])),
        ),
        ("MAX_METADATA_PER_S", 50.0, lambda number: InstanceReport(metadata=metadata(model=f"m{number}"))),
    ],
    ids=["many", "large", "metadata"],
)
async def test_a_flood_is_slowed_and_disturbs_nobody(
    store: EmbeddedStore,
    stub: Any,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    per_s: float,
    report: Callable[[int], InstanceReport],
) -> None:
    monkeypatch.setattr(allowance_module, limit, per_s)
    began_s = time.monotonic()
    flood, taken = await begin(stub), Changes("a")
    store.view.observe(taken)

    async def write() -> None:
        for number in range(1, 1 << 30):
            await flood.write(report(number))

    async def read() -> None:
        while await flood.read() is not aio.EOF:
            pass

    flooding = [asyncio.create_task(write()), asyncio.create_task(read())]
    async with SimulatedCluster(1, str(store.address)) as cluster:
        await until(lambda: "sim-0" in store.view)
        await until(lambda: taken.number > 80)
        await cluster[0].submit(30, 4).done()
        await until(
            lambda: (seen := store.view["sim-0"].status) is not None and seen.update_id == cluster[0].num_changes
        )
        number, seconds = taken.number, time.monotonic() - began_s
    await end(*flooding)
    # A second's worth at once, then the rate.
    assert number < 50 * (seconds + 1) + 2


async def test_report_costs_are_counted_in_time() -> None:
    now = [0.0]
    allowance = allowance_module.TimeAllowance(lambda: now[0])
    names = [f"{number:036d}" for number in range(4000)]
    large, small = (InstanceReport(status=status(waiting_requests=some)) for some in (names, []))
    assert allowance.spend(small) == pytest.approx(-1 + 1 / allowance_module.MAX_REPORTS_PER_S)
    waits = []
    for _ in range(100):
        waits.append(max(0.0, allowance.spend(large)))
        now[0] += waits[-1]
    assert waits[0] == 0
    assert waits[-1] == pytest.approx(1 / 20, rel=0.1)
    described = [allowance.spend(InstanceReport(metadata=metadata())) for _ in range(2)]
    assert described[1] - described[0] == pytest.approx(1 / allowance_module.MAX_METADATA_PER_S)


async def test_a_refusal_is_said_once(store: EmbeddedStore, stub: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(**fields: Any) -> None:
        call = await begin(stub)
        await call.write(InstanceReport(status=status(**fields)))
        assert (await ending(call))[0] == grpc.StatusCode.INVALID_ARGUMENT

    for _ in range(3):
        await refuse(num_running_requests=-4)
    assert caplog.text.count("A report of 'a' is refused: num_running_requests is -4") == 1
    await refuse(num_running_requests=-5)
    good = await begin(stub)
    await good.write(InstanceReport(status=status()))
    await until(lambda: store.view["a"].status is not None)
    await refuse(num_running_requests=-5)
    assert caplog.text.count("num_running_requests is -5") == 2
    for _ in range(2):
        nameless = stub.Report()
        await nameless.write(InstanceReport(status=status()))
        await ending(nameless)
    assert caplog.text.count("the first report must be the metadata") == 1


async def test_an_old_life_that_comes_back_is_said_once(
    store: EmbeddedStore, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    new = await begin(stub, incarnation="2", utc_create=6.0)
    for update_id in (1, 2, 3):
        old = stub.Report()
        await old.write(InstanceReport(metadata=metadata()))
        assert (await ending(old))[0] == grpc.StatusCode.FAILED_PRECONDITION
        await new.write(InstanceReport(status=status(incarnation="2", update_id=update_id)))
        await until(
            lambda wanted=update_id: (seen := store.view["a"].status) is not None and seen.update_id == wanted  # type: ignore[misc]
        )
    assert caplog.text.count("A report of 'a' is refused: a later life of the instance has begun") == 1


async def test_there_are_only_so_many(store: EmbeddedStore, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MAX_INSTANCES", 2)
    calls = [await begin(stub, instance_id=name) for name in ("a", "b")]
    third = stub.Report()
    await third.write(InstanceReport(metadata=metadata(instance_id="c")))
    assert (await ending(third))[1] == "there are 2 instances already"
    await calls[0].write(InstanceReport(leaving=True))
    await until(lambda: len(store.view) == 1)
    calls.append(await begin(stub, instance_id="c"))
    assert set(store.view) == {"b", "c"}


async def test_there_are_only_so_many_watchers(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "MAX_WATCHERS", 1)
    first = stub.Watch(WatchRequest())
    assert (await first.read()).complete
    assert (await ending(stub.Watch(WatchRequest())))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()


async def test_a_watcher_that_is_slow_is_told_the_newest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View()
    async with ViewWatcher(view) as watcher:
        for name in "ab":
            view.put_metadata(metadata(instance_id=name))
        for update_id in range(1000):
            view.put_status(status(update_id=update_id))
        view.remove("b")
        told = [await watcher.next() for _ in range(3)]
        assert told[0].instance.status.update_id == 999
        assert told[1].left == "b"
        assert told[2].complete
        monkeypatch.setattr(watchers_module, "_MAX_PENDING", 5)
        for index in range(20):
            view.put_metadata(metadata(instance_id=f"i-{index}"))
        with pytest.raises(OverflowError):
            await watcher.next()


async def test_only_loopback_without_credentials() -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        await open_store("listen://0.0.0.0:0").start()


async def test_a_port_that_is_taken(store: EmbeddedStore) -> None:
    with pytest.raises(OSError, match="cannot listen"):
        await EmbeddedStore(*store.address).start()


async def test_with_credentials(tmp_path: Path) -> None:
    authority, token = Authority(tmp_path), token_file(tmp_path)
    ours = Credentials.load(credential_files(authority, "ours", token))
    strangers = Credentials.load(
        credential_files(Authority(tmp_path, "another authority"), "theirs", token_file(tmp_path, "other"))
    )
    tokenless = dataclasses.replace(ours, token_file=None)
    store = EmbeddedStore(credentials=ours)
    await store.start()
    watches = [WatchStore(store.address, each) for each in (ours, strangers, tokenless, NONE)]
    for watch in watches:
        await watch.start()
    async with (
        SimulatedCluster(1, str(store.address), credentials=ours),
        SimulatedCluster(1, str(store.address), prefix="stranger-", credentials=strangers),
    ):
        await until(lambda: "sim-0" in watches[0].view)
        await until(lambda: all(watch.problem != "not connected yet" for watch in watches))
        assert set(store.view) == {"sim-0"}
        assert [watch.view.connected for watch in watches] == [True, False, False, False]
        assert "token" in watches[2].problem
    for watch in watches:
        await watch.close()
    await store.close()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("nowhere", "is not HOST:PORT"),
        ("listen://nowhere", "is not HOST:PORT"),
        ("redis://:secret@", "names no host"),
        ("redis://h:99999", "redis:// URL is not one"),
        ("http://h:1", "is neither HOST:PORT nor"),
    ],
)
async def test_urls_that_are_none(url: str, fault: str) -> None:
    (found,) = store_faults(url)
    assert fault in found
    assert "secret" not in found
    with pytest.raises(ValueError, match=re.escape(found)):
        open_store(url)
