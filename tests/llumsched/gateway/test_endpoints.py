# SPDX-License-Identifier: Apache-2.0
"""Engines behind https, and behind a path."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llumlet.process import tls
from llumlet.process.addresses import Address
from llumsched.cli import prepare
from llumsched.endpoints import Endpoint
from tests.llumsched.gateway.support import cluster
from tests.support.authority import Authority
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 5}


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("a:1", Endpoint(Address("a", 1))),
        ("http://a:1/", Endpoint(Address("a", 1))),
        ("http://a", Endpoint(Address("a", 80))),
        ("https://a", Endpoint(Address("a", 443), True)),
        ("https://[::1]:7/x/y-1/", Endpoint(Address("::1", 7), True, "/x/y-1")),
        ("a:1/x", Endpoint(Address("a", 1), False, "/x")),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "a", "ftp://a:1", "https://", "http://a:1/x?y", "http://a:1/x#y", "a:1/x y", "a:1/x\r\nEvil: 1", "a:1//x"],
)
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Endpoint.parse(text)


class _Behind(Mock):
    """Serves under a path only."""

    base = "/team/llm"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith(f"{self.base}/"):
            return web.Response(status=404)
        return await super().answer(request.clone(rel_url=request.path.removeprefix(self.base)))


@asynccontextmanager
async def _engine(mock: Mock, context: ssl.SSLContext) -> AsyncIterator[Address]:
    server: web.Server[web.BaseRequest] = web.Server(mock.answer)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield Address("127.0.0.1", listener.sockets[0].getsockname()[1])
        listener.close()
        await server.shutdown(0)


@pytest.mark.asyncio
async def test_an_engine_behind_https_and_a_path(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other authority")
    mock = _Behind(seen=[])
    async with _engine(mock, tls.server_context(*map(str, authority.issue("engine")))) as address:
        known: dict[str, Any] = {"num_engines": 0, "backend_endpoints": (Endpoint(address, True, mock.base),)}
        async with cluster(**known, backend_ca_file=str(authority.path)) as it:
            for _ in range(2):
                reply = await it.post(COMPLETIONS, BODY | {"stream": True})
                assert len(reply.text) > 5
            assert [card["id"] for card in (await it.get("/v1/models")).json["data"]] == ["mock"]
            (backend,) = it.gateway.backends
            assert await it.gateway.backends.is_healthy(backend, 10.0)
            assert it.gateway.backends.at(address) is backend, "whom the scheduler names by address"
        assert mock.seen
        async with cluster(**known, backend_ca_file=str(other.path), retry_max_count=0) as it:
            num_seen = len(mock.seen)
            reply = await it.post(COMPLETIONS, BODY)
            assert reply.status in (502, 503)
            assert len(mock.seen) == num_seen, "a stranger is told nothing"


@pytest.mark.asyncio
async def test_instances_that_the_scheduler_names_may_be_asked_over_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with _engine(Mock(), tls.server_context(*map(str, authority.issue("engine")))) as address:
        settings = {"backend_https": True, "backend_ca_file": str(authority.path)}
        async with cluster(num_engines=0, backend_endpoints=(), **settings) as it:
            it.gateway.backends.at(address)
            assert (await it.post(COMPLETIONS, BODY)).status == 200


@pytest.mark.asyncio
async def test_two_engines_may_be_at_one_address() -> None:
    address = Address("127.0.0.1", 1)
    settings = {"backend_endpoints": tuple(Endpoint(address, base=path) for path in ("/a", "/b"))}
    async with cluster(num_engines=0, **settings) as it:
        backends = it.gateway.backends
        assert [str(backend) for backend in backends] == [f"{address}/a", f"{address}/b"]
        assert str(backends.at(address)) == f"{address}/a"
        assert len(backends) == 2


def _faults(*flags: str) -> str:
    return "\n".join(prepare("gateway", ["gateway", "--scheduling-policy", "round-robin", *flags], {}).faults)


def test_flags(tmp_path: Path) -> None:
    authority = str(Authority(tmp_path).path)
    endpoints = ("--llm-backend-endpoints", "https://a/x,b:1")
    assert not _faults(*endpoints, "--backend-ca-file", authority)
    assert "has no effect" in _faults("--llm-backend-endpoints", "b:1", "--backend-ca-file", authority)
    assert not _faults("--llm-backend-endpoints", "b:1", "--backend-ca-file", authority, "--backend-https")
    assert "holds no certificates" in _faults(*endpoints, "--backend-ca-file", __file__)
