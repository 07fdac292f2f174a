# SPDX-License-Identifier: Apache-2.0
"""`llumnix top` over a real CMS, its keys, and its forms for scripts."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.text import Text
from textual.widgets import DataTable, Static

from llumlet.process.addresses import Address
from llumsched import cli
from llumsched.cms.embedded import EmbeddedStore
from llumsched.top import rows
from llumsched.top.app import TopApp
from llumsched.top.source import Glance, Source
from llumsim.live import SimulatedCluster

DEADLINE_S = 60.0
MOVE = {
    "number": 7, "policy": "neutral_load", "source": "sim-0", "destination": "sim-1", "began_s": 0.0,
    "outcome": "stayed", "seconds": 0.25, "num_selected": 2, "num_moved": 1, "moved_tokens": 1234,
    "copied_bytes": 1 << 20, "refusals": {"destination_full": 1}, "error": "",
}  # fmt: skip


class Cluster:
    def __init__(self, cms: str, scheduler: Address, instances: SimulatedCluster, moves: list[dict[str, Any]]) -> None:
        self.cms, self.scheduler, self.instances, self.moves = cms, scheduler, instances, moves


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A CMS with two simulated instances, and a scheduler's debug endpoint with one move."""
    moves = [dict(MOVE)]

    async def rescheduling(_: web.Request) -> web.Response:
        return web.json_response({"passes": [], "moves": moves})

    app = web.Application()
    app.router.add_get("/debug/rescheduling", rescheduling)
    store = EmbeddedStore("127.0.0.1", 0)
    await store.start()
    cms = str(store.address)
    try:
        async with TestServer(app) as server, SimulatedCluster(2, cms) as instances:
            assert server.port is not None
            await until(lambda: all(one.status is not None for one in store.view.values()) and len(store.view) == 2)
            yield Cluster(cms, Address("127.0.0.1", server.port), instances, moves)
    finally:
        await store.close()


def cells(table: DataTable[Text]) -> list[list[str]]:
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_the_live_view_follows_instances_and_moves(cluster: Cluster) -> None:
    app = TopApp(Source(cluster.cms, cluster.scheduler))
    async with app.run_test(size=(140, 40)) as pilot:
        table, moves = app.query_one("#instances", DataTable), app.query_one("#moves", DataTable)
        await until(lambda: [row[0] for row in cells(table)] == ["sim-0", "sim-1"])
        await until(lambda: "2/2 instances open" in str(app.query_one("#headline", Static).content))
        await until(lambda: moves.row_count == 1)
        shown = cells(moves)[0]
        assert shown[1:6] == ["sim-0", "sim-1", "neutral_load", "stayed: destination_full 1", "1/2"]
        cluster.instances[1].submit(100, 100_000 // 50)
        await until(lambda: cells(table)[1][4] == "1")
        await pilot.press("s")
        await until(lambda: [row[0] for row in cells(table)] == ["sim-1", "sim-0"])
        cluster.moves.append(MOVE | {"number": 8, "outcome": "moved", "num_moved": 2})
        await until(lambda: moves.row_count == 2)
        assert cells(moves)[0][4:6] == ["moved", "2/2"]
        await cluster.instances[0].stop()
        await until(lambda: table.row_count == 1)
        await pilot.press("q")


@pytest.mark.asyncio
async def test_a_lost_cms_is_said_and_the_last_view_stays(cluster: Cluster) -> None:
    async with Source(cluster.cms, Address("127.0.0.1", 1)) as source:
        await source.first(DEADLINE_S)
        await until(lambda: len(source.snapshot().instances) == 2)
        before = source.snapshot()
        assert before.connected
        assert "no moves from the scheduler 127.0.0.1:1" in before.problems[0]
    after = source.snapshot()
    assert not after.connected
    assert [one["id"] for one in after.instances] == ["sim-0", "sim-1"]
    assert "old" in str(rows.headline(after))


@pytest.mark.asyncio
async def test_once_prints_tables_or_one_object(cluster: Cluster, tmp_path: Path) -> None:
    for flags in ([], ["--json"]):
        out = await printed("--cms", cluster.cms, "--scheduler", str(cluster.scheduler), "--once", *flags)
        if flags:
            document = json.loads(out)
            assert [one["id"] for one in document["instances"]] == ["sim-0", "sim-1"]
            assert document["moves"][0]["number"] == 7
            assert document["connected"]
        else:
            assert "2/2 instances open" in out
            assert "destination_full 1" in out


async def printed(*arguments: str) -> str:
    command = [sys.executable, "-m", "llumsched.cli", "top", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


def test_once_without_a_cms_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llumsched.commands.top_command.FIRST_S", 0.3)
    assert cli.main(["top", "--cms", "127.0.0.1:1", "--once"]) == 4
    assert "the CMS 127.0.0.1:1 is not reached" in capsys.readouterr().out


def test_all_faults_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--scheduler", "nowhere", "--interval", "0"]) == 2
    said = capsys.readouterr().err
    for fault in ("--scheduler", "--interval must be positive", "not a terminal"):
        assert fault in said


def test_in_a_real_terminal_it_draws_and_leaves_with_q() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "llumsched.cli", "top", "--cms", "127.0.0.1:1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        os.set_blocking(leader, False)
        seen, deadline = b"", time.monotonic() + DEADLINE_S
        while b"INSTANCE" not in seen:
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(leader, 65_536)
            except BlockingIOError:
                time.sleep(0.02)
        assert b"not reached" in seen
        os.write(leader, b"q")
        while process.poll() is None:
            assert time.monotonic() < deadline
            try:
                os.read(leader, 65_536)
            except OSError:
                time.sleep(0.02)
    os.close(leader)
    assert process.returncode == 0


def test_bars_and_lines_hold_for_every_ratio() -> None:
    for hundredth in range(-10, 130):
        text = str(rows.bar(hundredth / 100))
        assert len(text.partition(" ")[0]) == 24, text
    empty = Glance(True, 0.0, [], None)
    assert "0/0 instances open" in str(rows.headline(empty))
