# SPDX-License-Identifier: Apache-2.0
"""Watermarked requests, replayed traces and sampling masks, which only the V2 runner knows, move as if unmoved."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.moves import migrate, requests

pytestmark = pytest.mark.rest

WATERMARK = {"key": 7, "context_width": 2}
FLAGS = ("--dtype", "float32", "--enable-trace-replay", "--enable-scale-out", "--return-sampling-mask",
         "--logprobs-mode", "processed_logprobs")  # fmt: skip
PROMPT = list(range(100, 160))
LENGTH = 56
TOP_K = 20
DRAWN: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "top_k": TOP_K, "seed": 7, "logprobs": 2}


class Pair(NamedTuple):
    a: Server
    b: Server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = build(PRESETS["tiny"])
    flags = (*FLAGS, "--watermark-config", json.dumps(WATERMARK))
    warm_up = {"temperature": 1.0, "top_k": TOP_K}
    with Fleet(tmp_path_factory.mktemp("marks")) as fleet:
        specs = [ServerSpec(model, name=n, instance_id=n, runner="v2", flags=flags, warm_up=warm_up) for n in "ab"]
        yield Pair(*fleet.start(*specs))


async def answer(pair: Pair, *hops: int, **parameters: Any) -> Stream:
    """To a request that leaves the engine that has it when it has so many output tokens."""
    here, there = pair
    async with Client(pair.a.base_url) as client:
        stream = await client.complete(PROMPT, LENGTH, cache_salt=uuid.uuid4().hex, **DRAWN, **parameters)
        for hop in hops:
            held = await held_by(here, stream, hop)
            (move,) = await migrate(here, there, request_ids=[held.request_id])
            assert move.live, move
            here, there = there, here
        result = await stream.result()
    for server in pair:
        await wait_idle(server)
    return result


@pytest.mark.full
@pytest.mark.asyncio
async def test_a_watermark(pair: Pair) -> None:
    unmoved = await answer(pair)
    moved = await answer(pair, 10, 25)
    assert outcome(moved) == outcome(unmoved)
    plain = await answer(pair, watermarking=False)
    assert plain.token_ids != unmoved.token_ids, "nothing was marked"


@pytest.mark.asyncio
async def test_a_trace(pair: Pair) -> None:
    """Each token is the trace's; what the model thought of it shows that it has seen those before."""
    trace = random.Random(0).choices(range(100, 1000), k=LENGTH)
    unmoved = await generated(pair, trace_decode_token_ids=trace)
    assert unmoved["token_ids"] == trace
    assert await generated(pair, moves=True, trace_decode_token_ids=trace) == unmoved


@pytest.mark.asyncio
async def test_sampling_masks(pair: Pair) -> None:
    """What each token was drawn from, whichever engine has drawn it: the best twenty, and those as good as these."""
    unmoved = await generated(pair, seed=7, ignore_eos=True)
    assert len(unmoved["sampling_mask"]) == LENGTH
    for token, mask in zip(unmoved["token_ids"], unmoved["sampling_mask"], strict=True):
        assert token in mask
        assert len(mask) >= TOP_K
    assert await generated(pair, moves=True, seed=7, ignore_eos=True) == unmoved


async def generated(pair: Pair, *, moves: bool = False, **sampling: Any) -> dict[str, Any]:
    """The one answer to a request, which leaves the first engine in the middle if it `moves`."""
    sampling = {"temperature": 1.0, "top_k": TOP_K, "max_tokens": LENGTH, "logprobs": 2, **sampling}
    body = {"request_id": uuid.uuid4().hex, "token_ids": PROMPT, "sampling_params": sampling, "stream": False}
    async with aiohttp.ClientSession() as session:
        sent = asyncio.create_task(session.post(f"{pair.a.base_url}/inference/v1/generate", json=body))
        if moves:
            (move,) = await migrate(pair.a, pair.b, request_ids=[await one_with(pair.a, 10)])
            assert move.live, move
        async with await sent as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
    for server in pair:
        await wait_idle(server)
    return dict(choice)


async def one_with(server: Server, num_tokens: int, timeout_s: float = 60.0) -> str:
    """The id of the request there, once it has so many output tokens."""
    deadline = time.monotonic() + timeout_s
    while True:
        for info in await requests(server):
            if info.output_tokens >= num_tokens:
                return info.request_id
        assert time.monotonic() < deadline, await requests(server)
        await asyncio.sleep(0.02)
