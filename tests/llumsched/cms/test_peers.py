# SPDX-License-Identifier: Apache-2.0
"""What a store tells API servers of others that could take their requests, and what that costs in a large cluster."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from llumlet.contract.cms import redis_reports
from llumlet.contract.cms.peers import MAX_PEERS
from llumlet.contract.cms.redis_reports import Layout, RedisLink
from llumlet.contract.cms.stores import open_directory
from llumlet.contract.types import (
    Health,
    InstanceMetadata,
    InstanceStatus,
    PeersRequest,
)
from llumlet.process.redis_client import connect
from llumsched.cluster.view import View
from llumsched.cms.peers import PREPARED_S, PeerLists
from tests.support.cms import embedded_store
from tests.support.redis_server import RedisServer

LAYOUT = Layout.of("redis://127.0.0.1")


def metadata(name: str, digest: str = "d", port: int = 1) -> InstanceMetadata:
    return InstanceMetadata(
        instance_id=name,
        incarnation="1",
        ip="127.0.0.1",
        llumlet_port=port,
        compatibility_digest=digest,
        instance_type="neutral",
    )


def status(name: str, used: int = 0, **fields: Any) -> InstanceStatus:
    given = {"schedulable": True, "num_used_gpu_tokens": used, "num_total_gpu_tokens": 10_000} | fields
    return InstanceStatus(instance_id=name, incarnation="1", update_id=1, timestamp_ms=1, **given)


def filled(view: View, number: int) -> View:
    """The higher the number of an instance, the fuller it is."""
    for row in range(number):
        view.put_metadata(metadata(f"i-{row:04}", port=row + 1))
        view.put_status(status(f"i-{row:04}", used=row))
    return view


def ask(lists: PeerLists, *own: str, digest: str = "", number: int = 0) -> list[str]:
    answer = lists.answer(PeersRequest(instance_ids=own, compatibility_digest=digest, number=number))
    return [peer.instance_id for peer in answer.peers]


def test_incompatible_instance_is_no_peer() -> None:
    """Not the caller's own, not who takes nothing, nor who cannot exchange requests with it."""
    view = View()
    for name, digest, said in (
        ("own", "d", status("own")),
        ("busy", "d", status("busy", 6000)),
        ("free", "d", status("free", 1000)),
        ("other model", "e", status("other model", 100)),
        ("draining", "d", status("draining", 200, schedulable=False)),
        ("hung", "d", status("hung", 300, health=Health.HUNG)),
        ("full", "d", status("full", 10_000)),
    ):
        view.put_metadata(metadata(name, digest))
        view.put_status(said)
    view.put_metadata(metadata("starting"))
    answer = PeerLists(view).answer(PeersRequest(instance_ids=["own"]))
    assert {peer.instance_id: peer.room_tokens for peer in answer.peers} == {"free": 9000, "busy": 4000, "full": 500}
    assert [peer.instance_id for peer in answer.peers] == ["free", "busy", "full"]
    assert answer.compatibility_digest == "d"


def test_a_caller_that_is_not_known_any_more_says_what_it_was() -> None:
    view = filled(View(), 3)
    view.put_metadata(metadata("other model", "e"))
    view.put_status(status("other model"))
    lists = PeerLists(view)
    assert ask(lists, "gone", digest="e") == ["other model"]
    assert set(ask(lists, "gone")) == {"i-0000", "i-0001", "i-0002", "other model"}


@pytest.mark.parametrize("number", [1, 10, MAX_PEERS, 0, 1000])
def test_the_freest_and_others_by_chance(number: int) -> None:
    lists, told = PeerLists(filled(View(), 1000), draw=random.Random(1)), Counter[str]()
    wanted = min(number or MAX_PEERS, MAX_PEERS)
    for _ in range(200):
        found = ask(lists, "i-0000", "i-0500", number=number)
        assert len(set(found)) == len(found)
        assert wanted - 2 <= len(found) <= wanted
        assert found == sorted(found)
        told.update(found)
    assert not {"i-0000", "i-0500"} & told.keys()
    assert told["i-0001"] == 200
    assert wanted == 1 or len(told) > 150


