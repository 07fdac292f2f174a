# SPDX-License-Identifier: Apache-2.0
"""The relay with a token: vLLM's real client on a fake engine, and other engines with and without the keys."""

from __future__ import annotations

import asyncio
import json
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
from zmq.utils import z85

from llumlet.process.credentials import NONE, CredentialFiles, Credentials
from llumlet.protocol import wire
from tests.frontend.conftest import context, directory, engine
from tests.frontend.fakes import FakeEngine, FakePeer, close_client, new_client, relayed, request, tokens_of, until
from tests.support.authority import token_file
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.engine.service.relay_sender import Relay as EngineRelay
from vllm_llumnix.frontend.relay_socket import KeyCheck
from vllm_llumnix.switch import CONFIG_VARIABLE
from vllm_llumnix.wire.addresses import Reach, RelayAddress
from vllm_llumnix.wire.relay_keys import ZAP_DOMAIN, OriginKeys

pytestmark = pytest.mark.asyncio
__all__ = ["context", "directory", "engine"]

HELLO = wire.Hello(wire.RELAY_VERSION, "b", "1", "127.0.0.1:1", "digest")


def credentials_of(file: Path) -> Credentials:
    return Credentials.load(CredentialFiles(token_file=str(file)))


@pytest.fixture
def credentials(token: Path) -> Credentials:
    return credentials_of(token)


@pytest.fixture(autouse=True)
def llumlet_enabled(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, LlumletConfig(instance_id="home", token_file=str(token)).to_json())


@pytest_asyncio.fixture
async def client(engine: FakeEngine, directory: Path) -> AsyncIterator[Any]:
    client = new_client(AsyncMPClient, directory)
    await client.add_request_async(request("r"))
    yield client
    close_client(client)


async def test_an_engine_of_the_cluster(client: Any, context: zmq.asyncio.Context, credentials: Credentials) -> None:
    peer = FakePeer(context, client.relay_address, credentials=credentials)
    await peer.hello()
    await peer.tokens(relayed("r", 0, 10, 11))
    assert await tokens_of(client, 2) == [10, 11]
    assert await peer.heartbeat("r", "unknown") == ["unknown"]
    peer.close()


async def test_engines_without_the_token(
    client: Any, context: zmq.asyncio.Context, credentials: Credentials, tmp_path: Path
) -> None:
    """In clear; with another token; with another token, and a key of the origin that is not its own."""
    address = RelayAddress.parse(client.relay_address)
    other = credentials_of(token_file(tmp_path, "other"))
    strangers = [
        FakePeer(context, address.endpoint),
        FakePeer(context, str(address), credentials=other),
        FakePeer(context, str(RelayAddress(address.endpoint, secrets.token_bytes(32))), credentials=credentials),
    ]
    for stranger in strangers:
        await stranger.tokens(relayed("r", 0, 66))
    await until(lambda: client.origin.complaints.counts["stranger"] > 0)
    friend = FakePeer(context, client.relay_address, credentials=credentials)
    await friend.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    assert set(client.origin.complaints.counts) == {"stranger"}
    for peer in (*strangers, friend):
        peer.close()


async def test_a_token_is_replaced_without_a_restart(
    client: Any, context: zmq.asyncio.Context, token: Path, tmp_path: Path
) -> None:
    """The next one is added behind the last, then they change places, then the last one goes. An engine is at most one
    step away from the origin, and always let in."""
    last, following = client.origin.credentials.own_tokens[0].decode(), secrets.token_hex(32)
    steps = ([last], [last, following], [following, last], [following])
    own = [
        credentials_of(has_tokens(token_file(tmp_path, f"step-{number}"), step)) for number, step in enumerate(steps)
    ]
    for number, step in enumerate(steps):
        has_tokens(token, step)
        await until(lambda step=step: client.origin.credentials.own_tokens == tuple(map(str.encode, step)))
        for near in own[max(0, number - 1) : number + 2]:
            peer = FakePeer(context, client.relay_address, credentials=near)
            assert await peer.heartbeat("unknown") == ["unknown"]
            peer.close()
    assert client.origin.complaints.counts == {}
    late = FakePeer(context, client.relay_address, credentials=own[0])
    await late.hello()
    await until(lambda: client.origin.complaints.counts["stranger"] > 0)
    late.close()


