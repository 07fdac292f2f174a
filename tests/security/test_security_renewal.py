# SPDX-License-Identifier: Apache-2.0
"""Certificates, authorities and tokens that are replaced while processes run."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from llumlet.contract.client import LlumletClient
from llumlet.contract.cms.links import LinkLost
from llumlet.contract.cms.stores import CmsDirectory
from llumlet.contract.errors import LlumletUnreachable
from llumlet.contract.server import serve
from llumlet.process import tls
from llumlet.process.addresses import Address
from llumlet.process.credentials import CredentialFiles, Credentials
from llumlet.process.secret_files import Bearer, num_refused
from llumsched.cms.embedded import EmbeddedStore
from llumsched.cms.watch_store import WatchStore
from llumsched.endpoints import Endpoint
from llumsched.gateway.config import Config
from llumsched.gateway.scheduler_client import SchedulerClient
from llumsched.scheduler import process
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent, request_info
from tests.llumsched.gateway.support import cluster
from tests.llumsched.scheduler.test_access import CONFIG
from tests.support.authority import Authority, credential_files
from tests.support.mock_api import Mock

pytestmark = pytest.mark.asyncio
WAIT_S: Final = 60.0
Put = Callable[[Path, bytes], None]


def in_place(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def by_link(path: Path, content: bytes) -> None:
    """As Kubernetes and certbot do it: the name is a link, and another link takes its place."""
    version = path.with_name(f"{path.name}.{time.monotonic_ns()}")
    version.touch(mode=0o600)
    version.write_bytes(content)
    link = path.with_name(f"{path.name}.link")
    link.symlink_to(version)
    link.replace(path)


WAYS = pytest.mark.parametrize("put", [in_place, by_link])


async def eventually(check: Callable[[], Awaitable[object]]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not await check():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


def renew(put: Put, authority: Authority, cert: Path, key: Path) -> bytes:
    """Puts another certificate in the place of one; returns the new one (DER)."""
    new_cert, new_key = authority.issue("next")
    put(key, new_key.read_bytes())
    put(cert, new_cert.read_bytes())
    return ssl.PEM_cert_to_DER_cert(new_cert.read_text())


@asynccontextmanager
async def gateway(cert: Path, key: Path) -> AsyncIterator[int]:
    async with cluster(num_engines=1, ssl_certfile=str(cert), ssl_keyfile=str(key)) as it:
        yield it.gateway.port


@asynccontextmanager
async def scheduler(cert: Path, key: Path) -> AsyncIterator[int]:
    running = await process.serve(dataclasses.replace(CONFIG, ssl_certfile=str(cert), ssl_keyfile=str(key)))
    try:
        yield running.port
    finally:
        await running.close()


async def shown(port: int, trust: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


@WAYS
@pytest.mark.parametrize("server", [gateway, scheduler])
async def test_https_servers_show_the_new_certificate_and_cut_nothing(
    server: Callable[[Path, Path], AbstractAsyncContextManager[int]], put: Put, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    trust = ssl.create_default_context(cafile=str(authority.path))
    async with server(cert, key) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        first = await shown(port, trust)
        renewed = renew(put, authority, cert, key)
        assert renewed != first

        async def is_new() -> bool:
            return await shown(port, trust) == renewed

        await eventually(is_new)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200"), "the connection from before goes on"
        writer.close()


async def test_a_broken_certificate_leaves_the_old_one_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    good = cert.read_bytes()
    trust = ssl.create_default_context(cafile=str(authority.path))
    async with cluster(num_engines=1, ssl_certfile=str(cert), ssl_keyfile=str(key)) as it:
        port = it.gateway.port

        async def refused_files() -> str:
            lines = (await it.get("/metrics")).content.decode().splitlines()
            return next(line.partition(" ")[2] for line in lines if line.startswith("gateway_refused_files"))

        first, none = await shown(port, trust), float(await refused_files())
        cert.write_bytes(Authority(tmp_path, "others").issue("other")[0].read_bytes())  # the key does not fit

        async def is_counted() -> bool:
            return float(await refused_files()) == none + 1

        await eventually(is_counted)
        for _ in range(3):
            assert await shown(port, trust) == first
        assert sum("HTTPS server stay as they were" in message for message in caplog.messages) == 1
        cert.write_bytes(good)

        async def is_well() -> bool:
            return float(await refused_files()) == none

        await eventually(is_well)
    assert num_refused() == none


@asynccontextmanager
async def engine(context: ssl.SSLContext) -> AsyncIterator[Address]:
    web_server: web.Server[web.BaseRequest] = web.Server(Mock().answer)
    listener = await asyncio.get_running_loop().create_server(web_server, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield Address("127.0.0.1", listener.sockets[0].getsockname()[1])
        listener.close()
        await web_server.shutdown(0)


@WAYS
async def test_gateway_trusts_the_new_authority_of_engines(put: Put, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    put(trusted, old.path.read_bytes())
    settings: dict[str, Any] = {"num_engines": 0, "backend_ca_file": str(trusted), "retry_max_count": 0}
    async with (
        engine(tls.server_context(*map(str, new.issue("engine")))) as address,
        cluster(**settings, backend_endpoints=(Endpoint(address, True),), max_ejected=0.0) as it,
    ):

        async def answers() -> bool:
            reply = await it.post("/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 1})
            return reply.status == 200

        assert not await answers()
        put(trusted, new.path.read_bytes())
        await eventually(answers)


@WAYS
async def test_gateway_trusts_the_new_authority_of_schedulers(put: Put, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    put(trusted, old.path.read_bytes())
    async with scheduler(*new.issue("scheduler")) as port, aiohttp.ClientSession() as session:
        config = Config(scheduler_endpoints=(Address("127.0.0.1", port),), scheduler_ca_file=str(trusted))
        client = SchedulerClient(config, session)
        assert await client.refusal() is None
        put(trusted, new.path.read_bytes())

        async def answers() -> bool:
            return await client.refusal() is not None

        await eventually(answers)
        await client.close()


@WAYS
async def test_tokens_that_are_shown_follow_their_file(put: Put, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    put(path, b"first\n")
    seen: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        return web.Response(text="warming")

    listener = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    address = Address("127.0.0.1", listener.sockets[0].getsockname()[1])
    async with listener, aiohttp.ClientSession() as session:
        config = Config(scheduler_endpoints=(address,), service_token_file=str(path))
        client = SchedulerClient(config, session)
        await client.instances()
        put(path, b"second\n")

        async def is_shown() -> bool:
            await client.instances()
            return seen[-1] == "Bearer second"

        await eventually(is_shown)
        assert seen[0] == "Bearer first"
        assert "second" not in repr(Bearer(str(path), "token"))
        await client.close()
        listener.close()


async def test_engines_key_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("first\n")
    mock = Mock(seen=[])
    assert mock.seen is not None
    async with cluster(num_engines=1, backend_api_key_file=str(path), mock=mock) as it:

        async def asked_with(key: str) -> bool:
            await it.post("/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 1})
            assert mock.seen is not None
            return mock.seen[-1]["headers"]["Authorization"] == f"Bearer {key}"

        assert await asked_with("first")
        path.write_text("second\n")
        await eventually(lambda: asked_with("second"))


def exchange(put: Put, new: Authority, *members: CredentialFiles) -> None:
    """Puts certificates of another authority, and that authority, in the place of what members have."""
    for files in members:
        cert, key = new.issue(f"new {Path(files.tls_cert).stem}")
        put(Path(files.tls_key), key.read_bytes())
        put(Path(files.tls_cert), cert.read_bytes())
        put(Path(files.tls_ca), new.path.read_bytes())


@WAYS
async def test_llumlet_and_its_clients_use_new_certificates_and_cut_no_call(
    put: Put, tmp_path: Path, token: Path
) -> None:
    """The authority is exchanged in between: who kept the old certificates on either side is refused."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    server_files, client_files = (credential_files(old, name, token) for name in ("server", "client"))
    agent = FakeAgent(requests=[request_info()])
    agent.go.clear()
    running = await serve(agent, credentials=Credentials.load(server_files))
    async with LlumletClient(running.address, credentials=Credentials.load(client_files)) as client:
        events = client.migrate(messages.migrate())
        assert await anext(events)
        exchange(put, new, server_files, client_files)
        stranger = Credentials.load(credential_files(Authority(tmp_path, "third"), "stranger", token))

        async def is_renewed() -> bool:
            """A client with files of the new authority alone is answered."""
            fresh = Credentials.load(credential_files(new, "fresh", token))
            try:
                async with LlumletClient(running.address, credentials=fresh) as other:
                    await other.get_instance_status(deadline_s=5)
            except LlumletUnreachable:
                return False
            return True

        await eventually(is_renewed)
        with pytest.raises(LlumletUnreachable):
            async with LlumletClient(running.address, credentials=stranger) as other:
                await other.get_instance_status(deadline_s=5)
        await asyncio.sleep(1.1)
        assert (await client.get_instance_status()).instance_id == "fake-a", "the client's next call has a new channel"
        agent.go.set()
        rest = [event async for event in events]
        assert rest[-1].summary.selected == 1, "the call that ran goes on"
    await running.stop(grace_s=0.2)


async def test_cms_and_its_clients_use_new_certificates(tmp_path: Path, token: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    of_store, of_watcher = (credential_files(old, name, token) for name in ("store", "watcher"))
    store = EmbeddedStore(credentials=Credentials.load(of_store))
    await store.start()
    directory = CmsDirectory(store.address, Credentials.load(of_watcher))
    await directory.peers([], "")
    exchange(in_place, new, of_store, of_watcher)

    async def is_answered() -> bool:
        fresh = CmsDirectory(store.address, Credentials.load(credential_files(new, "fresh", token)))
        try:
            await fresh.peers([], "")
        except LinkLost:
            return False
        finally:
            await fresh.close()
        return True

    await eventually(is_answered)
    await asyncio.sleep(1.1)
    await directory.peers([], "")
    watcher = WatchStore(store.address, Credentials.load(of_watcher))
    await watcher.start()
    async with asyncio.timeout(WAIT_S):
        await watcher.complete.wait()
    await watcher.close()
    await directory.close()
    await store.close()
