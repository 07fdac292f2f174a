# SPDX-License-Identifier: Apache-2.0
"""A stream whose outputs come over two sockets: vLLM's own, and the relay."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import FinishReason

from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import streams
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import FakeEngine, FakePeer, next_outputs, output, relayed, request, tokens_of
from vllm_llumnix.frontend.asgi import Served, served
from vllm_llumnix.frontend.calls import state_of
from vllm_llumnix.wire.request_wire import without_name

pytestmark = pytest.mark.asyncio


async def start(client: Any, engine: FakeEngine, *request_ids: str) -> None:
    for request_id in request_ids:
        await client.add_request_async(request(request_id))
        await engine.added()


async def test_requests_carry_the_relay_address(client: Any, engine: FakeEngine) -> None:
    await client.add_request_async(request("r"))
    assert client.relay_address.startswith("tcp://127.0.0.1:")
    assert (await engine.added()).queue_server_address == client.relay_address


@pytest.mark.parametrize("is_pooling", [False, True])
async def test_requests_carry_the_name_of_their_gateway(client: Any, engine: FakeEngine, is_pooling: bool) -> None:
    token = served.set(Served("gate-7"))
    pooling = {"sampling_params": None, "pooling_params": PoolingParams()} if is_pooling else {}
    headers = {"traceparent": "t"}
    await client.add_request_async(request("resp_1_0-abcd1234", trace_headers=headers, priority=0, **pooling))
    served.reset(token)
    added = await engine.added()
    assert without_name(added.trace_headers) == ("gate-7", headers)
    state = state_of(added, [], "tcp://127.0.0.1:1", None) if not is_pooling else None
    assert state is None or (state.name, state.trace_headers) == ("gate-7", headers)


async def test_turn_after_a_tool_call_is_not_urgent(client: Any, engine: FakeEngine) -> None:
    token = served.set(Served("gate-7"))
    for number, priority in enumerate((0, -1)):
        await client.add_request_async(request(f"r{number}", priority=priority))
        assert (await engine.added()).priority == 0
    served.reset(token)


async def test_a_stream_goes_on_over_the_relay(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    await engine.send(output("r", 10))
    await engine.send(output("r", 11))
    assert await tokens_of(client, 2) == [10, 11]
    await peer.tokens(relayed("r", 2, 12, base=2))
    await peer.tokens(relayed("r", 3, 13, base=2, finish=FinishReason.LENGTH), weight_version="w1")
    assert await tokens_of(client, 1) == [12]
    last = await next_outputs(client)
    assert last.outputs[0].new_token_ids == [13]
    assert last.outputs[0].finish_reason == FinishReason.LENGTH
    assert last.finished_requests == {"r"}
    assert last.weight_version == "w1"
    assert await peer.heartbeat("r") == ["r"]


async def test_the_destination_may_be_faster_than_the_sources_last_token(
    client: Any, engine: FakeEngine, peer: FakePeer
) -> None:
    await start(client, engine, "r")
    await engine.send(output("r", 10))
    assert await tokens_of(client, 1) == [10]
    await peer.tokens(relayed("r", 2, 12, base=2))
    await peer.tokens(relayed("r", 3, 13, base=2))
    assert await peer.heartbeat("r") == []
    assert client.outputs_queue.empty()
    await engine.send(output("r", 11))
    assert await tokens_of(client, 3) == [11, 12, 13]


async def test_outputs_are_dressed_as_the_home_engines(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    before = time.monotonic()
    await peer.tokens(relayed("r", 0, 10))
    outputs = await next_outputs(client)
    assert outputs.engine_index == 0
    assert before <= outputs.timestamp <= time.monotonic()
    assert outputs.scheduler_stats is None
    assert outputs.utility_output is None


async def test_neighbours_in_a_batch_pass_untouched(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "moved", "stays")
    await peer.tokens(relayed("moved", 1, 11, base=1))
    assert await peer.heartbeat() == []
    await engine.send(output("stays", 20), output("moved", 10), output("stranger", 30))
    outputs = await next_outputs(client)
    assert [(part.request_id, part.new_token_ids) for part in outputs.outputs] == [
        ("stays", [20]),
        ("moved", [10]),
        ("moved", [11]),
        ("stranger", [30]),
    ]


async def test_duplicates_and_overlaps_are_trimmed(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    await engine.send(output("r", 10))
    await tokens_of(client, 1)
    await peer.tokens(relayed("r", 0, 10, 11, base=2))
    await peer.tokens(relayed("r", 0, 10, 11, base=2))
    await peer.tokens(relayed("r", 1, 11, 12, 13, base=2))
    await engine.send(output("r", 11))
    assert await tokens_of(client, 3) == [11, 12, 13]
    await engine.send(output("r", 12))  # beyond what it owns
    await peer.tokens(relayed("r", 4, 14, base=2))
    assert await tokens_of(client, 1) == [14]


async def test_home_tokens_that_the_destination_repeats(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    """Its path has no index: what comes from home counts from the request's first token, whoever delivered that."""
    await start(client, engine, "r")
    await peer.tokens(relayed("r", 0, 10, 11, base=3))
    assert await tokens_of(client, 2) == [10, 11]
    await engine.send(output("r", 10))
    await engine.send(output("r", 11))
    await engine.send(output("r", 12))
    await peer.tokens(relayed("r", 3, 13, base=3))
    assert await tokens_of(client, 2) == [12, 13]


