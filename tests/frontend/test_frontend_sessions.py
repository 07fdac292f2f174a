# SPDX-License-Identifier: Apache-2.0
"""Inputs that come in parts, by way of vLLM's clients: to the home engine, and after a move to whoever has it."""

from __future__ import annotations

from typing import Any

import pytest
import zmq.asyncio
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest, FinishReason

from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import FIRST_HOP, FakeEngine, FakePeer, next_outputs, output, relayed, request, tokens_of
from vllm_llumnix.frontend import session_inputs as sessions
from vllm_llumnix.wire.request_wire import decode_state

pytestmark = pytest.mark.asyncio
END = FinishReason.LENGTH
ELSEWHERE = MultiModalFeatureSpec(None, "image", "some-image", PlaceholderRange(offset=0, length=2))
"""An image that vLLM has sent to the first engine before, and does not send again."""


async def say(client: Any, *prompt: int, **more: Any) -> None:
    await client.add_request_async(request("s", prompt_token_ids=[*prompt], resumable=True, **more))


async def end(client: Any) -> None:
    """As vLLM says that there is no more input."""
    await client.add_request_async(request("s", prompt_token_ids=[0]))


async def moved(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    """A session whose first part is answered, and which `peer` has."""
    await peer.hello()
    await say(client, 1, 2, 3)
    await engine.added()
    await engine.send(output("s", 10, 11, finish=END))
    assert await tokens_of(client, 2) == [10, 11]
    assert await beat(peer, 1) == []


async def beat(peer: FakePeer, num_parts: int, epoch: Epoch = FIRST_HOP) -> list[str]:
    await peer.send(wire.Heartbeat(peer.name, "1", wire.Health.OK, [("s", epoch)], {"s": num_parts}))
    answer = await peer.answer()
    assert isinstance(answer, wire.HeartbeatAck)
    return answer.unknown


async def part_at(peer: FakePeer) -> wire.InputPart:
    answer = await peer.answer()
    assert isinstance(answer, wire.InputPart)
    return answer


async def test_at_home_all_goes_vllms_own_way(client: Any, engine: FakeEngine) -> None:
    for prompt in ([1, 2], [3]):
        await say(client, *prompt)
        assert (await engine.added()).prompt_token_ids == prompt
    await end(client)
    last: EngineCoreRequest = await engine.added()
    assert (last.prompt_token_ids, last.resumable) == ([0], False)
    await engine.send(output("s", 10, finish=END))
    await engine.send(output("s", 11, finish=END))
    assert await tokens_of(client, 2) == [10, 11]
    assert client.origin.num_streams == 0


async def test_the_next_parts_go_where_it_has_gone(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await moved(client, engine, peer)
    await say(client, 4, 5)
    part = await part_at(peer)
    assert (part.request_id, part.epoch, part.number) == ("s", FIRST_HOP, 1)
    assert part.state is not None
    state = decode_state(part.state)
    assert (state.prompt_token_ids, state.output_token_ids, state.request_id) == ([4, 5], [], "s")
    await peer.tokens(relayed("s", 2, 12, base=2))
    await peer.tokens(relayed("s", 3, 13, base=2, finish=END))
    await say(client, 6)
    assert (await part_at(peer)).number == 2
    await end(client)
    last = await part_at(peer)
    assert (last.number, last.state) == (3, None)
    await peer.tokens(relayed("s", 4, 14, base=2, finish=END))
    answers = [part for _ in range(3) for part in (await next_outputs(client)).outputs]
    assert [(*answer.new_token_ids, answer.finish_reason) for answer in answers] == [(12, None), (13, END), (14, END)]
    assert client.origin.num_streams == 0
    assert await engine.silent()


async def test_missing_part_is_sent_again(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await moved(client, engine, peer)
    await say(client, 4)
    await say(client, 5)
    assert [(await part_at(peer)).number for _ in range(2)] == [1, 2]
    assert await beat(peer, 2) == []
    assert (await part_at(peer)).number == 2
    assert await beat(peer, 3) == []
    await end(client)
    assert (await part_at(peer)).state is None


async def test_parts_that_met_nobody_at_home(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    """The home engine had let the session go, and the API server did not know."""
    await say(client, 1)
    await engine.added()
    await engine.send(output("s", 10, finish=END))
    assert await tokens_of(client, 1) == [10]
    await say(client, 2)
    await engine.added()  # and drops it
    peer = new_peer("b")
    await peer.hello()
    assert await beat(peer, 1) == []
    part = await part_at(peer)
    assert part.number == 1
    assert part.state is not None
    assert decode_state(part.state).prompt_token_ids == [2]


async def test_an_end_between_parts(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    """Nobody has anything left to answer: the engine that has the session is told that it is not wanted."""
    await moved(client, engine, peer)
    await end(client)
    assert await peer.answer() == wire.Dismissal([("s", FIRST_HOP)])
    assert client.origin.num_streams == 0
    await say(client, 7)  # nobody expects one: what vLLM makes of it is a session of its own
    assert (await engine.added()).prompt_token_ids == [7]


async def test_the_client_leaves(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await moved(client, engine, peer)
    await client.abort_requests_async(["s"])
    assert await peer.answer() == wire.Dismissal([("s", FIRST_HOP)])
    assert await engine.aborted() == ["s"]


async def test_ended_stream_drops_later_parts(client: Any, engine: FakeEngine, peer: FakePeer) -> None:
    await moved(client, engine, peer)
    client.origin.cut_streams()
    assert await peer.answer() == wire.Dismissal([("s", FIRST_HOP)])
    await say(client, 4)
    await end(client)
    assert await engine.silent()


@pytest.mark.parametrize("why", ["too large", "an image that only the first engine has"])
async def test_a_part_that_cannot_be_sent(
    client: Any, engine: FakeEngine, peer: FakePeer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await moved(client, engine, peer)
    if why == "too large":
        monkeypatch.setattr(sessions, "MAX_PART_BYTES", 100)
        await say(client, *range(1, 200))
    else:
        await say(client, 1, 2, 3, mm_features=[ELSEWHERE])
    (last,) = (await next_outputs(client)).outputs
    assert last.finish_reason == FinishReason.ERROR
    assert await peer.answer() == wire.Dismissal([("s", FIRST_HOP)])


async def test_unsent_part_leaves_nothing(client: Any, peer: FakePeer) -> None:
    client.resources.engine_dead = True
    with pytest.raises(Exception, match="EngineCore"):
        await say(client, 1)
    client.resources.engine_dead = False
    assert await peer.heartbeat("s") == ["s"]
    assert not client.sessions.has_part(request("s"))


async def test_its_data_parallel_rank_is_kept(
    dp_client: Any, rank_engines: list[FakeEngine], context: zmq.asyncio.Context
) -> None:
    """vLLM sends parts to the rank for which the request is counted, and the end of an answer is not that of the
    request: also if the answer comes from elsewhere."""
    await say(dp_client, 1, data_parallel_rank=1)
    await rank_engines[1].added()
    peer = FakePeer(context, dp_client.relay_address)
    await peer.hello()
    await peer.tokens(relayed("s", 0, 10, finish=END))
    assert await tokens_of(dp_client, 1) == [10]
    assert list(dp_client.reqs_in_flight) == ["s"]
    await end(dp_client)
    assert await peer.answer() == wire.Dismissal([("s", FIRST_HOP)])
    peer.close()
