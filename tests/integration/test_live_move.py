# SPDX-License-Identifier: Apache-2.0
"""A running request is moved between real engines and its client sees the very same tokens.

What "the same" is compared with: an unmoved run in the same company. vLLM's kernels give other last bits for another
number of rows, so a request whose neighbours come and go may continue differently without any move. Here every batch
holds the same number of requests from the first token to the last, and a salt keeps each run from using blocks that
another one computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.conftest import Engines
from tests.support.client import Client, Stream
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import Move, move_stream

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
LENGTH = 320
GREEDY: dict[str, Any] = {"ignore_eos": True}
SEEDED: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "top_p": 0.95, "top_k": 200, "seed": 7}
PENALISED: dict[str, Any] = SEEDED | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
ROUTES = {"there": "ab", "there_and_back": "aba", "three_hops": "abca"}
COVER = {*zip(KINDS, ROUTES, strict=True)}
"""Each of both once; the others are in the large suite."""


class Three(NamedTuple):
    """`c` takes many steps for a long prompt."""

    a: Server
    b: Server
    c: Server


@pytest.fixture(scope="module")
def engines(engines: Engines, model_dir: Path, log_dir: Path) -> Iterator[Three]:
    spec = ServerSpec(model_dir, name="c", instance_id="c", flags=("--max-num-batched-tokens", "256"))
    with Fleet(log_dir / "third") as fleet:
        yield Three(*engines, *fleet.start(spec))


async def start(client: Client, parameters: dict[str, Any], prompt: list[int] = PROMPT, length: int = LENGTH) -> Stream:
    """A stream that shares no cached block with any other."""
    return await client.complete(prompt, length, cache_salt=uuid.uuid4().hex, **parameters)


async def run_moved(engines: Three, route: str, parameters: dict[str, Any]) -> tuple[Stream, list[Move]]:
    """Stream from the first engine of `route`, moving to each next one as tokens come."""
    path = [getattr(engines, name) for name in route]
    async with Client(path[0].base_url) as client:
        stream = await start(client, parameters)
        moves = []
        for source, destination in itertools.pairwise(path):
            await stream.wait_for(len(stream.token_ids) + 20)
            moves.append(await move_stream(source, destination, stream))
        return await stream.result(), moves


async def run_unmoved(server: Server, parameters: dict[str, Any]) -> Stream:
    async with Client(server.base_url) as client:
        return await (await start(client, parameters)).result()


@contextlib.asynccontextmanager
async def company(*servers: Server) -> AsyncIterator[None]:
    """One other request in the batch of each server, from before until after."""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for server in servers:
            client = await stack.enter_async_context(Client(server.base_url))
            streams.append(await start(client, GREEDY, prompt=list(range(300, 340)), length=8100))
        for stream in streams:
            await stream.wait_for(1)
        yield
        for stream in streams:
            assert not stream.done, "the neighbour ended before the test"
            await stream.disconnect()


def assert_live(moves: list[Move]) -> None:
    for move in moves:
        assert move.live, f"{move.phase} {move.reason} {move.detail}"
        assert move.recomputed_tokens <= 1


@pytest.mark.parametrize(
    ("parameters", "route"),
    [
        pytest.param(
            KINDS[kind], ROUTES[route], id=f"{kind}-{route}", marks=() if (kind, route) in COVER else pytest.mark.full
        )
        for kind, route in itertools.product(KINDS, ROUTES)
    ],
)
async def test_tokens_are_identical(engines: Three, conserved: object, route: str, parameters: dict[str, Any]) -> None:
    async with company(*(getattr(engines, name) for name in sorted(set(route)))):
        expected = await run_unmoved(engines.a, parameters)
        moved, moves = await run_moved(engines, route, parameters)
    assert_live(moves)
    assert moved.token_ids == expected.token_ids
    assert moved.text == expected.text
    assert moved.finish_reason == expected.finish_reason == "length"
    assert moved.usage == expected.usage
    assert [move.epoch for move in moves] == [(0, hop + 1) for hop in range(len(moves))]
    assert len(set(moved.token_ids)) > 80, "the model repeats itself: equality would prove little"
    if route == "aba":
        assert moves[1].hit_tokens > 0, "back home, its own blocks are still cached"


async def test_two_requests_cross(engines: Three, conserved: object) -> None:
    """One goes from A to B while another goes from B to A."""
    expected = await asyncio.gather(run_unmoved(engines.a, GREEDY), run_unmoved(engines.b, SEEDED))
    async with Client(engines.a.base_url) as client_a, Client(engines.b.base_url) as client_b:
        one, other = await asyncio.gather(start(client_a, GREEDY), start(client_b, SEEDED))
        await asyncio.gather(one.wait_for(20), other.wait_for(20))
        moves = await asyncio.gather(move_stream(engines.a, engines.b, one), move_stream(engines.b, engines.a, other))
        results = await asyncio.gather(one.result(), other.result())
    assert_live(list(moves))
    assert [len(result.token_ids) for result in results] == [LENGTH, LENGTH]
    # The batches hold one request or two, depending on who arrives first: compare what came before the moves.
    for result, alone, move in zip(results, expected, moves, strict=True):
        known = move.context_tokens - len(PROMPT)
        assert result.token_ids[:known] == alone.token_ids[:known]


async def test_stop_string_found_after_a_move(engines: Three, conserved: object) -> None:
    """The API server finds the stop string; the engine that owns the request is told to stop."""
    free = await run_unmoved(engines.a, GREEDY)
    half = len(free.text) // 2
    stop = next(word for word in free.text[half:].split()[1:] if free.text.index(word) > half)
    parameters = GREEDY | {"stop": [stop]}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "ab", parameters)
    assert_live(moves)
    assert moved.text == expected.text
    assert moved.finish_reason == expected.finish_reason == "stop"
    assert moved.stop_reason == stop


def flat(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """One tuple a token: how many tokens come in one event is chance."""
    fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [row for event in events for row in zip(*(event[field] for field in fields), strict=True)]


async def test_logprobs_are_identical(engines: Three, conserved: object) -> None:
    parameters = GREEDY | {"logprobs": 3}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "aba", parameters)
    assert_live(moves)
    assert moved.token_ids == expected.token_ids
    assert flat(moved.logprobs) == flat(expected.logprobs)


async def test_guided_decoding_goes_on_in_the_middle_of_the_pattern(engines: Three, conserved: object) -> None:
    pattern = "([a-z]{3,9} ){150,160}end"
    parameters = {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": pattern}}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "ab", parameters)
    assert_live(moves)
    assert moved.text == expected.text
    assert moved.token_ids == expected.token_ids


async def test_long_context_is_copied_in_rounds(engines: Three, conserved: object) -> None:
    prompt = [100 + index * 7 % 900 for index in range(3000)]
    async with Client(engines.a.base_url) as client:
        expected = await (await start(client, GREEDY, prompt, 400)).result()
        stream = await start(client, GREEDY, prompt, 400)
        await stream.wait_for(10)
        move = await move_stream(engines.a, engines.c, stream)
        moved = await stream.result()
    assert_live([move])
    assert move.hit_tokens == 0
    assert move.rounds >= 1
    assert moved.token_ids == expected.token_ids


async def test_arrives_while_a_long_prompt_is_processed(engines: Three, conserved: object) -> None:
    """A chunked prefill takes the whole token budget of each step; the newcomer gets its token all the same."""
    async with Client(engines.a.base_url) as client, Client(engines.c.base_url) as other:
        stream = await start(client, GREEDY, length=3000)
        await stream.wait_for(40)
        prefill = await start(other, GREEDY, [100 + index * 11 % 900 for index in range(8000)], 4)
        move = await move_stream(engines.a, engines.c, stream)
        arrived = move.context_tokens - len(PROMPT)
        await stream.wait_for(arrived + 5)
        assert not prefill.token_ids, "the newcomer waited for the prefill"
        await stream.disconnect()
        await prefill.disconnect()
    assert_live([move])


async def test_metrics_of_the_front_end_stay_right(engines: Three, conserved: object) -> None:
    """Tokens, time to first token and inter-token gaps are counted once, at the origin."""
    before = await _counters(engines.a)
    moved, moves = await run_moved(engines, "ab", GREEDY)
    assert_live(moves)
    after = await _counters(engines.a)
    counted = {name: after[name] - before[name] for name in after}
    assert counted["vllm:generation_tokens_total"] == len(moved.token_ids)
    assert counted["vllm:time_to_first_token_seconds_count"] == 1
    assert counted["vllm:inter_token_latency_seconds_count"] == len(moved.token_ids) - 1
    assert counted["vllm:request_success_total"] == 1
    assert 0 < counted["vllm:inter_token_latency_seconds_sum"] < 120


async def _counters(server: Server) -> dict[str, float]:
    import aiohttp
    from prometheus_client.parser import text_string_to_metric_families

    names = {
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:request_success_total",
    }
    async with aiohttp.ClientSession() as session, session.get(f"{server.base_url}/metrics") as response:
        text = await response.text()
    values = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in values:
                values[sample.name] += sample.value
    return values