async def test_a_request_moves_on_and_home_again(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    b, c = new_peer("b"), new_peer("c")
    await start(client, engine, "r")
    await engine.send(output("r", 10))
    await c.tokens(relayed("r", 3, 13, epoch=Epoch(0, 2), base=3))
    await b.tokens(relayed("r", 1, 11, epoch=Epoch(0, 1), base=1))
    await b.tokens(relayed("r", 2, 12, epoch=Epoch(0, 1), base=1))
    assert await tokens_of(client, 4) == [10, 11, 12, 13]
    home = new_peer("home")
    await home.tokens(relayed("r", 4, 14, epoch=Epoch(0, 3), base=4, finish=FinishReason.STOP, stop_reason=2))
    last = await next_outputs(client)
    assert last.outputs[0].new_token_ids == [14]
    assert last.outputs[0].stop_reason == 2


async def test_a_stale_owner_is_told(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    b, c = new_peer("b"), new_peer("c")
    await start(client, engine, "r", "other")
    await b.tokens(relayed("r", 0, 10, epoch=Epoch(0, 1)))
    await c.tokens(relayed("r", 1, 11, epoch=Epoch(0, 2), base=1))
    assert await tokens_of(client, 2) == [10, 11]
    await b.tokens(relayed("other", 0, 50), relayed("r", 1, 99, epoch=Epoch(0, 1)))
    assert await tokens_of(client, 1) == [50]
    assert await b.answer() == wire.Dismissal([("r", Epoch(0, 1))])
    await c.tokens(relayed("r", 2, 12, epoch=Epoch(0, 2), base=1))
    assert await tokens_of(client, 1) == [12]


async def test_outputs_of_unknown_requests_are_released(client: Any, peer: FakePeer) -> None:
    await peer.tokens(relayed("nobody", 5, 1, epoch=Epoch(0, 4), base=5), relayed("none", 0, 1))
    assert await peer.answer() == wire.Dismissal([("nobody", Epoch(0, 4)), ("none", Epoch(0, 1))])
    assert client.outputs_queue.empty()


async def test_a_stream_that_ended_at_home_is_known_no_more(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    assert await peer.heartbeat("r") == []
    await engine.send(output("r", 10, finish=FinishReason.STOP))
    await tokens_of(client, 1)
    assert await peer.heartbeat("r") == ["r"]


async def test_tokens_that_stay_lost_end_the_stream_with_an_error(
    client: Any, engine: FakeEngine, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no other engine that could produce them again."""
    monkeypatch.setattr(streams, "GAP_SECONDS", 0.2)
    monkeypatch.setattr(streams, "HOPELESS_SECONDS", 0.3)
    await start(client, engine, "r")
    for index in range(1, 258):
        await peer.tokens(relayed("r", index, 10, base=1))
    outputs = await next_outputs(client)
    assert outputs.outputs[0].finish_reason == FinishReason.ERROR
    assert outputs.finished_requests == {"r"}
    assert client.origin.complaints.counts["overflow"] == 1
    await peer.tokens(relayed("r", 1, 10, base=1))
    assert await peer.answer() == wire.Dismissal([("r", Epoch(0, 1))])


# Fences


async def test_fence_of_an_epoch_that_has_begun(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    source, destination = new_peer("source"), new_peer("destination")
    await start(client, engine, "accepted", "buffered")
    await destination.tokens(relayed("accepted", 0, 10), relayed("buffered", 1, 11, base=1))
    assert await destination.heartbeat() == []
    for request_id in ("accepted", "buffered"):
        answer = await source.fence(request_id, Epoch(0, 1))
        assert (answer.finished, answer.raised) == (False, None)


async def test_fence_raises_the_term_and_bars_the_destination(
    client: Any, engine: FakeEngine, new_peer: NewPeer
) -> None:
    source, destination = new_peer("source"), new_peer("destination")
    await source.hello()
    await start(client, engine, "r")
    await engine.send(output("r", 10))
    await tokens_of(client, 1)
    answer = await source.fence("r", Epoch(0, 1))
    assert (answer.finished, answer.raised) == (False, Epoch(1, 0))
    assert await source.fence("r", Epoch(0, 1)) == answer
    await destination.tokens(relayed("r", 1, 99, epoch=Epoch(0, 1), base=1))
    assert await destination.answer() == wire.Dismissal([("r", Epoch(0, 1))])
    await source.tokens(relayed("r", 2, 12, epoch=Epoch(1, 0), base=2))
    await engine.send(output("r", 11))
    assert await tokens_of(client, 2) == [11, 12]
    await client.abort_requests_async(["r"])
    assert await source.answer() == wire.Dismissal([("r", Epoch(1, 0))])


async def test_fence_about_a_request_that_nobody_waits_for(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    await client.abort_requests_async(["r"])
    for request_id in ("r", "never seen"):
        answer = await peer.fence(request_id, Epoch(0, 1))
        assert (answer.finished, answer.raised) == (True, None)


async def test_a_raised_epochs_owner_is_reached_before_its_first_token(
    client: Any, engine: FakeEngine, peer: FakePeer
) -> None:
    await start(client, engine, "r")
    await peer.fence("r", Epoch(0, 1))
    await client.abort_requests_async(["r"])
    assert await peer.answer() == wire.Dismissal([("r", Epoch(1, 0))])


# Aborts


async def test_abort_of_a_request_that_never_moved(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    await client.abort_requests_async(["r", "unknown"])
    assert await engine.aborted() == ["r", "unknown"]
    assert await peer.heartbeat("r") == ["r"]


async def test_abort_before_the_owner_is_known(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await start(client, engine, "r")
    await client.abort_requests_async(["r"])
    assert await engine.aborted() == ["r"], "the home engine sends it on"
    await peer.tokens(relayed("r", 0, 10))
    assert await peer.answer() == wire.Dismissal([("r", Epoch(0, 1))])
    assert client.outputs_queue.empty()


async def test_abort_reaches_the_owner(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    b, c = new_peer("b"), new_peer("c")
    await start(client, engine, "r", "s")
    await b.tokens(relayed("r", 0, 10), relayed("s", 0, 20))
    await tokens_of(client, 2)
    await c.tokens(relayed("r", 1, 11, epoch=Epoch(0, 2), base=1))
    await tokens_of(client, 1)
    await client.abort_requests_async(["r", "s"])
    assert await engine.aborted() == ["r", "s"]
    assert await c.answer() == wire.Dismissal([("r", Epoch(0, 2))])
    assert await b.answer() == wire.Dismissal([("s", Epoch(0, 1))])
    await c.tokens(relayed("r", 2, 12, epoch=Epoch(0, 2), base=1))
    assert await c.answer() == wire.Dismissal([("r", Epoch(0, 2))]), "each late output is answered"
    assert client.outputs_queue.empty()


async def test_a_former_owners_late_token_does_not_make_it_the_owner(
    client: Any, engine: FakeEngine, new_peer: NewPeer
) -> None:
    b, c = new_peer("b"), new_peer("c")
    await start(client, engine, "r")
    await c.tokens(relayed("r", 1, 11, epoch=Epoch(0, 2), base=1))
    assert await c.heartbeat() == []
    await b.tokens(relayed("r", 0, 10, epoch=Epoch(0, 1)))
    assert await tokens_of(client, 2) == [10, 11]
    await client.abort_requests_async(["r"])
    assert await c.answer() == wire.Dismissal([("r", Epoch(0, 2))])


async def test_abort_follows_an_owner_that_reconnected(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    await start(client, engine, "r")
    first = new_peer("b")
    await first.tokens(relayed("r", 0, 10))
    await tokens_of(client, 1)
    first.close()
    again = new_peer("b")
    assert await again.heartbeat("r") == []
    await client.abort_requests_async(["r"])
    assert await again.answer() == wire.Dismissal([("r", Epoch(0, 1))])


# What keeps to vLLM's own ways


@pytest.mark.parametrize("changes", [{"sampling_params": None}, {"abort_immediately": True}])
async def test_requests_that_cannot_move_have_no_stream(
    client: Any, engine: FakeEngine, peer: FakePeer, changes: dict[str, Any]
) -> None:
    await client.add_request_async(request("r", **changes))
    assert (await engine.added()).queue_server_address is None
    assert await peer.heartbeat("r") == ["r"]
    await engine.send(output("r", 10, finish=FinishReason.STOP))
    assert await tokens_of(client, 1) == [10]


async def test_a_request_that_could_not_be_sent_leaves_nothing(client: Any, peer: FakePeer) -> None:
    client.resources.engine_dead = True
    with pytest.raises(Exception, match="EngineCore"):
        await client.add_request_async(request("r"))
    assert await peer.heartbeat("r") == ["r"]
    client.resources.engine_dead = False
