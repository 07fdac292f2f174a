# SPDX-License-Identifier: Apache-2.0
"""RL frameworks pause engines, put them to sleep, reset their caches and exchange their weights, also while requests
move."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.support.client import Client, Stream
from tests.support.conservation import assert_conserved, holdings, pinned_at, reserved_at, wait_idle
from tests.support.failures import failure
from tests.support.harness import Fleet, Runner, Server, ServerSpec
from tests.support.moves import Move, engine_id, move_stream

pytestmark = pytest.mark.asyncio

GREEDY: dict[str, Any] = {"ignore_eos": True}
RATE = 150_000
"""Bytes a second: a copy outlasts whatever is done meanwhile."""
NEW_TOKENS = 30


class Call(NamedTuple):
    """An endpoint, and what undoes it."""

    path: str
    undo: str = ""
    aborts: bool = False


CALLS = {
    "pause": Call("/pause", "/resume", aborts=True),
    "pause-wait": Call("/pause?mode=wait", "/resume"),
    "sleep": Call("/sleep?level=1", "/wake_up", aborts=True),
    "reset": Call("/reset_prefix_cache?reset_running_requests=true"),
    "weights": Call("/collective_rpc"),
}


class Pair(NamedTuple):
    a: Server
    b: Server


def pair_of(model: Path, logs: Path, runner: Runner) -> Iterator[Pair]:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    specs = [
        ServerSpec(
            model, name=name, instance_id=name, runner=runner, max_model_len=2048, bandwidth_limit=RATE, env=environment
        )
        for name in Pair._fields
    ]
    with Fleet(logs / f"pauses{runner}") as fleet:
        yield Pair(*fleet.start(*specs))


@pytest.fixture(scope="module")
def sync(model_dir: Path, log_dir: Path) -> Iterator[Pair]:
    yield from pair_of(model_dir, log_dir, "")


@pytest.fixture(scope="module")
def asynchronous(model_dir: Path, log_dir: Path) -> Iterator[Pair]:
    yield from pair_of(model_dir, log_dir, "v2")


async def copying(pair: Pair) -> None:
    """A round is under way."""
    await reserved_at(pair.b)
    await pinned_at(pair.a)


async def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(server.base_url) as operator,
        operator.post(path, json=body or None, timeout=aiohttp.ClientTimeout(60)) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, f"{path}: {answer.status} {text}"
        return dict(await answer.json()) if text else {}


async def interrupted(pair: Pair, at: Server, call: Call, prompt: list[int], **body: Any) -> tuple[Move, Stream]:
    """A move from a to b during which the call comes to `at`; it succeeds, and undoes itself. Returns the move, and
    the stream, which goes on unless the call aborts it."""
    before = {server: await wait_idle(server) for server in pair}
    async with Client(pair.a.base_url) as at_a, Client(pair.b.base_url) as at_b:
        stream = await at_a.complete(prompt, NEW_TOKENS + 10, **GREEDY)
        others = [await client.complete(prompt[:100], NEW_TOKENS, **GREEDY, cache_salt="x") for client in (at_a, at_b)]
        for one in (stream, *others):
            await one.wait_for(2)
        stream.engine_id = await engine_id(pair.a, stream)
        moving = asyncio.create_task(move_stream(pair.a, pair.b, stream, force=True))
        await copying(pair)
        answer = await post(at, call.path, **body)
        assert answer.get("success", True)
        if call.undo:
            held = await holdings(at)
            assert (held.pinned_blocks, held.reserved_blocks, held.draining_blocks) == (0, 0, 0)
            await post(at, call.undo)
        move = await moving
        for one in (stream, *others):
            await one.result()
    await assert_conserved(before)
    return move, stream


async def check(pair: Pair, at: str, name: str, prompt: list[int]) -> None:
    call, target = CALLS[name], getattr(pair, at)
    async with Client(pair.a.base_url) as client:
        expected = (
            await (await client.complete(prompt, NEW_TOKENS + 10, **GREEDY, cache_salt="alone")).result()
        ).token_ids
    move, stream = await interrupted(pair, target, call, prompt)
    # Of a request that is aborted the move may have been called off first.
    is_aborted = call.aborts and at == "a"
    assert move.phase == "stayed" or (is_aborted and move.phase == "gone"), f"{move.phase} {move.reason}"
    assert stream.token_ids == expected[: len(stream.token_ids) if is_aborted else len(expected)]


def prompt_of(number: int) -> list[int]:
    return [100 + (index * 7 + number * 31) % 900 for index in range(600)]


@failure(
    "the destination is paused, sleeps, or resets its caches while blocks are copied",
    "copying",
    "stayed: the call succeeds, and the request goes on at the source",
)
@failure(
    "the source is paused, sleeps, or resets its caches while blocks are copied",
    "copying",
    "stayed, or aborted with all others: the call succeeds, and nothing is held any more",
)
@pytest.mark.parametrize("at", "ab")
@pytest.mark.parametrize("name", ["pause", "pause-wait", "sleep", "reset"])
async def test_call_succeeds_while_blocks_are_copied(sync: Pair, at: str, name: str) -> None:
    await check(sync, at, name, prompt_of([*CALLS].index(name) + 10 * (at == "a")))
