# SPDX-License-Identifier: Apache-2.0
"""Requests of engines that speculate with a draft model, with a head (EAGLE), or with the suffixes of former answers,
move as if unmoved. What models and heads keep of a request lies in the blocks of its KV cache and moves along.

The draft model is the model itself, so that nearly all drafts are accepted; those of heads are rejected. One head is of
a model with states (MTP): of these what moves is the one behind the last accepted draft.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.runner_v2.test_speculation_and_lora import RUNNERS, accepted
from tests.runner_v2.test_states_beside_drafts import FEW
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.draft_heads import build_head, build_with_mtp
from tests.support.harness import Fleet, Runner, Server, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.moves import Move, migrate
from tests.support.other_models import OTHER

MODEL = PRESETS["tiny"]
NUM_DRAFTS = 3
PROMPT = list(range(100, 130)) * 4
AT = (10, 22, 34, 46)
"""Tokens that have arrived before each move."""
SCHEDULERS = {"v1": "Scheduler", "v2": "AsyncScheduler"}


class Pair(NamedTuple):
    a: Server
    b: Server
    method: str
    """vLLM's."""
    length: int


@pytest.fixture(
    scope="module",
    params=[
        # Method, runner, and tokens of an answer: it must last until its last move.
        pytest.param(("draft_model", "v2", 240), id="model-v2", marks=pytest.mark.full),
        pytest.param(("eagle", "v2", 90), id="head-v2"),
        pytest.param(("draft_model", "v1", 800), id="model-v1", marks=pytest.mark.full),
        pytest.param(("eagle", "v1", 800), id="head-v1", marks=pytest.mark.full),
        pytest.param(("mtp", "v2", 90), id="states-v2", marks=pytest.mark.full),
        # Has accepted drafts where the same was answered before. vLLM's V2 runner does not know it.
        pytest.param(("suffix", "v1", 800), id="suffix-v1", marks=pytest.mark.full),
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    method, which, length = request.param
    if method == "suffix":
        pytest.importorskip("arctic_inference", reason="pip install arctic-inference, which is built from its source")
    runner: Runner = "v2" if which == "v2" else ""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "mtp":
        model, flags = build_with_mtp(), OTHER["qwen3-next"].flags
    else:
        model, flags = build(MODEL), ("--dtype", "float32")
        if method != "suffix":
            speculation["model"] = str(build_head(MODEL) if method == "eagle" else model)
    flags += ("--speculative-config", json.dumps(speculation))
    with Fleet(tmp_path_factory.mktemp("drafts")) as fleet:
        specs = [
            ServerSpec(model, name=name, instance_id=name, runner=runner, max_model_len=1024, flags=flags)
            for name in "ab"
        ]
        servers = fleet.start(*specs)
        for server in servers:
            assert f"this engine has {RUNNERS[which]} behind {SCHEDULERS[which]}" in server.log_text()
        yield Pair(*servers, method, length)


async def begin(client: Client, pair: Pair) -> Stream:
    chosen = FEW if pair.method == "mtp" else {"ignore_eos": True, "logprobs": 4}
    return await client.complete(PROMPT, pair.length, cache_salt=uuid.uuid4().hex, **chosen)


async def drafted(server: Server) -> float:
    """Draft tokens that `server` has proposed so far."""
    async with Client(server.base_url) as client:
        counts = re.findall(r"^vllm:spec_decode_num_draft_tokens_total.* (\S+)$", await client.metrics(), re.M)
    return sum(map(float, counts))


@pytest.mark.asyncio
async def test_there_and_back(pair: Pair) -> None:
    """Again and again."""
    servers = pair.a, pair.b
    counted = accepted if pair.method in ("draft_model", "suffix") else drafted
    before = [await counted(server) for server in servers]
    async with Client(pair.a.base_url) as client, Client(pair.b.base_url) as other:
        unmoved, again = [await (await begin(at, pair)).result() for at in (client, other)]
        assert outcome(unmoved) == outcome(again), "void: two unmoved runs differ"
        stream = await begin(client, pair)
        moves: list[Move] = []
        for number, count in enumerate(AT):
            source, destination = servers[number % 2], servers[1 - number % 2]
            held = await held_by(source, stream, count)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        moved = await stream.result()
    assert [(it.phase, it.mode, it.recomputed_tokens) for it in moves] == [("moved", "live", 0)] * len(AT), moves
    assert outcome(moved) == outcome(unmoved)
    after = [await counted(server) for server in servers]
    assert all(late > early for early, late in zip(before, after, strict=True)), counted.__doc__
    for server in servers:
        await wait_idle(server)
