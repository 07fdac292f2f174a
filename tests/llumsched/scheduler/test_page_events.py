# SPDX-License-Identifier: Apache-2.0
"""`/events` tells states: all at first, then what changed, and to who is slow the newest only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from llumlet.contract.types import Health, InstanceMetadata, InstanceStatus
from llumlet.process.tasks import end
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.view import View
from llumsched.rescheduling.executing.records import MoveRecord, Outcome, Records
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.scheduler import feed as feed_module
from llumsched.scheduler import web_page as events
from llumsched.scheduler.feed import AT_ONCE, NUM_MOVES, Feed
from llumsched.scheduler.overview import PredictedTimes
from llumsched.summary import summary

DEADLINE_S = 60.0


def metadata(name: str, incarnation: str = "1") -> InstanceMetadata:
    return InstanceMetadata(instance_id=name, incarnation=incarnation, model="m", ip="10.0.0.1", api_server_port=80)


def status(name: str, update_id: int, **fields: Any) -> InstanceStatus:
    defaults = {"incarnation": "1", "schedulable": True, "num_total_gpu_tokens": 100}
    return InstanceStatus(instance_id=name, update_id=update_id, **defaults | fields)


def move(number: int, **fields: Any) -> MoveRecord:
    selection = Selection(Unit.NUM_REQ, Order.SR, 1.0)
    move = Move("neutral_load", Purpose.BALANCE, "a", "b", selection, 10.0, gain=float("inf"))
    return MoveRecord(number, move, time.time(), **fields)


class Page:
    def __init__(self, url: str, view: View, records: Records, session: aiohttp.ClientSession) -> None:
        self.url, self.view, self.records, self.session = url, view, records, session


@pytest_asyncio.fixture
async def page() -> AsyncIterator[Page]:
    view, records, app = View(), Records(), web.Application()
    events.add_routes(app, view, records)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield Page(str(server.make_url("")), view, records, session)


async def next_event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        line = await response.content.readline()
        assert await response.content.readline() == b"\n"
    assert line.startswith(b"data: ")
    parsed: dict[str, Any] = json.loads(line[6:])
    return parsed


async def until(response: aiohttp.ClientResponse, key: str) -> dict[str, Any]:
    """The next event that tells something there."""
    while not (event := await next_event(response))[key]:
        pass
    return event


@pytest.mark.asyncio
async def test_the_first_event_holds_everything_and_later_ones_what_changed(page: Page) -> None:
    page.view.put_metadata(metadata("a"))
    page.view.put_metadata(metadata("b"))
    page.view.put_status(status("a", 1, num_used_gpu_tokens=25, num_running_requests=3))
    page.records.began(move(1, outcome=Outcome.MOVED))
    async with page.session.get(f"{page.url}/events") as response:
        assert response.content_type == "text/event-stream"
        first = await next_event(response)
        assert [(one["id"], one["state"], one["kv"]) for one in first["instances"]] == [
            ("a", "open", 0.25),
            ("b", "silent", None),
        ]
        assert [(one["number"], one["outcome"], one["gain"]) for one in first["moves"]] == [(1, "moved", None)]
        assert first["connected"]
        assert first["rescheduling"]
        page.view.put_status(status("b", 1, health=Health.HUNG))
        changed = await until(response, "instances")
        assert [(one["id"], one["state"]) for one in changed["instances"]] == [("b", "hung")]
        assert changed["moves"] == []
        page.view.remove("a")
        assert (await until(response, "left"))["left"] == ["a"]
        open_move = move(2)
        page.records.began(open_move)
        assert (await until(response, "moves"))["moves"][0]["outcome"] == "open"
        open_move.outcome = Outcome.MOVED
        page.records.changed(open_move)
        assert (await until(response, "moves"))["moves"][0]["outcome"] == "moved"


@pytest.mark.asyncio
async def test_a_beat_comes_without_any_change_and_tells_the_age_of_a_lost_view(page: Page) -> None:
    async with page.session.get(f"{page.url}/events") as response:
        assert (await next_event(response))["age_s"] == 0
        page.view.connected = False
        while (beat := await next_event(response))["connected"]:
            pass
        assert beat["age_s"] > 0


@pytest.mark.asyncio
async def test_returned_instance_is_told_once() -> None:
    view = View()
    feed = Feed(view, None)
    reader = feed.join()
    view.put_metadata(metadata("a"))
    assert len(json.loads(await feed.take(reader))["instances"]) == 1
    view.remove("a")
    view.put_metadata(metadata("a", "2"))
    told = json.loads(await feed.take(reader))
    assert [one["incarnation"] for one in told["instances"]] == ["2"]


@pytest.mark.asyncio
async def test_readers_that_are_told_at_one_time_share_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a thousand instances it is half a millisecond of the loop on which requests are placed."""
    num_looks = 0

    class Counting:
        def of_cluster(self) -> dict[str, Any]:
            return {}

        def of_instances(self) -> dict[str, PredictedTimes]:
            nonlocal num_looks
            num_looks += 1
            return {"a": PredictedTimes(float(num_looks), None)}

    view = View()
    feed = Feed(view, None, Counting())  # type: ignore[arg-type]
    readers = [feed.join() for _ in range(3)]
    view.put_metadata(metadata("a"))
    monkeypatch.setattr(feed_module, "PREDICTIONS_S", DEADLINE_S)
    told = [json.loads(await feed.take(reader))["instances"][0]["predicted_ms"] for reader in readers]
    assert (told, num_looks) == ([[1.0, None]] * 3, 1)
    monkeypatch.setattr(feed_module, "PREDICTIONS_S", 0.0)
    view.put_status(status("a", 1))
    assert json.loads(await feed.take(readers[0]))["instances"][0]["predicted_ms"] == [2.0, None]


