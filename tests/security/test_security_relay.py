# SPDX-License-Identifier: Apache-2.0
"""The relay with a token: vLLM's real client on a fake engine, and other engines with and without the keys."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from vllm.v1.engine.core_client import AsyncMPClient

from tests.frontend.conftest import context, directory, engine
from tests.frontend.fakes import FakeEngine, FakePeer, close_client, new_client, relayed, request, tokens_of, until
from vllm_llumnix.config import CONFIG_VARIABLE, LlumletConfig
from vllm_llumnix.engine.relay import Relay as EngineRelay
from vllm_llumnix.frontend.key_check import KeyCheck
from vllm_llumnix.migration import wire
from vllm_llumnix.relay_keys import ZAP_DOMAIN, RelayKeys

pytestmark = pytest.mark.asyncio
__all__ = ["context", "directory", "engine"]

HELLO = wire.Hello(wire.RELAY_VERSION, "b", "1", "127.0.0.1:1", "digest")


def keys_of(token: bytes) -> RelayKeys:
    keys = RelayKeys.from_token(token)
    assert keys is not None
    return keys


@pytest.fixture
def keys(token: Path) -> RelayKeys:
    return keys_of(token.read_bytes().strip())


@pytest.fixture(autouse=True)
def llumlet_enabled(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, LlumletConfig(instance_id="home", token_file=str(token)).to_json())


@pytest_asyncio.fixture
async def client(engine: FakeEngine, directory: Path) -> AsyncIterator[Any]:
    client = new_client(AsyncMPClient, directory)
    await client.add_request_async(request("r"))
    yield client
    close_client(client)


async def test_an_engine_of_the_cluster(client: Any, context: zmq.asyncio.Context, keys: RelayKeys) -> None:
    peer = FakePeer(context, client.relay_address, keys=keys)
    await peer.hello()
    await peer.tokens(relayed("r", 0, 10, 11))
    assert await tokens_of(client, 2) == [10, 11]
    assert await peer.heartbeat("r", "unknown") == ["unknown"]
    peer.close()


async def test_engines_without_the_token(client: Any, context: zmq.asyncio.Context, keys: RelayKeys) -> None:
    """In clear; with keys of another token; with the right server key, but keys of its own."""
    public, secret = zmq.curve_keypair()
    own = RelayKeys(public, secret)
    strangers = [FakePeer(context, client.relay_address), FakePeer(context, client.relay_address, keys=keys_of(b"x"))]
    impostor: zmq.asyncio.Socket = context.socket(zmq.DEALER)
    own.secure_engine(impostor)
    impostor.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    impostor.connect(client.relay_address)
    for stranger in strangers:
        await stranger.tokens(relayed("r", 0, 66))
    await impostor.send(wire.encode(wire.TokenBatch("b", "1", "127.0.0.1:1", [relayed("r", 0, 66)])))
    await until(lambda: client.complaints.counts["stranger"] > 0)
    friend = FakePeer(context, client.relay_address, keys=keys)
    await friend.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    assert set(client.complaints.counts) == {"stranger"}
    for peer in (*strangers, friend):
        peer.close()
    impostor.close(linger=0)


async def test_an_origin_without_the_secret_hears_nothing(context: zmq.asyncio.Context, keys: RelayKeys) -> None:
    """An engine is told the address of somebody who is no API server of the cluster: no token leaves it."""
    public, secret = zmq.curve_keypair()
    for server_keys in (None, RelayKeys(public, secret)):
        listener: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        if server_keys is not None:
            listener.setsockopt(zmq.CURVE_SERVER, 1)
            listener.setsockopt(zmq.CURVE_SECRETKEY, server_keys.secret)
        listener.bind("tcp://127.0.0.1:*")
        relay = EngineRelay(HELLO, lambda origin, requests: None, lambda: wire.Health.OK, keys)
        relay.meet(listener.getsockopt_string(zmq.LAST_ENDPOINT))
        assert not await listener.poll(300)
        await relay.close()
        listener.close(linger=0)


async def test_the_engine_s_own_end_fits(client: Any, keys: RelayKeys) -> None:
    relay = EngineRelay(HELLO, lambda origin, requests: None, lambda: wire.Health.OK, keys)
    relay.meet(client.relay_address)
    answer = await relay.fence(client.relay_address, "r", relayed("r", 0, 1).epoch, 5.0)
    assert answer.raised is not None
    assert (await relay.fence(client.relay_address, "gone", relayed("r", 0, 1).epoch, 5.0)).finished
    await relay.close()


async def test_nobody_reads_along(context: zmq.asyncio.Context, client: Any, keys: RelayKeys) -> None:
    """A listener on the wire sees neither request ids nor addresses."""
    recorded = bytearray()
    port = int(client.relay_address.rpartition(":")[2])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                recorded.extend(data)
                sink.write(data)

        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
        back.close()
        writer.close()

    wiretap = await asyncio.start_server(forward, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{wiretap.sockets[0].getsockname()[1]}"
    peer = FakePeer(context, address, name="instance-in-clear", keys=keys)
    await peer.hello()
    assert await peer.heartbeat("request-in-clear") == ["request-in-clear"]
    assert b"CURVE" in recorded
    assert b"in-clear" not in recorded
    peer.close()
    wiretap.close()
    await asyncio.sleep(0.05)


async def test_no_handler_means_nobody(context: zmq.asyncio.Context, keys: RelayKeys) -> None:
    """If the key check were not there, libzmq would let nobody in rather than everybody."""
    listener: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    keys.secure_origin(listener)
    listener.bind("tcp://127.0.0.1:*")
    peer = FakePeer(context, listener.getsockopt_string(zmq.LAST_ENDPOINT), keys=keys)
    await peer.hello()
    assert not await listener.poll(300)
    peer.close()
    listener.close(linger=0)


@pytest.mark.parametrize(
    "change",
    [
        {"version": b"2.0"},
        {"domain": b"elsewhere"},
        {"mechanism": b"NULL", "proof": []},
        {"mechanism": b"PLAIN", "proof": [b"user", b"word"]},
        {"proof": [b"x" * 32]},
        {"proof": []},
        {},
    ],
    ids=str,
)
async def test_answers_of_the_key_check(context: zmq.asyncio.Context, keys: RelayKeys, change: dict[str, Any]) -> None:
    refused: list[str] = []
    check = KeyCheck(context, keys.public, refused.append)
    task = asyncio.create_task(check.run())
    asker: zmq.asyncio.Socket = context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    fields: dict[str, Any] = {"version": b"1.0", "domain": ZAP_DOMAIN, "mechanism": b"CURVE"}
    fields |= {"proof": [zmq.utils.z85.decode(keys.public)]} | change
    await asker.send_multipart(
        [fields["version"], b"7", fields["domain"], b"192.0.2.1", b"", fields["mechanism"], *fields["proof"]]
    )
    answer = await asyncio.wait_for(asker.recv_multipart(), 5)
    assert answer[:3] == [b"1.0", b"7", b"400" if change else b"200"]
    assert refused == (["192.0.2.1"] if change else [])
    task.cancel()
    check.close()
    asker.close(linger=0)


async def test_keys_come_from_the_token_alone_and_are_not_shown() -> None:
    token = secrets.token_hex(32).encode()
    assert keys_of(token) == keys_of(token) != keys_of(token + b"x")
    assert RelayKeys.from_token(b"") is None
    assert keys_of(token).secret.decode() not in repr(keys_of(token))


async def test_nothing_is_left_when_the_client_goes(engine: FakeEngine, client: Any) -> None:
    relay = client._relay
    client.shutdown()
    await until(lambda: all(task.done() for task in relay._tasks))
    assert len(relay._tasks) == 2
    assert relay._socket.closed
    assert relay._key_check._socket.closed


async def test_origins_end_only_their_own_requests(context: zmq.asyncio.Context) -> None:
    """What an origin says is passed on with its name; its answer to a question of another counts for nothing."""
    origins = [context.socket(zmq.ROUTER) for _ in range(2)]
    addresses = []
    for origin in origins:
        origin.bind("tcp://127.0.0.1:*")
        addresses.append(origin.getsockopt_string(zmq.LAST_ENDPOINT))
    released: list[tuple[str, Any]] = []
    relay = EngineRelay(
        HELLO, lambda origin, requests: released.append((origin, requests)), lambda: wire.Health.OK, None
    )
    for address in addresses:
        relay.meet(address)
    identities = [(await origin.recv_multipart())[0] for origin in origins]
    epoch = relayed("r", 0, 1).epoch
    question = asyncio.create_task(relay.fence(addresses[0], "r", epoch, 5.0))
    asked = wire.decode_to_origin((await origins[0].recv_multipart())[1])
    assert isinstance(asked, wire.FenceQuestion)
    lie = wire.FenceAnswer(asked.question, "r", started=True, finished=False, raised=None, delivered=0)
    await origins[1].send_multipart([identities[1], wire.encode(lie)])
    await origins[1].send_multipart([identities[1], wire.encode(wire.Release([("r", epoch)]))])
    await until(lambda: bool(released))
    assert released == [(addresses[1], [("r", epoch)])]
    assert not question.done()
    await origins[0].send_multipart(
        [identities[0], wire.encode(msgspec.structs.replace(lie, started=False, finished=True))]
    )
    assert (await question).finished
    await relay.close()
    for origin in origins:
        origin.close(linger=0)


@pytest.mark.parametrize("llumlet", ["10.0.0.1:4000", "metadata.internal:80", "unix:/x:1", "", "x" * 400])
async def test_an_api_server_calls_nobody_elsewhere(
    client: Any, context: zmq.asyncio.Context, keys: RelayKeys, llumlet: str
) -> None:
    """Silent owners are probed where they say their llumlet is: without TLS that must be here."""
    peer = FakePeer(context, client.relay_address, llumlet=llumlet, keys=keys)
    epoch = relayed("r", 0, 1).epoch
    await peer.hello()
    await peer.tokens(relayed("r", 0, 66))
    await peer.send(wire.HandedOver("r", epoch, "next", "1", llumlet))
    await peer.heartbeat()
    assert client.complaints.counts == {"bad_address": 3}
    assert {owner.llumlet for owner in client._owners.all()} == {""}
    good = FakePeer(context, client.relay_address, name="good", keys=keys)
    await good.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    for each in (peer, good):
        each.close()
