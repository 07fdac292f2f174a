# SPDX-License-Identifier: Apache-2.0
"""Liveness says that the process serves, readiness that an instance takes requests."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from llumlet.process import tasks
from llumlet.process.addresses import Address
from llumsched.gateway import scheduler_client
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, engine, until
from tests.support.mock_api import Mock


async def _until_ready(it: Cluster, expected: str) -> None:
    """`expected` is in the answer; empty for a gateway that is ready."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            reply = await it.ask("/ready", it.gateway.metrics_port)
            told = await it.get("/ready")
            if told.status == reply.status == 503:
                assert told.content == b"not ready\n", "strangers are told no reason"
            assert (await it.get("/health")).status == (await it.get("/healthz")).status == 200, "it lives"
            if expected and reply.status == 503 and expected in reply.content.decode():
                assert reply.headers["Retry-After"] == "1"
                return
            if not expected and reply.status == 200:
                return
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_it_is_ready_while_one_instance_is_well() -> None:
    async with cluster(models_refresh_s=0.05) as it:
        await _until_ready(it, "")
        first, _ = it.gateway.backends
        await it.lose(0)
        await until(lambda: first.is_down)
        await _until_ready(it, "")
        await it.lose(1)
        await _until_ready(it, "no instance of 2 is well")


@pytest.mark.asyncio
async def test_new_listener_is_used_before_the_next_round() -> None:
    """An engine is known to the scheduler before its API server listens. What one gateway cannot reach, all avoid."""
    async with cluster(models_refresh_s=3600) as it:
        await until(lambda: all(backend.models for backend in it.gateway.backends))
        late, _ = it.gateway.backends
        port = late.address.port
        await it.lose(0)
        await it.gateway.backends.refresh()
        assert late in it.gateway.backends.avoided()
        async with engine(it.engines, port):
            await until(lambda: not it.gateway.backends.avoided())


@pytest.mark.asyncio
async def test_instance_survives_one_missed_look() -> None:
    """It is asked again soon. One that refuses connections is down at once."""

    class Busy(Mock):
        is_busy = False

        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/v1/models" and self.is_busy:
                return web.Response(status=503)
            return await super().answer(request)

    async with cluster(num_engines=1, mock=(engines := Busy()), models_refresh_s=3600) as it:
        (backend,) = it.gateway.backends
        await until(lambda: backend.models)
        engines.is_busy = True
        await it.gateway.backends.refresh()
        assert not it.gateway.backends.avoided()
        await it.gateway.backends.ask_again()
        assert backend in it.gateway.backends.avoided()
        engines.is_busy = False
        await until(lambda: not it.gateway.backends.avoided())


class _Saying:
    """A scheduler that says whether it is ready, and nothing else."""

    status, text = 503, "no available endpoint"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/ready":
            return web.Response(status=404)
        return web.Response(status=self.status, text=self.text)


@pytest.mark.asyncio
async def test_the_scheduler_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "_READY_S", 0.0)
    scheduler = _Saying()
    async with engine(scheduler) as (port, server, listener):  # type: ignore[arg-type]
        settings = {"scheduling_policy": "load-balance", "scheduler_endpoints": (Address("127.0.0.1", port),)}
        async with cluster(**settings) as it:
            await _until_ready(it, "the scheduler says: no available endpoint")
            scheduler.status = 200
            await _until_ready(it, "")
            scheduler.status = 503
            await _until_ready(it, "the scheduler says")
            scheduler.text = "warming: 3 instances are known so far"
            await _until_ready(it, "")  # requests go round the instances known
            scheduler.text = _Saying.text
            await _until_ready(it, "the scheduler says")
            listener.close()
            for connection in list(server.connections):
                connection.force_close()
            await _until_ready(it, "")  # requests go round the instances known


@pytest.mark.asyncio
async def test_it_is_not_ready_while_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "_READY_S", 0.0)
    settings = {"scheduling_policy": "load-balance", "scheduler_endpoints": (Address("127.0.0.1", 1),)}
    async with cluster(num_engines=0, **settings) as it:
        await _until_ready(it, "no instance is known")


@pytest.mark.asyncio
async def test_background_checks_survive_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_RESTART_S", 0.01)
    async with cluster(models_refresh_s=0.02) as it:
        refresh, asked = it.gateway.backends.refresh, 0

        async def fail() -> None:
            nonlocal asked
            asked += 1
            raise RuntimeError("of the test")

        monkeypatch.setattr(it.gateway.backends, "refresh", fail)
        await until(lambda: asked > 2)
        monkeypatch.setattr(it.gateway.backends, "refresh", refresh)
        await it.lose(0)
        await until(lambda: any(backend.is_down for backend in it.gateway.backends))
