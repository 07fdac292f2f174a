# SPDX-License-Identifier: Apache-2.0
"""A gateway before mock engines, all on one loop, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from llumlet.process.addresses import Address
from llumsched.gateway.config import AccessLog, Config
from llumsched.gateway.paths import PATHS, Kind
from llumsched.gateway.server import Gateway
from tests.support.mock_api import Mock

DEADLINE_S = 60


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The JSON of all events; the last must be the end mark."""
        *events, done, rest = self.content.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices
        )


@dataclass
class Cluster:
    """`engines` is what all mock engines do; `ports` are theirs."""

    gateway: Gateway
    engines: Mock
    ports: list[int]
    client: aiohttp.ClientSession
    servers: list[tuple[web.Server[web.BaseRequest], asyncio.Server]]

    async def lose(self, number: int) -> None:
        """One engine's API server dies."""
        server, listener = self.servers[number]
        listener.close()
        for connection in list(server.connections):
            connection.force_close()
        await server.shutdown(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with asyncio.timeout(DEADLINE_S), self.client.post(self.url + path, data=data, headers=headers) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def get(self, path: str) -> Reply:
        """`/metrics` is at the port for operators."""
        return await self.ask(path, self.gateway.metrics_port if path == "/metrics" else self.gateway.port)

    async def ask(self, path: str, port: int) -> Reply:
        url = f"http://127.0.0.1:{port}{path}"
        async with asyncio.timeout(DEADLINE_S), self.client.get(url) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def until_idle(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.gateway.exchanges.idle.wait()
        await until(lambda: not self.engines.answering)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(DEADLINE_S * 100):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def turns() -> None:
    """Enough of the loop's for what is ready by now, and for what follows from it."""
    for _ in range(50):
        await asyncio.sleep(0)


@dataclass
class Scripted(Mock):
    """Answers with these events, and its connection breaks."""

    script: list[bytes] = field(default_factory=list)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = PATHS.get(request.path)
        if path is None or path.kind is not Kind.CONTINUED:
            return await super().answer(request)
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(self.script))
        assert request.transport is not None
        request.transport.close()
        return response


@asynccontextmanager
async def engine(mock: Mock, port: int = 0) -> AsyncIterator[tuple[int, web.Server[web.BaseRequest], asyncio.Server]]:
    server: web.Server[web.BaseRequest] = web.Server(mock.answer, handler_cancellation=True)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    try:
        yield listener.sockets[0].getsockname()[1], server, listener
    finally:
        listener.close()
        await turns()  # what was accepted just now becomes a connection
        await server.shutdown(0)
        await turns()  # transports close their sockets


@asynccontextmanager
async def cluster(*, num_engines: int = 2, mock: Mock | None = None, **settings: Any) -> AsyncIterator[Cluster]:
    """Leaves no task behind, or fails."""
    before = asyncio.all_tasks()
    mock = mock or Mock(seen=[])
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(mock)) for _ in range(num_engines)]
        ports = [port for port, _, _ in engines]
        defaults: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "metrics_port": 0,
            "scheduling_policy": "round-robin",
            "backend_endpoints": tuple(Address("127.0.0.1", port) for port in ports),
            "access_log": AccessLog.OFF,
            "connect_timeout_s": DEADLINE_S,
            "shutdown_timeout_s": 5.0,
        }
        gateway = await stack.enter_async_context(Gateway(Config(**defaults | settings)))
        gateway.metrics.least_render_s = 0.0
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Cluster(gateway, mock, ports, client, [(server, listener) for _, server, listener in engines])
        assert not gateway.upstream.calls
    await asyncio.sleep(0)
    await until(lambda: not {task for task in asyncio.all_tasks() - before if not task.done()})
    gc.collect()
