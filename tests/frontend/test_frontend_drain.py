# SPDX-License-Identifier: Apache-2.0
"""What an API server that drains answers to HTTP; and when it ends its engine, and itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_llumnix.frontend import server_drain as drain


@pytest.fixture
def server() -> TestClient:
    app = FastAPI()
    for path in ("/v1/completions", "/v1/responses/7/cancel"):
        app.post(path)(lambda: "done")
    for path in ("/health", "/metrics"):
        app.get(path)(lambda: "fine")
    app.add_middleware(drain.RefuseNew)
    return TestClient(app)


def test_nothing_is_refused_before_the_drain(server: TestClient) -> None:
    assert server.post("/v1/completions").status_code == 200
    assert server.get("/health").status_code == 200


def test_new_work_is_refused_in_a_sentence(server: TestClient) -> None:
    drain.refusing.set()
    answer = server.post("/v1/completions")
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    assert server.get("/health").status_code == 503


def test_drain_lets_aborts_and_reads_pass(server: TestClient) -> None:
    drain.refusing.set()
    assert server.post("/v1/responses/7/cancel").status_code == 200
    assert server.get("/metrics").status_code == 200


class Holder:
    """Streams and an engine that are as the test says. `told`: what the engine was told of streams that were cut."""

    def __init__(self, *, num_streams: int, num_requests: int, owns_engine: bool = True) -> None:
        self.num_streams, self.num_requests, self.num_at_home = num_streams, num_requests, num_requests
        self.owns_engine = owns_engine
        self.has_engine = True
        self.num_cut = 0
        self.told: list[int | None] = []
        self.peers = SimpleNamespace(addresses=[])
        self.client: Any = SimpleNamespace(
            client_index=0,
            core_engines=[b"0"],
            resources=SimpleNamespace(engine_dead=False),
            _call_utility_async=self._call,
        )

    async def _call(self, _: str, *arguments: Any, engine: bytes) -> dict[str, Any]:
        assert self.has_engine, "nobody is there to be asked"
        self.told.append(arguments[-1])
        return {"seconds": 30.0, "num_requests": self.num_requests, "num_moving": 0, "num_moved": 0}

    async def end_engine(self) -> None:
        assert not self.num_requests
        self.has_engine = False

    def cut_streams(self) -> None:
        self.num_cut += self.num_streams


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(drain, "LINGER_SECONDS", 0.02)


async def in_time(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it is what the drain does with what it is shown
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_an_empty_engine_ends_and_its_streams_go_on(quick: None) -> None:
    holder = Holder(num_streams=2, num_requests=2)
    draining = asyncio.create_task(drain.drain(holder, 30.0))
    await asyncio.sleep(0.2)
    assert holder.has_engine, "two requests are in it"
    holder.num_requests = 0
    await asyncio.sleep(0.2)
    assert holder.has_engine, "two streams are still its own, whatever it says"
    holder.num_at_home = 0
    await in_time(lambda: not holder.has_engine)
    assert holder.told[-1] == 0, "who watches the drain was told that it is over"
    await asyncio.sleep(0.2)
    assert not draining.done()
    holder.num_streams = 0
    await asyncio.wait_for(draining, 10)
    assert holder.num_cut == 0


@pytest.mark.asyncio
async def test_an_engine_of_others_is_left_to_them(quick: None) -> None:
    holder = Holder(num_streams=1, num_requests=0, owns_engine=False)
    draining = asyncio.create_task(drain.drain(holder, 30.0))
    await asyncio.sleep(0.2)
    assert not draining.done()
    holder.num_streams = 0
    await asyncio.wait_for(draining, 10)
    assert holder.has_engine
    assert holder.told[-1] == 0


@pytest.mark.asyncio
async def test_streams_that_outlast_the_time_are_cut_with_or_without_an_engine(quick: None) -> None:
    holder = Holder(num_streams=1, num_requests=0)
    holder.client._call_utility_async = None
    holder.client.core_engines = []
    await asyncio.wait_for(drain.drain(holder, 0.5), 10)
    assert (holder.num_cut, holder.has_engine) == (1, False)
