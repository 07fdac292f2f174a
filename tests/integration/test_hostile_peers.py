# SPDX-License-Identifier: Apache-2.0
"""A real engine against peers and origins that lie: a refusal with a reason, and the engine goes on as before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError
from llumlet.contract.server import serve
from llumlet.contract.types import (
    AbortMigrateInRequest,
    AdoptRequest,
    CachedPrefixRequest,
    ClaimRequest,
    CommitRequest,
    CopyRoundRequest,
    EndClaimRequest,
    Epoch,
    Handover,
    MigrateInRequest,
    MigrateRequest,
    Reason,
    ReserveRequest,
    SettleRequest,
)
from llumlet.contract.validation import MAX_BLOCK_ID
from tests.fuzz.hostile import filled, worsened
from tests.integration.conftest import Engines
from tests.llumlet.fake_agent import FakeAgent
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.harness import Server
from vllm_llumnix.wire.request_wire import RequestState, decode_state, encode

pytestmark = pytest.mark.asyncio

GREEDY: dict[str, Any] = {"ignore_eos": True}
ORIGIN = "tcp://127.0.0.1:9"
REFUSED = {
    Reason.INVALID_REQUEST,
    Reason.ADDRESS_REFUSED,
    Reason.NOT_PORTABLE,
    Reason.INCOMPATIBLE_ENGINE,
    Reason.LORA_NOT_AVAILABLE,
    Reason.REQUEST_TOO_LONG,
}
"""Answers that mean: your message is at fault."""


@pytest_asyncio.fixture
async def offer(engines: Engines, conserved: object) -> AsyncIterator[ReserveRequest]:
    """A Reserve as engine A sends it, of a request that runs there; caught by a llumlet without an engine."""
    assert engines.a.llumlet is not None
    agent = FakeAgent("spy")
    agent.failures["reserve"] = LlumletError(Reason.DESTINATION_FULL, "thank you")
    spy = await serve(agent)
    async with Client(engines.a.base_url) as client, LlumletClient(str(engines.a.llumlet)) as llumlet:
        stream = await client.complete(list(range(100, 200)), 8000, **GREEDY)
        await stream.wait_for(5)
        (request,) = (await llumlet.list_requests()).requests
        ask = MigrateRequest(
            src_engine_id=engines.a.llumlet.instance_id,
            dst_engine_id="spy",
            dst_engine_ip="127.0.0.1",
            dst_engine_port=spy.port,
            request_ids=[request.request_id],
        )
        async for _ in llumlet.migrate(ask):
            pass
        (caught,) = agent.asked("reserve")
        caught.dst_engine_id = "b"
        caught.handover.request_id = "stolen"
        caught.request_state = encode(msgspec.structs.replace(decode_state(caught.request_state), request_id="stolen"))
        yield caught
        await stream.disconnect()
    await spy.stop(0)


@pytest_asyncio.fixture
async def b(engines: Engines) -> AsyncIterator[LlumletClient]:
    """Engine B; what the test has reserved there is given back."""
    async with LlumletClient(str(engines.b.llumlet)) as client:
        yield client
        listed = (await client.list_requests()).requests
        ids = [request.request_id for request in listed if request.request_id]
        if ids:
            await client.abort_migrate_in(AbortMigrateInRequest(request_ids=ids))


def named(offer: ReserveRequest, name: str) -> ReserveRequest:
    """The same under a migration id of its own."""
    mine = ReserveRequest()
    mine.CopyFrom(offer)
    mine.handover.migration_id = name
    return mine


async def generates(server: Server) -> None:
    """The engine lives, and computes what it always does."""
    answer = await asyncio.to_thread(server.generate, list(range(100, 130)), 8, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 8


async def refusal(call: Any) -> LlumletError:
    with pytest.raises(LlumletCallFailed) as failed:
        await call
    assert isinstance(failed.value, LlumletError), failed.value
    return failed.value


def state_of(params: dict[str, Any] | None = None, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": f"hostile-{time.monotonic_ns()}",
        "external_request_id": "hostile",
        "origin": ORIGIN,
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [4],
        "sampling_params": msgspec.Raw(
            msgspec.msgpack.encode(msgspec.to_builtins(SamplingParams(max_tokens=3)) | (params or {}))
        ),
        "arrival_time": time.time(),
    }
    return encode(RequestState(**(fields | changes)))


HOSTILE_PARAMS: list[dict[str, Any]] = [
    {"logit_bias": {10**6: 5.0}},
    {"logit_bias": {-1: 5.0}},
    {"stop_token_ids": [10**9]},
    {"_all_stop_token_ids": [10**6], "min_tokens": 2},
    {"_bad_words_token_ids": [[10**6]]},
    {"_bad_words_token_ids": [[1, -5]]},
    {"allowed_token_ids": [10**6]},
    {"allowed_token_ids": []},
    {"logprobs": 10**6},
    {"logprob_token_ids": [10**6]},
    {"prompt_logprobs": 5},
    {"seed": 2**63},
    {"n": 0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 7.0},
    {"top_k": -7},
    {"repetition_penalty": 0.0},
    {"max_tokens": 0},
    {"max_tokens": 10**9},
    {"max_tokens": None},
    {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
    {"extra_args": {"x": [b"bytes"]}},
    {"extra_args": {"x": msgspec.msgpack.Ext(4, b"an extension")}},
    {"trace_decode_token_ids": [5, 6]},
    {"trace_decode_token_ids": [10**6]},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "nonsense ::="}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": "[" * 5000}},
    {"stop": 5},
    {"unknown": {}, "n": "1"},
]
HOSTILE_STATES: list[dict[str, Any]] = [
    {"prompt_token_ids": []},
    {"prompt_token_ids": [10**6]},
    {"prompt_token_ids": [-1]},
    {"prompt_token_ids": [1] * 10**6},
    {"output_token_ids": [2**62]},
    {"output_token_ids": [4] * 3},
    {"request_id": ""},
    {"lora_name": "../../adapter"},
    {"structured_backend": "outlines", "params": {"structured_outputs": {"regex": "a+"}}},
    {"origin": ""},
    {"origin": "tcp://10.0.0.1:4000"},
    {"origin": "ipc:///tmp/x"},
    {"origin": "tcp://127.0.0.1;127.0.0.1:4000"},
    {"origin": "tcp://localhost:4000"},
]


async def test_adopt_is_a_front_door(engines: Engines, conserved: object, b: LlumletClient) -> None:
    digest = (await b.get_instance_metadata()).compatibility_digest
    states = [state_of(params) for params in HOSTILE_PARAMS] + [state_of(**changes) for changes in HOSTILE_STATES]
    states += [b"", b"\x00", b"\xff" * 100, b"\x91" * 10**5, state_of()[:-1], state_of() + b"x"]
    for index, state in enumerate(states):
        ask = AdoptRequest(epoch=Epoch(term=1), compatibility_digest=digest, request_state=state)
        refused = await refusal(b.adopt(ask))
        assert refused.reason in REFUSED, f"{index}: {refused}"
    await generates(engines.b)


async def test_reserve_is_a_front_door(engines: Engines, offer: ReserveRequest, b: LlumletClient) -> None:
    state = decode_state(offer.request_state)
    replace = msgspec.structs.replace
    for name, changed in {
        "vocabulary": replace(state, prompt_token_ids=[10**6]),
        "length": replace(state, prompt_token_ids=[1] * 10**5),
        "another request": replace(state, request_id="other"),
        "origin": replace(state, origin="tcp://192.0.2.1:1"),
        "adapter": replace(state, lora_name="x"),
    }.items():
        ask = named(offer, name)
        ask.request_state = encode(changed)
        assert (await refusal(b.reserve(ask))).reason in REFUSED, name
    memory = msgspec.msgpack.decode(offer.source_memory)
    (rank,) = memory["ranks"]
    layout = rank["layout"]
    for name, change, reason in [
        # Memory that is read must be what was advertised; a worker that sends it need only be the one that was.
        ("pid", {"pid": 1, "tcp": None}, Reason.TRANSPORT_UNAVAILABLE),
        ("address", {"nonce_address": 4096, "tcp": None}, Reason.TRANSPORT_UNAVAILABLE),
        ("layout", {"layout": layout | {"base": layout["base"] - 4096}, "tcp": None}, Reason.TRANSPORT_UNAVAILABLE),
        ("nonce", {"nonce": bytes(32)}, Reason.TRANSPORT_UNAVAILABLE),
        ("nobody there", {"pid": 1, "tcp": "127.0.0.1:1"}, Reason.TRANSPORT_UNAVAILABLE),
        ("elsewhere", {"tcp": "192.0.2.1:4000"}, Reason.ADDRESS_REFUSED),
        ("no address", {"tcp": "localhost"}, Reason.ADDRESS_REFUSED),
        ("segment elsewhere", {"mooncake": "192.0.2.1:4000"}, Reason.ADDRESS_REFUSED),
        ("an agent's name", {"nixl": {"agent": "x"}}, Reason.INVALID_REQUEST),
    ]:
        ask = named(offer, name)
        ask.tokens_will_do = False
        ask.source_memory = msgspec.msgpack.encode(memory | {"ranks": [rank | change]})
        assert (await refusal(b.reserve(ask))).reason == reason, name
    await generates(engines.b)


ROUNDS: list[dict[str, Any]] = [
    {"new_token_ids": [10**6]},
    {"new_token_ids": [1] * 9000},
    {"block_ids": [2**31 - 1] * 3},
    {"block_ids": [2**32 - 1] * 3},
    {"num_tokens": 2**32 - 1},
    {"round": 7},
    {"from_block": 1, "to_block": 4},
    {"from_block": 0, "to_block": 2**32 - 1, "block_ids": []},
]
COMMITS: list[dict[str, Any]] = [
    {"new_token_ids": [10**6]},
    {"base": 2**32 - 1},
    {"base": 0},
    {"computed_tokens": 2**32 - 1},
    {"computed_tokens": 0},
    {"from_block": 2**32 - 1},
    {"block_ids": [2**31 - 1] * 4},
    {"block_ids": []},
]


@pytest.mark.parametrize("kind", ["round", "commit"])
async def test_lies_after_a_reservation(engines: Engines, offer: ReserveRequest, b: LlumletClient, kind: str) -> None:
    """Each ends the hand-over, and the reservation with it; none begins the request."""
    state = decode_state(offer.request_state)
    num_tokens = len(state.prompt_token_ids) + len(state.output_token_ids)
    for index, change in enumerate(ROUNDS if kind == "round" else COMMITS):
        ask = named(offer, f"{kind} {index}")
        reserved = await b.reserve(ask)
        handover = Handover()
        handover.CopyFrom(ask.handover)
        handover.dst_incarnation = reserved.dst_incarnation
        fields: dict[str, Any] = {"handover": handover, "from_block": 0, "block_ids": [1, 2, 3]}
        if kind == "round":
            fields |= {"round": 1, "to_block": 3, "num_tokens": num_tokens}
            refused = await refusal(b.copy_round(CopyRoundRequest(**(fields | change))))
            assert refused.reason != Reason.INTERNAL, f"{change}: {refused}"
        else:
            fields |= {"epoch": Epoch(hop=1), "base": len(state.output_token_ids), "computed_tokens": num_tokens - 1}
            fields["block_ids"] = [1, 2, 3, 4]
            commit = CommitRequest(**(fields | change))
            if max(commit.block_ids, default=0) > MAX_BLOCK_ID:
                assert (await refusal(b.commit(commit))).reason == Reason.INVALID_REQUEST
            else:
                answer = await b.commit(commit)
                assert answer.state == Handover.BARRED, f"{change}: {answer}"
        await b.cancel(SettleRequest(handover=handover))
    await wait_idle(engines.b)
    await generates(engines.b)


async def test_no_engine_connects_where_it_is_told(engines: Engines, conserved: object, b: LlumletClient) -> None:
    ask = MigrateRequest(src_engine_id="b", dst_engine_id="x", dst_engine_ip="192.0.2.1", dst_engine_port=1)
    ask.request_ids.append("r")
    for host in ("192.0.2.1", "metadata.internal", "unix", "0.0.0.0"):
        ask.dst_engine_ip = host
        with pytest.raises(LlumletError) as refused:
            _ = [event async for event in b.migrate(ask)]
        assert refused.value.reason == Reason.ADDRESS_REFUSED
    request = MigrateRequest(src_engine_id="x", request_ids=["r"])
    with pytest.raises(LlumletError) as refused:
        _ = [event async for event in b.migrate_in(MigrateInRequest(src_address="192.0.2.1:1", request=request))]
    assert refused.value.reason == Reason.ADDRESS_REFUSED


METHODS = {
    "reserve": ReserveRequest,
    "copy_round": CopyRoundRequest,
    "commit": CommitRequest,
    "withdraw": SettleRequest,
    "cancel": SettleRequest,
    "abort_handover": SettleRequest,
    "close_handover": SettleRequest,
    "query": SettleRequest,
    "adopt": AdoptRequest,
    "cached_prefix": CachedPrefixRequest,
    "claim": ClaimRequest,
    "end_claim": EndClaimRequest,
}


@pytest.mark.rest
async def test_random_peers(engines: Engines, offer: ReserveRequest, b: LlumletClient) -> None:
    """Well-formed nonsense, and the true offer with some fields changed: never an internal error."""
    loop = asyncio.get_running_loop()

    async def send(method: str, message: Message) -> None:
        try:
            await getattr(b, method)(message)
        except LlumletError as error:
            if error.reason == Reason.INTERNAL:
                raise

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted(METHODS)).flatmap(
            lambda method: st.tuples(
                st.just(method),
                st.one_of(filled(METHODS[method]), worsened(offer)) if method == "reserve" else filled(METHODS[method]),
            )
        )
    )
    def attack(case: tuple[str, Message]) -> None:
        asyncio.run_coroutine_threadsafe(send(*case), loop).result(30)

    await asyncio.to_thread(attack)
    await generates(engines.b)
