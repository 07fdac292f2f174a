# SPDX-License-Identifier: Apache-2.0
"""One component as a process: what it is given, what is heard of it, when it counts as ready."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from llumsched.up.component import Component, ComponentDied, ComponentSpec

SHOW = "import json, os; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))"


class Service:
    """Answers as a component that has started; keeps what it is asked to warm up with."""

    def __init__(self) -> None:
        self.url = ""
        self.warmed: list[Any] = []
        self.healthy = True

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def complete(self, request: web.Request) -> web.Response:
        self.warmed.append(await request.json())
        return web.Response(status=400)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    service, app = Service(), web.Application()
    app.router.add_get("/health", service.health)
    app.router.add_post("/v1/completions", service.complete)
    async with TestServer(app) as server:
        service.url = str(server.make_url("")).rstrip("/")
        yield service


@pytest.mark.asyncio
async def test_it_has_its_own_environment_and_cores_and_nothing_of_another_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLUMNIX_CMS", "10.0.0.1:8003")
    monkeypatch.setenv("KEPT", "yes")
    core = min(os.sched_getaffinity(0))
    lines: list[str] = []
    command = (sys.executable, "-c", SHOW)
    component = Component(ComponentSpec("one", command, "", 5.0, {"OWN": "1"}, cores=(core,)), lines.append)
    await component.start()
    assert await component.wait_ended() == 0
    environment, cores = json.loads("".join(lines))
    assert "LLUMNIX_CMS" not in environment
    assert (environment["KEPT"], environment["OWN"]) == ("yes", "1")
    assert cores == [core]
    assert os.path.basename(environment["TMPDIR"]) not in os.listdir("/tmp")


@pytest.mark.asyncio
async def test_lines_of_any_length_and_bytes_come_through() -> None:
    lines: list[str] = []
    text = "import sys; sys.stdout.buffer.write(b'x' * 100_000 + b'\\n\\xff last')"
    component = Component(ComponentSpec("one", (sys.executable, "-c", text), "", 5.0), lines.append)
    await component.start()
    await component.wait_ended()
    assert "".join(lines) == "x" * 100_000 + "\ufffd last"


@pytest.mark.asyncio
async def test_ready_is_after_the_warm_up_even_if_that_was_refused(service: Service) -> None:
    warm_up = (f"{service.url}/v1/completions", {"prompt": [1, 2]})
    spec = ComponentSpec("one", ("sleep", "60"), f"{service.url}/health", 10.0, warm_up=warm_up)
    component = Component(spec, lambda _: None)
    async with aiohttp.ClientSession() as session:
        await component.wait_ready(session)
    assert service.warmed == [{"prompt": [1, 2]}]


@pytest.mark.asyncio
async def test_not_ready_in_time_and_not_there_are_errors(service: Service) -> None:
    service.healthy = False
    component = Component(ComponentSpec("one", ("sleep", "60"), f"{service.url}/health", 0.3), lambda _: None)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ComponentDied, match=r"one was not ready after 0 s"):
            await component.wait_ready(session)
    with pytest.raises(ComponentDied, match="/no/such could not be started"):
        await Component(ComponentSpec("one", ("/no/such",), "", 1.0), lambda _: None).start()


@pytest.mark.asyncio
async def test_asked_to_stop_while_it_starts_it_stops() -> None:
    component = Component(ComponentSpec("one", ("sleep", "60"), "", 5.0), lambda _: None)
    start = asyncio.create_task(component.start())
    await asyncio.sleep(0)
    component.ask_to_stop(5.0)
    await start
    async with asyncio.timeout(60):
        assert await component.wait_ended() < 0
    assert not component.running
