# SPDX-License-Identifier: Apache-2.0
"""Requests of engines that speculate with n-grams move as if unmoved, with drafts accepted before and after each move.

On vLLM's V1 runner and on the V2 runner; the latter's engines serve a LoRA adapter, too, for a request that takes it
along. In float32, in which it is the same whether a token was computed as a draft or by itself. With this method vLLM
schedules synchronously on both.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.support.adapters import RANK, write_adapter
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Runner, Server, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.moves import migrate

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
ADAPTER = "story"
LENGTHS = {"": 400, "v2": 100}
"""By the runner: a request of the fast one must last until it is moved."""
# What the model would say by itself does not repeat: a grammar makes it.
REPEATING: dict[str, Any] = {"structured_outputs": {"regex": "(abcd efgh ){200}"}, "logprobs": 2}
FREE: dict[str, Any] = {"ignore_eos": True, "frequency_penalty": 0.3}
PROMPT = list(range(100, 130)) * 4
RUNNERS = {
    "v1": "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "v2": "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
}


class Pair(NamedTuple):
    a: Server
    b: Server


@pytest.fixture(scope="module", params=[pytest.param("v1", marks=pytest.mark.full), "v2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    runner: Runner = ""
    flags = ("--dtype", "float32", "--speculative-config", json.dumps(SPECULATION))
    if request.param == "v2":
        runner, story = "v2", tmp_path_factory.mktemp("adapters") / ADAPTER
        write_adapter(story, PRESETS["tiny"], 0)
        flags += ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={story}")
    model = build(PRESETS["tiny"])
    with Fleet(tmp_path_factory.mktemp("speculation")) as fleet:
        specs = [ServerSpec(model, name=n, instance_id=n, runner=runner, flags=flags) for n in Pair._fields]
        servers = Pair(*fleet.start(*specs))
        for server in servers:
            assert f"this engine has {RUNNERS[request.param]} behind Scheduler" in server.log_text()
        yield servers


async def accepted(server: Server) -> float:
    """Draft tokens that `server` has accepted so far."""
    async with Client(server.base_url) as client:
        counts = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total.* (\S+)$", await client.metrics(), re.M)
    return sum(map(float, counts))


async def begin(client: Client, runner: Runner, parameters: dict[str, Any]) -> Stream:
    return await client.complete(PROMPT, LENGTHS[runner], cache_salt=uuid.uuid4().hex, **parameters)


async def there_and_back(pair: Pair, parameters: dict[str, Any]) -> Stream:
    """The answer, which is that of the unmoved run."""
    a, b = pair
    async with Client(a.base_url) as client:
        expected = await (await begin(client, a.spec.runner, parameters)).result()
        stream = await begin(client, a.spec.runner, parameters)
        moves = []
        for source, destination, num_tokens in ((a, b, 14), (b, a, 34)):
            held = await held_by(source, stream, num_tokens)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        result = await stream.result()
    assert [move.live for move in moves] == [True, True], moves
    # Without where one event ends and the next begins: that depends on how many drafts a step accepts.
    assert outcome(result) == outcome(expected)
    for server in pair:
        await wait_idle(server)
    return result


@pytest.mark.asyncio
@pytest.mark.rest
async def test_with_accepted_drafts(pair: Pair) -> None:
    before = [await accepted(server) for server in pair]
    await there_and_back(pair, REPEATING)
    after = [await accepted(server) for server in pair]
    assert all(late > early for early, late in zip(before, after, strict=True)), "no draft was accepted"


@pytest.mark.asyncio
@pytest.mark.rest
async def test_with_rejected_drafts(pair: Pair) -> None:
    await there_and_back(pair, FREE)


@pytest.mark.asyncio
@pytest.mark.parametrize("pair", ["v2"], indirect=True)
@pytest.mark.rest
async def test_seeded_with_an_adapter(pair: Pair) -> None:
    """Which the V1 runner cannot: the draws of its sampler do not follow from the position."""
    parameters = FREE | {"temperature": 1.0, "seed": 7, "logprobs": 2}
    with_adapter = await there_and_back(pair, parameters | {"model": ADAPTER})
    without = await there_and_back(pair, parameters)
    assert with_adapter.token_ids[:20] != without.token_ids[:20], "the adapter changes nothing"
