# SPDX-License-Identifier: Apache-2.0
"""Lite mode over real sockets: engines of stock vLLM, of which only `/v1/models` is asked, and a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from llumlet.process.addresses import Address
from llumlet.process.tls import server_context
from llumlet.protocol.infer_type import InferType
from llumsched.endpoints import Endpoint
from llumsched.policy.document import Mode, load_policy
from llumsched.scheduler.process import RunningScheduler, SchedulerConfig, serve
from llumsched.scheduler.static_engines import StaticEngines
from tests.support.authority import Authority

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


class Engine:
    """Its `/v1/models`."""

    def __init__(self, *models: str) -> None:
        self.body: Any = {"object": "list", "data": [{"id": model, "max_model_len": 4096} for model in models]}
        self.status = 200
        self.api_key = ""
        self.chunk_bytes = 0
        """Of an answer that comes in pieces; 0: at once."""
        self.address = Address("127.0.0.1", 0)
        self.base = ""
        self.tls: ssl.SSLContext | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get(self.base + "/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self.tls).start()
        self.address = Address("127.0.0.1", self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if not self.chunk_bytes:
            return web.json_response(self.body, status=self.status)
        text = json.dumps(self.body).encode()
        answer = web.StreamResponse()
        await answer.prepare(request)
        for begin in range(0, len(text), self.chunk_bytes):
            await answer.write(text[begin : begin + self.chunk_bytes])
            await asyncio.sleep(0)
        return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    started = [Engine("m", "adapter"), Engine("m"), Engine("other")]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.stop()


@pytest_asyncio.fixture
async def scheduler(engines: list[Engine]) -> AsyncIterator[RunningScheduler]:
    policy = load_policy("load-balance", Mode.LITE)
    endpoints = {engine.address: InferType.NEUTRAL for engine in engines}
    running = await serve(SchedulerConfig(policy, host="127.0.0.1", port=0, backend_endpoints=endpoints))
    yield running
    await running.close()


async def post(scheduler: RunningScheduler, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.post(f"http://127.0.0.1:{scheduler.port}{path}", json=body) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def test_from_schedule_to_release(scheduler: RunningScheduler, engines: list[Engine]) -> None:
    results = []
    for number in range(2):
        asked = {"id": f"r{number}", "model": "m", "gateway_id": "g", "prompt_num_tokens": 100}
        status, answer = await post(scheduler, "/schedule", asked)
        assert status == 200
        results.append(answer)
    first, second = (result["scheduling_result"][0] for result in results)
    assert {first["endpoint"]["port"], second["endpoint"]["port"]} == {engine.address.port for engine in engines[:2]}
    counters = scheduler.dispatcher.ledger.in_flight
    report = {"id": "r0", "instance_id": first["id"], "infer_type": "neutral", "gateway_id": "g", "num_tokens": 130}
    assert await post(scheduler, "/report", [report, report | {"id": "r1"}, report | {"kind": "prefill_done"}]) == (
        200,
        "",
    )
    assert counters.of(first["id"]).num_tokens == 130
    assert counters.of(first["id"]).num_prefill_requests == 0
    assert counters.of(second["id"]).num_tokens == 100
    for result in results * 2:
        assert (await post(scheduler, "/release", result))[0] == 200
    assert not counters.counters


async def test_models(scheduler: RunningScheduler, engines: list[Engine]) -> None:
    for model, engine in (("adapter", engines[0]), ("other", engines[2])):
        _, answer = await post(scheduler, "/schedule", {"id": model, "model": model})
        assert answer["scheduling_result"][0]["endpoint"]["port"] == engine.address.port
    assert (await post(scheduler, "/schedule", {"id": "x", "model": "unheard"}))[0] == 404


async def test_lite_engine_has_its_infer_type(engines: list[Engine]) -> None:
    types = dict(zip((engine.address for engine in engines[:2]), (InferType.PREFILL, InferType.DECODE), strict=True))
    policy = load_policy("load-balance", Mode.LITE)
    running = await serve(SchedulerConfig(policy, host="127.0.0.1", port=0, backend_endpoints=types))
    try:
        _, answer = await post(running, "/schedule", {"id": "r", "model": "m", "scheduling_mode": "pd_batch"})
        placed = {part["infer_type"]: part["endpoint"]["port"] for part in answer["scheduling_result"]}
        assert placed == {infer_type: address.port for address, infer_type in types.items()}
        status, answer = await post(running, "/schedule", {"id": "s", "model": "m"})
        assert (status, "neutral" in answer) == (429, True)
    finally:
        await running.close()


async def test_keepalive_and_gauges(scheduler: RunningScheduler) -> None:
    base = f"http://127.0.0.1:{scheduler.port}"
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{base}/keepalive") as socket:
            await socket.send_json({"host": "10.0.0.9", "port": 4711})
            assert await socket.receive_str() == "ok"
            state = scheduler.dispatcher.ledger
            assert state._gateways["10.0.0.9:4711"].num_connections == 1  # type: ignore[attr-defined]
        await until(lambda: not state._gateways["10.0.0.9:4711"].num_connections)  # type: ignore[attr-defined]
        async with session.ws_connect(f"{base}/keepalive") as socket:
            await socket.send_str("{")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await post(scheduler, "/schedule", {"id": "r", "model": "other", "prompt_num_tokens": 7})
        async with session.get(f"{base}/metrics") as answer:
            text = await answer.text()
    shown = dict(re.findall(r'^instance_lrs_(\w+)\{.*model="other".*\} (\S+)$', text, re.M))
    assert shown == {
        "total_tokens": "7.0",
        "waiting_tokens": "7.0",
        "running_tokens": "0.0",
        "total_requests": "1.0",
        "waiting_requests": "1.0",
        "running_requests": "0.0",
    }


async def test_engines_come_and_go() -> None:
    engine = Engine("m")
    await engine.start()
    backends = StaticEngines({engine.address: InferType.NEUTRAL}, interval_s=0.01, timeout_s=60.0)
    await backends.start()
    try:
        (instance,) = backends.view.values()
        assert instance.metadata.served_models == ["m"]
        engine.status = 503
        await until(lambda: not backends.view)
        engine.status, engine.body = 200, ["nonsense"]
        await asyncio.sleep(0.05)
        assert not backends.view
        engine.body = {"data": [{"id": "n"}]}
        await until(lambda: bool(backends.view))
        (again,) = backends.view.values()
        assert again.metadata.served_models == ["n"]
        assert again.metadata.incarnation != instance.metadata.incarnation
        await engine.stop()
        await until(lambda: not backends.view)
    finally:
        await backends.close()


async def test_engine_survives_one_missed_look() -> None:
    engine = Engine("m")
    await engine.start()
    backends = StaticEngines({engine.address: InferType.NEUTRAL}, timeout_s=60.0)
    await backends.start()
    try:
        (known,) = backends._backends
        (instance,) = backends.view.values()
        assert backends._session is not None
        seen = []
        for status in (503, 200, 503, 503, 200):
            engine.status = status
            await backends._ask(backends._session, known)
            (instance,) = backends.view.values()
            assert instance.status is not None
            seen.append(instance.status.schedulable)
        assert seen == [True, True, True, False, True]
    finally:
        await backends.close()
        await engine.stop()


async def asked(engine: Engine, **settings: Any) -> list[str]:
    """The models that one round of questions finds."""
    await engine.start()
    backends = StaticEngines({engine.address: InferType.NEUTRAL}, timeout_s=60.0, **settings)
    try:
        await backends.start()
        return [model for instance in backends.view.values() for model in instance.metadata.served_models]
    finally:
        await backends.close()
        await engine.stop()


async def test_an_answer_in_pieces() -> None:
    engine = Engine(*(f"adapter-{number}" for number in range(3000)))
    engine.chunk_bytes = 20_000
    assert len(await asked(engine)) == 3000


async def test_an_engine_with_a_key(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("m")
    engine.api_key = "secret"
    assert await asked(engine) == []
    assert "wants its --api-key for /v1/models: set VLLM_API_KEY for the scheduler too" in caplog.text
    assert await asked(engine, api_key="secret") == ["m"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, {}, "answers /v1/models with status 503"),
        (200, ["nonsense"], "answers /v1/models with what is no list of models"),
        (200, {"data": []}, "serves no model"),
        (200, {"data": [{"id": "x" * (9 << 20)}]}, "answers /v1/models with more than 8 MiB"),
    ],
)
async def test_why_an_engine_is_not_used_is_said_once(
    status: int, body: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.status, engine.body = status, body
    await engine.start()
    backends = StaticEngines({engine.address: InferType.NEUTRAL}, interval_s=0.001, timeout_s=60.0)
    await backends.start()
    try:
        await until(lambda: backends._backends[0].num_failures > 8)
        assert not backends.view
        assert caplog.text.count(said) == 1
    finally:
        await backends.close()
        await engine.stop()


@pytest.mark.parametrize("base", ["", "/behind/a/proxy"])
async def test_engines_are_asked_over_https_and_below_a_path(tmp_path: Path, base: str) -> None:
    authority, engine = Authority(tmp_path), Engine("m")
    engine.base, engine.tls = base, server_context(*map(str, authority.issue("engine")))
    await engine.start()
    endpoints = {Endpoint(engine.address, True, base): InferType.NEUTRAL}
    for ca_file, is_known in ((str(authority.path), True), (str(Authority(tmp_path, "strangers").path), False)):
        engines = StaticEngines(endpoints, ca_file=ca_file)
        await engines.start()
        assert list(engines.view) == ([f"{engine.address}{base}"] if is_known else [])
        if is_known:
            assert engines.view[f"{engine.address}{base}"].api_server == engine.address
        await engines.close()
    await engine.stop()
