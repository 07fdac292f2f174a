# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq.asyncio
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient

from tests.frontend.fakes import FakeEngine, FakePeer, close_client, new_client
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.frontend import server_drain as drain
from vllm_llumnix.steps import step_record
from vllm_llumnix.steps.step_record import StepRecord
from vllm_llumnix.switch import CONFIG_VARIABLE

NewPeer = Callable[..., FakePeer]
HOME = "a" * 32


@pytest.fixture(autouse=True)
def llumlet_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, LlumletConfig(instance_id="home").to_json())


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    """An API server that ends refuses what comes, for the rest of its process."""
    yield
    drain.refusing.clear()


@pytest.fixture
def directory() -> Iterator[Path]:
    """For sockets: their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="llx-") as path:
        yield Path(path)


@pytest_asyncio.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest_asyncio.fixture
async def engine(context: zmq.asyncio.Context, directory: Path) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(context, directory)
    yield engine
    engine.close()


@pytest_asyncio.fixture
async def client(engine: FakeEngine, directory: Path) -> AsyncIterator[Any]:
    """vLLM's plain client, on one engine."""
    client = new_client(AsyncMPClient, directory)
    yield client
    close_client(client)


@pytest_asyncio.fixture
async def new_peer(context: zmq.asyncio.Context, client: Any) -> AsyncIterator[NewPeer]:
    """Makes other engines, connected to the client's relay."""
    peers = []

    def connect(name: str = "peer", **more: Any) -> FakePeer:
        peers.append(FakePeer(context, client.relay_address, name, **more))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest_asyncio.fixture
async def peer(new_peer: NewPeer) -> FakePeer:
    peer = new_peer()
    await peer.hello()
    return peer


@pytest_asyncio.fixture
async def rank_engines(context: zmq.asyncio.Context, directory: Path) -> AsyncIterator[list[FakeEngine]]:
    engines = [FakeEngine(context, directory, rank) for rank in range(2)]
    yield engines
    for engine in engines:
        engine.close()


@pytest_asyncio.fixture
async def dp_client(
    rank_engines: list[FakeEngine], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """vLLM's client that balances over data-parallel engines, on two of them."""
    monkeypatch.setenv(CONFIG_VARIABLE, LlumletConfig(instance_id="home", num_ranks=len(rank_engines)).to_json())
    client = new_client(DPLBAsyncMPClient, directory, ranks=len(rank_engines))
    yield client
    close_client(client)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    """Of the home engine's steps: none is under way."""
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    record = StepRecord(HOME, 8, 2)
    yield record
    record.close()


@pytest_asyncio.fixture
async def home(new_peer: NewPeer, record: StepRecord) -> FakePeer:
    """The relay's end of the client's own engine, which has been heard of."""
    peer = new_peer("home", llumlet="127.0.0.1:2", incarnation=HOME)
    await peer.hello()
    await peer.heartbeat()
    return peer
