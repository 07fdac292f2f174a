# SPDX-License-Identifier: Apache-2.0
"""A running request is moved between real engines and its client sees the very same tokens."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from benchmarks.client import Client, Stream
from benchmarks.harness import Server
from benchmarks.moves import Move, move_stream
from tests.integration.conftest import Engines

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
LENGTH = 500
GREEDY: dict[str, Any] = {"ignore_eos": True}
SEEDED: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "top_p": 0.95, "top_k": 200, "seed": 7}
PENALISED: dict[str, Any] = SEEDED | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}
ROUTES = {"there": "ab", "there_and_back": "aba", "three_hops": "abca"}


async def run_moved(engines: Engines, route: str, parameters: dict[str, Any]) -> tuple[Stream, list[Move]]:
    """Stream from the first engine of `route`, moving to each next one as tokens come."""
    path = [getattr(engines, name) for name in route]
    async with Client(path[0].base_url) as client:
        stream = await client.complete(PROMPT, LENGTH, **parameters)
        moves = []
        for hop, (source, destination) in enumerate(itertools.pairwise(path)):
            await stream.wait_for(30 + 90 * hop)
            moves.append(await move_stream(source, destination, stream))
        return await stream.result(), moves


async def run_unmoved(server: Server, parameters: dict[str, Any]) -> Stream:
    async with Client(server.base_url) as client:
        return await (await client.complete(PROMPT, LENGTH, **parameters)).result()


async def neighbour(server: Server) -> Stream:
    """Another request in the batch of `server`."""
    async with Client(server.base_url) as client:
        return await (await client.complete(list(range(300, 340)), LENGTH, **GREEDY)).result()


def assert_live(moves: list[Move]) -> None:
    for move in moves:
        assert move.live, f"{move.phase} {move.reason} {move.detail}"
        assert move.recomputed_tokens <= 1


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("parameters", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
async def test_tokens_are_identical(
    engines: Engines, conserved: object, route: str, parameters: dict[str, Any]
) -> None:
    expected = await run_unmoved(engines.a, parameters)
    neighbours = [asyncio.create_task(neighbour(getattr(engines, name))) for name in sorted(set(route))]
    moved, moves = await run_moved(engines, route, parameters)
    await asyncio.gather(*neighbours)

    assert_live(moves)
    assert moved.token_ids == expected.token_ids
    assert moved.text == expected.text
    assert moved.finish_reason == expected.finish_reason == "length"
    assert moved.usage == expected.usage
    assert [move.epoch for move in moves] == [(0, hop + 1) for hop in range(len(moves))]


async def test_neighbours_are_not_disturbed(engines: Engines, conserved: object) -> None:
    """The other requests in both batches produce what they produce alone."""
    alone = await neighbour(engines.a)
    beside = [asyncio.create_task(neighbour(engines.a)), asyncio.create_task(neighbour(engines.b))]
    _, moves = await run_moved(engines, "abab", GREEDY)
    assert_live(moves)
    for stream in await asyncio.gather(*beside):
        assert stream.token_ids == alone.token_ids


async def test_stop_string_found_after_a_move(engines: Engines, conserved: object) -> None:
    """The API server finds the stop string; the engine that owns the request is told to stop."""
    free = await run_unmoved(engines.a, GREEDY)
    words = free.text.split()
    stop = next(word for word in words[300:] if free.text.index(word) > len(free.text) // 2)
    parameters = GREEDY | {"stop": [stop]}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "ab", parameters)
    assert_live(moves)
    assert moved.text == expected.text
    assert moved.finish_reason == expected.finish_reason == "stop"
    assert moved.stop_reason == stop


async def test_logprobs_are_identical(engines: Engines, conserved: object) -> None:
    parameters = GREEDY | {"logprobs": 3}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "aba", parameters)
    assert_live(moves)
    assert moved.token_ids == expected.token_ids
    assert moved.logprobs == expected.logprobs


async def test_guided_decoding_goes_on_in_the_middle_of_the_pattern(engines: Engines, conserved: object) -> None:
    parameters = {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "([a-z]{3,9} ){60,80}end"}}
    expected = await run_unmoved(engines.a, parameters)
    moved, moves = await run_moved(engines, "ab", parameters)
    assert_live(moves)
    assert moved.text == expected.text
    assert moved.token_ids == expected.token_ids


async def test_long_context_is_copied_in_rounds(engines: Engines, conserved: object) -> None:
    prompt = [100 + index * 7 % 900 for index in range(3000)]
    async with Client(engines.a.base_url) as client:
        expected = await (await client.complete(prompt, 200, **GREEDY)).result()
        stream = await client.complete(prompt, 200, **GREEDY, cache_salt="not shared")
        await stream.wait_for(30)
        move = await move_stream(engines.a, engines.c, stream)
        moved = await stream.result()
    assert_live([move])
    assert move.hit_tokens == 0
    assert move.rounds >= 1
    assert moved.token_ids == expected.token_ids


async def test_arrives_while_a_long_prompt_is_processed(engines: Engines, start_server: Any) -> None:
    """A chunked prefill takes the whole token budget of each step; the newcomer gets its token all the same."""
    busy = start_server(name="busy", flags=("--max-num-batched-tokens", "256"))
    expected = await run_unmoved(engines.a, GREEDY)
    async with Client(engines.a.base_url) as client, Client(busy.base_url) as other:
        stream = await client.complete(PROMPT, LENGTH, **GREEDY)
        await stream.wait_for(40)
        long_prompt = [100 + index * 11 % 900 for index in range(7000)]
        prefill = await other.complete(long_prompt, 4, **GREEDY)
        move = await move_stream(engines.a, busy, stream)
        tokens_at_first = len(stream.token_ids)
        assert not prefill.token_ids, "the prefill was over before the request came"
        await stream.wait_for(tokens_at_first + 5)
        assert not prefill.token_ids, "the newcomer waited for the prefill"
        moved = await stream.result()
        await prefill.result()
    assert_live([move])
    assert moved.token_ids == expected.token_ids


async def test_metrics_of_the_front_end_stay_right(engines: Engines, conserved: object) -> None:
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