def has_tokens(file: Path, tokens: list[str]) -> Path:
    file.write_text(json.dumps({"peer": tokens}))
    return file


async def test_an_origin_without_the_secret_hears_nothing(
    context: zmq.asyncio.Context, credentials: Credentials
) -> None:
    """An engine is told the address of an API server at which somebody else listens: no token leaves the engine."""
    public, _ = zmq.curve_keypair()
    _, secret = zmq.curve_keypair()
    for has_keys in (False, True):
        listener: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        if has_keys:
            listener.setsockopt(zmq.CURVE_SERVER, 1)
            listener.setsockopt(zmq.CURVE_SECRETKEY, secret)
        listener.bind("tcp://127.0.0.1:*")
        relay = EngineRelay(HELLO, _nothing, _nothing, lambda: wire.Health.OK, credentials)
        relay.meet(str(RelayAddress(listener.getsockopt_string(zmq.LAST_ENDPOINT), z85.decode(public))))
        assert not await listener.poll(300)
        await relay.close()
        listener.close(linger=0)


async def test_the_engine_s_own_end_fits(client: Any, credentials: Credentials) -> None:
    relay = EngineRelay(HELLO, _nothing, _nothing, lambda: wire.Health.OK, credentials)
    relay.meet(client.relay_address)
    answer = await relay.fence(client.relay_address, "r", relayed("r", 0, 1).epoch, 5.0)
    assert answer.raised is not None
    assert (await relay.fence(client.relay_address, "gone", relayed("r", 0, 1).epoch, 5.0)).finished
    await relay.close()


async def test_relay_is_encrypted(context: zmq.asyncio.Context, client: Any, credentials: Credentials) -> None:
    """A listener on the wire sees neither request ids nor addresses."""
    recorded = bytearray()
    relay = RelayAddress.parse(client.relay_address)
    port = int(relay.endpoint.rpartition(":")[2])

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
    address = str(RelayAddress(f"tcp://127.0.0.1:{wiretap.sockets[0].getsockname()[1]}", relay.key))
    peer = FakePeer(context, address, name="instance-in-clear", credentials=credentials)
    await peer.hello()
    assert await peer.heartbeat("request-in-clear") == ["request-in-clear"]
    assert b"CURVE" in recorded
    assert b"in-clear" not in recorded
    peer.close()
    wiretap.close()
    await asyncio.sleep(0.05)


async def test_no_handler_means_nobody(context: zmq.asyncio.Context, credentials: Credentials) -> None:
    """If the key check were not there, libzmq would let nobody in rather than everybody."""
    listener: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    keys = OriginKeys(credentials)
    keys.secure(listener)
    listener.bind("tcp://127.0.0.1:*")
    address = str(RelayAddress(listener.getsockopt_string(zmq.LAST_ENDPOINT), keys.public))
    peer = FakePeer(context, address, credentials=credentials)
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
async def test_answers_of_the_key_check(
    context: zmq.asyncio.Context, credentials: Credentials, change: dict[str, Any]
) -> None:
    refused: list[str] = []
    keys = OriginKeys(credentials)
    check = KeyCheck(context, keys, refused.append)
    task = asyncio.create_task(check.run())
    asker: zmq.asyncio.Socket = context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    fields: dict[str, Any] = {"version": b"1.0", "domain": ZAP_DOMAIN, "mechanism": b"CURVE"}
    fields |= {"proof": list(keys.accepted)} | change
    await asker.send_multipart(
        [fields["version"], b"7", fields["domain"], b"192.0.2.1", b"", fields["mechanism"], *fields["proof"]]
    )
    answer = await asyncio.wait_for(asker.recv_multipart(), 5)
    assert answer[:3] == [b"1.0", b"7", b"400" if change else b"200"]
    assert refused == (["192.0.2.1"] if change else [])
    task.cancel()
    check.close()
    asker.close(linger=0)


