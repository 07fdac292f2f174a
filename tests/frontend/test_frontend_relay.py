# SPDX-License-Identifier: Apache-2.0
"""The relay socket against peers that send what they should not, or too much, and what is known of its senders."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from llumlet.protocol import wire
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.origin.owners import MAX_OWNERS, Owners
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import VOCAB_SIZE, FakeEngine, FakePeer, relayed, request, tokens_of, until
from vllm_llumnix.frontend import relay_socket as relay_module
from vllm_llumnix.frontend.relay_socket import Complaints, RelaySocket


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00" * 100],
        [msgspec.msgpack.encode({"type": "tokens", "outputs": 3})],
        [msgspec.msgpack.encode({"type": "utility"})],
        [wire.encode(wire.Dismissal([("r", Epoch(0, 1))]))],
        [wire.encode(wire.Heartbeat("i", "1", wire.Health.OK, [])), b"more"],
        [wire.encode(wire.Heartbeat("i", "1", wire.Health.OK, []))[:-1]],
    ],
    ids=["empty", "zeros", "wrong type", "unknown tag", "not for an origin", "two frames", "cut off"],
)
async def test_garbage_is_counted_and_harms_nobody(
    client: Any, engine: FakeEngine, peer: FakePeer, new_peer: NewPeer, frames: list[bytes]
) -> None:
    await client.add_request_async(request("r"))
    await new_peer("bad").socket.send_multipart(frames)
    await peer.socket.send_multipart(frames)
    await peer.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    await until(lambda: client.origin.complaints.counts == {"bad_message": 2})


@pytest.mark.asyncio
async def test_an_oversize_message_ends_only_its_connection(
    client: Any, engine: FakeEngine, peer: FakePeer, new_peer: NewPeer
) -> None:
    await client.add_request_async(request("r"))
    big = new_peer("big")
    await big.socket.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    await peer.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]
    assert await big.heartbeat("r") == [], "it may come back"
    assert client.origin.complaints.counts == {}, "the message was never received"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "bad",
    [
        relayed("r", 0, VOCAB_SIZE),
        relayed("r", 0, -1),
        relayed("r", -1, 1),
        relayed("r", 0, 1, base=-1),
        relayed("r", 0, 1, epoch=HOME),
        relayed("r", 0, 1, epoch=Epoch(0, -1)),
        wire.TokenOutput("r", Epoch(0, 1), 0, 0, [1], finish_reason=99),
        relayed("r", 0, 1, logprobs=wire.Logprobs([[1]], [[-0.5]], [1])),
    ],
    ids=["id too large", "negative id", "negative index", "negative base", "home epoch", "negative epoch",
         "finish reason", "logprobs not asked for"],
)  # fmt: skip
async def test_a_bad_output_does_not_reach_vllm(
    client: Any, engine: FakeEngine, peer: FakePeer, bad: wire.TokenOutput
) -> None:
    for request_id in ("r", "neighbour"):
        await client.add_request_async(request(request_id))
    await peer.tokens(bad, relayed("neighbour", 0, 20))
    assert await tokens_of(client, 1) == [20]
    assert client.origin.complaints.counts == {"bad_output": 1}
    await peer.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]


@pytest.mark.asyncio
async def test_an_error_of_ours_costs_one_message(
    client: Any, engine: FakeEngine, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.add_request_async(request("r"))
    assert await peer.heartbeat() == []
    with monkeypatch.context() as patch:
        patch.setattr(client.origin, "hear", lambda identity, message: 1 / 0)
        await peer.hello()
        await until(lambda: client.origin.complaints.counts == {"internal": 1})
    await peer.tokens(relayed("r", 0, 10))
    assert await tokens_of(client, 1) == [10]


@pytest.mark.asyncio
async def test_another_version_is_reported(client: Any, peer: FakePeer, new_peer: NewPeer) -> None:
    old = new_peer("old")
    await old.hello(version=wire.RELAY_VERSION + 1)
    assert await old.heartbeat() == []
    assert client.origin.complaints.counts == {"version": 1}


class EndlessSocket:
    """Has the next message ready, always."""

    closed = True

    def __init__(self, messages: int) -> None:
        self.left = messages

    async def recv_multipart(self) -> list[bytes]:
        self.left -= 1
        if self.left < 0:
            raise zmq.ZMQError
        return [b"peer", wire.encode(wire.Heartbeat("flood", "1", wire.Health.OK, []))]


@pytest.mark.asyncio
async def test_a_flood_leaves_other_tasks_their_turn() -> None:
    taken: list[wire.ToOrigin] = []
    sock: Any = EndlessSocket(messages=1000)
    task = asyncio.create_task(relay_module._read(sock, lambda identity, message: taken.append(message), Complaints()))
    for turn in range(1, 4):
        await asyncio.sleep(0)
        assert len(taken) == turn * relay_module.MESSAGES_IN_A_ROW
    await task
    assert len(taken) == 1000


@pytest.mark.asyncio
async def test_held_back_tokens_hold_up_nobody_else(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    for request_id in ("waits", "goes"):
        await client.add_request_async(request(request_id))
    for index in range(1, 200):
        await peer.tokens(relayed("waits", index, 1, base=1), relayed("goes", index - 1, 2))
    assert await tokens_of(client, 199) == [2] * 199


@pytest.mark.asyncio
async def test_ten_thousand_tokens(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await client.add_request_async(request("r"))
    tokens = [index % VOCAB_SIZE for index in range(10_000)]
    for index, token in enumerate(tokens):
        await peer.tokens(relayed("r", index, token))
    assert await tokens_of(client, len(tokens)) == tokens


@pytest.mark.asyncio
@pytest.mark.parametrize(("host", "reached"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
async def test_the_address_is_one_that_engines_can_use(context: zmq.asyncio.Context, host: str, reached: str) -> None:
    relay = RelaySocket(context, host, lambda identity, message: None, Complaints())
    assert relay.address.startswith(f"tcp://{reached}:")
    relay.close()


@pytest.mark.asyncio
async def test_a_wildcard_is_not_advertised(context: zmq.asyncio.Context) -> None:
    relay = RelaySocket(context, "0.0.0.0", lambda identity, message: None, Complaints())
    assert "0.0.0.0" not in relay.address
    relay.close()


@pytest.mark.asyncio
async def test_an_address_that_is_not_ours_is_an_error(context: zmq.asyncio.Context) -> None:
    with pytest.raises(zmq.ZMQError):
        RelaySocket(context, "192.0.2.1", lambda identity, message: None, Complaints())


def test_complaints_are_logged_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    messages: list[str] = []
    monkeypatch.setattr(relay_module.logger, "warning", lambda text, *args: messages.append(text % args))
    complaints = Complaints(clock=lambda: now)
    for _ in range(50):
        complaints.note("bad_message", "first")
    complaints.note("bad_output", "another kind")
    now = relay_module.REPORT_SECONDS
    complaints.note("bad_message", "x" * 10_000)
    assert [message[:30] for message in messages] == [
        "relay: bad_message: first",
        "relay: bad_output: another kin",
        "relay: bad_message: xxxxxxxxxx",
    ]
    assert messages[-1].endswith("(49 more before)")
    assert len(messages[-1]) < 400
    assert complaints.counts == {"bad_message": 51, "bad_output": 1}


def test_owners_follow_reconnections_and_are_bounded() -> None:
    owners = Owners()
    b = owners.heard(b"1", "b", "x", 0.0)
    assert owners.heard(b"2", "b", "x", 3.0) is b
    assert (b.identity, b.last_heard) == (b"2", 3.0)
    assert owners.at(b"1") is None
    assert owners.at(b"2") is b
    assert owners.heard(b"3", "b", "y", 3.0) is not b, "another incarnation is another owner"
    for number in range(MAX_OWNERS):
        owners.heard(b"n%d" % number, "many", str(number), 4.0)
    assert len(owners) == MAX_OWNERS
    assert owners.at(b"2") is None