@pytest.mark.asyncio
async def test_slow_reader_s_backlog_is_bounded_and_newest() -> None:
    view, records = View(), Records()
    feed = Feed(view, records)
    reader = feed.join()
    for update in range(1, 2000):
        view.put_metadata(metadata("a"))
        view.put_status(status("a", update, num_running_requests=update))
        view.put_metadata(metadata(f"gone-{update}"))
        view.remove(f"gone-{update}")
        records.began(move(update))
    told = json.loads(await feed.take(reader))
    assert [one["running"] for one in told["instances"]] == [1999]
    assert [one["number"] for one in told["moves"]] == list(range(2000 - NUM_MOVES, 2000))
    assert told["left"] == []
    feed.leave(reader)
    assert len(feed) == 0


@pytest.mark.asyncio
async def test_others_run_while_many_instances_are_told_and_what_changes_meanwhile_is_told_next() -> None:
    view = View()
    feed = Feed(view, None)
    reader = feed.join()
    names = [f"i{number:03d}" for number in range(4 * AT_ONCE)]
    for name in names:
        view.put_metadata(metadata(name))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1
            if turns == 1:
                view.put_status(status(names[0], 1))
                view.remove(names[1])
                view.remove(names[-1])

    running = asyncio.create_task(others())
    first = json.loads(await feed.take(reader))
    await end(running)
    assert turns >= 3
    assert [one["id"] for one in first["instances"]] == names[:-1]
    second = json.loads(await feed.take(reader))
    assert [(one["id"], one["state"]) for one in second["instances"]] == [(names[0], "open")]
    assert second["left"] == [names[1]]


@pytest.mark.asyncio
async def test_an_instance_is_put_into_words_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(feed_module, "summary", lambda one: made.append(one.id) or summary(one))
    view = View()
    feed = Feed(view, None)
    readers = [feed.join() for _ in range(3)]
    for name in "ab":
        view.put_metadata(metadata(name))
    for update in (1, 2):
        view.put_status(status("a", update, num_running_requests=update))
        told = [json.loads(await feed.take(reader))["instances"] for reader in readers]
        assert [[one["running"] for one in each if one["id"] == "a"] for each in told] == [[update]] * 3
    assert made == ["a", "b", "a"]


def test_the_more_is_told_the_longer_is_the_pause_and_all_readers_have_the_same() -> None:
    for num_told, interval_s in ((0, 0.1), (200, 0.1), (201, 0.2), (1000, 0.5), (10_000, 1.0)):
        ends = [now_s + events._pause_s(num_told, now_s) for now_s in (50.01, 50.02, 50.04)]
        assert ends == pytest.approx([50 + interval_s] * 3)
    # Who is late waits for the next time but one.
    assert 50.09 + events._pause_s(0, 50.09) == pytest.approx(50.2)


@pytest.mark.asyncio
async def test_readers_are_limited_and_leave(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_READERS", 1)
    async with page.session.get(f"{page.url}/events") as response:
        await next_event(response)
        async with page.session.get(f"{page.url}/events") as refused:
            assert refused.status == 503
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with page.session.get(f"{page.url}/events") as again:
                if again.status == 200:
                    return


@pytest.mark.asyncio
async def test_files_come_from_the_package_and_nothing_else(page: Page) -> None:
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        async with page.session.get(page.url + path) as response:
            assert (response.status, response.content_type) == (200, kind)
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
            assert "http" not in (await response.text()).replace("http://www.w3.org/2000/svg", "")
    for path in ("/page.py", "/feed.py", "/page.js/../feed.py"):
        async with page.session.get(page.url + path) as response:
            assert response.status == 404


@pytest.mark.asyncio
async def test_a_server_that_ends_does_not_wait_for_its_readers() -> None:
    app = web.Application()
    events.add_routes(app, View(), None)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession() as session, session.get(server.make_url("/events")) as response:
        await next_event(response)
        async with asyncio.timeout(DEADLINE_S):
            await server.close()