async def test_engines_keys_come_from_the_token_alone_and_an_origin_s_from_nothing(
    credentials: Credentials, token: Path, tmp_path: Path
) -> None:
    one, again = OriginKeys(credentials), OriginKeys(credentials_of(token))
    assert one.accepted == again.accepted != OriginKeys(credentials_of(token_file(tmp_path, "other"))).accepted
    assert one.public != again.public
    assert not set(one.accepted) & {one.public, again.public}


async def test_only_relays_with_a_key_are_met_by_who_has_a_token() -> None:
    address = RelayAddress("tcp://127.0.0.1:1", secrets.token_bytes(32))
    assert RelayAddress.parse(str(address)) == address
    with_token, without = Reach(anywhere=False, keys=True), Reach(anywhere=False)
    assert with_token.why_not_relay(str(address)) is None
    assert without.why_not_relay(address.endpoint) is None
    assert "has no key" in str(with_token.why_not_relay(address.endpoint))
    assert "has a key" in str(without.why_not_relay(str(address)))
    for damaged in ("", "00", "x" * 64, "+1" * 32, "0" * 66):
        for reach in (with_token, without):
            assert reach.why_not_relay(f"{address.endpoint}#{damaged}") is not None


async def test_nothing_is_left_when_the_client_goes(engine: FakeEngine, client: Any) -> None:
    relay = client.origin.relay
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
        HELLO, lambda origin, requests: released.append((origin, requests)), _nothing, lambda: wire.Health.OK, NONE
    )
    for address in addresses:
        relay.meet(address)
    identities = [(await origin.recv_multipart())[0] for origin in origins]
    epoch = relayed("r", 0, 1).epoch
    question = asyncio.create_task(relay.fence(addresses[0], "r", epoch, 5.0))
    asked = wire.decode_to_origin((await origins[0].recv_multipart())[1])
    assert isinstance(asked, wire.FenceQuestion)
    lie = wire.FenceAnswer(asked.question, "r", finished=False)
    await origins[1].send_multipart([identities[1], wire.encode(lie)])
    await origins[1].send_multipart([identities[1], wire.encode(wire.Dismissal([("r", epoch)]))])
    await until(lambda: bool(released))
    assert released == [(addresses[1], [("r", epoch)])]
    assert not question.done()
    await origins[0].send_multipart([identities[0], wire.encode(msgspec.structs.replace(lie, finished=True))])
    assert (await question).finished
    await relay.close()
    for origin in origins:
        origin.close(linger=0)


@pytest.mark.parametrize("llumlet", ["10.0.0.1:4000", "metadata.internal:80", "unix:/x:1", "", "x" * 400])
async def test_an_api_server_calls_nobody_elsewhere(
    client: Any, context: zmq.asyncio.Context, credentials: Credentials, llumlet: str
) -> None:
    """Silent owners are probed where they say their llumlet is: without TLS that must be here."""
    peer = FakePeer(context, client.relay_address, llumlet=llumlet, credentials=credentials)
    epoch = relayed("r", 0, 1).epoch
    await peer.hello()
    await peer.tokens(relayed("r", 0, 66))
    await peer.send(wire.HandedOver("r", epoch, "next", "1", llumlet))
    await peer.heartbeat()
    assert client.origin.complaints.counts == {"bad_address": 3}
    assert {owner.llumlet for owner in client.origin.core.owners.all()} == {""}
    good = FakePeer(context, client.relay_address, name="good", credentials=credentials)
    await good.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    for each in (peer, good):
        each.close()


def _nothing(origin: str, told: object) -> None:
    pass