def test_all_are_gone_through_once_a_second() -> None:
    now_s, view = [0.0], filled(View(), 10)
    lists = PeerLists(view, lambda: now_s[0])
    assert "new" not in ask(lists)
    view.put_metadata(metadata("new"))
    view.put_status(status("new"))
    assert "new" not in ask(lists)
    now_s[0] += PREPARED_S + 0.1
    assert "new" in ask(lists)


@pytest.mark.asyncio
async def test_an_answer_costs_little_in_a_large_cluster() -> None:
    """A thousand API servers that ask every five seconds: 200 questions a second."""
    async with embedded_store() as store:
        filled(store.view, 1000)
        directory = open_directory(str(store.address))
        await directory.peers(("i-0007",), "")
        began_s = time.process_time()
        for _ in range(50):
            answer = await directory.peers(("i-0007",), "d")
            assert answer.ByteSize() < 4096
        taken_s = (time.process_time() - began_s) / 50
        await directory.close()
    # Both ends, on any machine; to read all of the view took 0.1 s and more.
    assert taken_s < 0.02


@pytest.mark.asyncio
async def test_a_redis_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_reports, "TTL_S", 3600)
    async with RedisServer() as server:
        writer = connect(server.url)
        for row in range(300):
            link = RedisLink(server.url)
            await link.open(metadata(f"i-{row}"), lambda: None)
            await link.push(status(f"i-{row}", used=row), lambda: metadata("never"))
            await link.close()
        directory = open_directory(server.url)
        answer = await directory.peers(("i-7",), "")
        assert answer.compatibility_digest == "d"
        assert len(answer.peers) in (MAX_PEERS, MAX_PEERS - 1)
        assert "i-7" not in {peer.instance_id for peer in answer.peers}
        statistics = await writer.info("commandstats")
        assert "cmdstat_scan" not in statistics
        # Who ended is not drawn any more; of whom nothing is known, either.
        link = RedisLink(server.url)
        await link.open(metadata("i-7"), lambda: None)
        await link.leave()
        await link.close()
        assert await writer.zscore(LAYOUT.peers("d"), "i-7") is None
        await writer.delete(LAYOUT.metadata + "i-8", LAYOUT.status + "i-9")
        told = {peer.instance_id for _ in range(20) for peer in (await directory.peers((), "d")).peers}
        assert not {"i-7", "i-8", "i-9"} & told
        assert len(told) > MAX_PEERS
        await directory.close()
        await writer.aclose()


@pytest.mark.asyncio
async def test_a_redis_without_the_set_is_read_whole() -> None:
    async with RedisServer() as server:
        writer = connect(server.url)
        for name, digest in (("own", "d"), ("other", "d"), ("other model", "e")):
            await writer.set(LAYOUT.metadata + name, metadata(name, digest).SerializeToString())
            await writer.set(LAYOUT.status + name, status(name).SerializeToString())
        directory = open_directory(server.url)
        answer = await directory.peers(("own",), "")
        assert [peer.instance_id for peer in answer.peers] == ["other"]
        await directory.close()
        await writer.aclose()


@pytest.mark.asyncio
async def test_a_redis_is_sent_a_script_once() -> None:
    async with RedisServer() as server:
        link, reader = RedisLink(server.url), connect(server.url)
        await link.open(metadata("i"), lambda: None)
        for update_id in range(5):
            await link.push(InstanceStatus(instance_id="i", update_id=update_id), lambda: metadata("i"))
        # A server that was started anew knows none of them.
        await reader.script_flush()
        await link.push(InstanceStatus(instance_id="i", update_id=9), lambda: metadata("i"))
        statistics = await reader.info("commandstats")
        assert "cmdstat_eval" not in statistics
        assert statistics["cmdstat_evalsha"]["calls"] >= 7
        assert InstanceStatus.FromString(await reader.get(LAYOUT.status + "i")).update_id == 9
        await link.close()
        await reader.aclose()
