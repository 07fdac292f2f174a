# SPDX-License-Identifier: Apache-2.0
"""RL frameworks pause engines, put them to sleep, reset their caches and exchange their weights, also while requests
move."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.support.client import Client, Stream
from tests.support.conservation import assert_conserved, holdings, pinned_at, reserved_at, wait_idle
from tests.support.failures import failure
from tests.support.harness import Fleet, Runner, Server, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.moves import Move, engine_id, migrate, move_stream, requests

pytestmark = pytest.mark.asyncio

GREEDY: dict[str, Any] = {"ignore_eos": True}
RATE = 300_000
"""Bytes a second: a copy outlasts whatever is done meanwhile."""
NEW_TOKENS = 30
STREAM_TOKENS = 1000
"""Tokens of the stream that moves. It outlasts the call, however late that comes, and is left before its end."""
FLOAT32 = ("--dtype", "float32")
"""A reset starts requests over, and what is computed again must be the same."""


class Call(NamedTuple):
    """An endpoint, and what undoes it. `aborts`: it aborts the engine's streams; `waits`: it answers when they have
    ended."""

    path: str
    undo: str = ""
    aborts: bool = False
    waits: bool = False


CALLS = {
    "pause": Call("/pause", "/resume", aborts=True),
    "pause-wait": Call("/pause?mode=wait", "/resume", waits=True),
    "pause-keep": Call("/pause?mode=keep", "/resume"),
    "sleep": Call("/sleep?level=1", "/wake_up", aborts=True),
    "reset": Call("/reset_prefix_cache?reset_running_requests=true"),
    "weights": Call("/collective_rpc"),
}


class Pair(NamedTuple):
    a: Server
    b: Server


def pair_of(model: Path, logs: Path, runner: Runner, rate: int = RATE) -> Iterator[Pair]:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    specs = [
        ServerSpec(
            model,
            name=name,
            instance_id=name,
            runner=runner,
            max_model_len=2048,
            bandwidth_limit=rate,
            flags=FLOAT32,
            env=environment,
        )
        for name in Pair._fields
    ]
    with Fleet(logs / f"pauses{runner}-{rate}") as fleet:
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
        operator.post(path, json=body or None, timeout=aiohttp.ClientTimeout(300)) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, f"{path}: {answer.status} {text}"
        return dict(await answer.json()) if text else {}


async def interrupted(pair: Pair, at: Server, call: Call, prompt: list[int], **body: Any) -> tuple[Move, Stream]:
    """A move from a to b during which the call comes to `at`; it succeeds, and undoes itself. Returns the move, and
    the stream: what came of it until the call ended it, or with `NEW_TOKENS` behind the call and the move."""
    before = {server: await wait_idle(server) for server in pair}
    async with Client(pair.a.base_url) as at_a, Client(pair.b.base_url) as at_b:
        stream = await at_a.complete(prompt, STREAM_TOKENS, **GREEDY)
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
        for one in others:
            await one.result()
        if at is pair.a and (call.aborts or call.waits):
            await stream.result()
        else:
            await stream.wait_for(len(stream.token_ids) + NEW_TOKENS)
            await stream.disconnect()
    await assert_conserved(before)
    return move, stream


async def check(pair: Pair, at: str, name: str, prompt: list[int]) -> None:
    call, target = CALLS[name], getattr(pair, at)
    move, stream = await interrupted(pair, target, call, prompt)
    # Of a request that is aborted the move may have been called off first.
    is_aborted = call.aborts and at == "a"
    assert move.phase == "stayed" or (is_aborted and move.phase == "gone"), f"{move.phase} {move.reason}"
    assert stream.token_ids == await continuation(pair.a, prompt, "alone", len(stream.token_ids))


async def check_weights(pair: Pair, at: str, prompt: list[int], old: Path, new: Path) -> None:
    """Both engines get other weights in place, the one at `at` while blocks are copied; what was computed before is no
    cache."""
    target = getattr(pair, at)
    update = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    before = await continuation(pair.a, prompt, "old")
    move, _ = await interrupted(pair, target, CALLS["weights"], prompt, **update)
    assert (move.phase, move.reason) == ("stayed", "other_weights"), move
    for server in pair:
        if server is not target:
            await post(server, "/collective_rpc", **update)
    assert (await post(pair.a, "/reset_prefix_cache"))["success"]
    outputs = [await continuation(server, prompt, salt) for server in pair for salt in ("new", None)]
    for server in pair:
        await post(server, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(old)})
        assert (await post(server, "/reset_prefix_cache"))["success"]
    assert outputs == [outputs[0]] * 4, "KV of the old weights was found in a prefix cache"
    assert outputs[0] != before, "the weights are the same"
    assert await continuation(pair.b, prompt, None) == before


async def continuation(server: Server, prompt: list[int], salt: str | None, length: int = NEW_TOKENS) -> list[int]:
    async with Client(server.base_url) as client:
        more = {} if salt is None else {"cache_salt": salt}
        return (await (await client.complete(prompt, length, **GREEDY, **more)).result()).token_ids


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
@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=() if (name, at) == ("pause", "a") else pytest.mark.rest)
        for name in ("pause", "pause-wait", "sleep", "reset")
        for at in "ab"
    ],
)
async def test_call_succeeds_while_blocks_are_copied(sync: Pair, at: str, name: str) -> None:
    await check(sync, at, name, prompt_of([*CALLS].index(name) + 10 * (at == "a")))


@pytest.fixture(scope="module")
def other_weights() -> Path:
    return build(dataclasses.replace(PRESETS["tiny"], seed=99))


@failure(
    "the source or the destination gets other weights in place while blocks are copied",
    "copying",
    "other_weights: stayed; no KV cache of the old weights is found at either",
)
@pytest.mark.parametrize("at", ["a", pytest.param("b", marks=pytest.mark.rest)])
async def test_no_cache_of_old_weights_arrives(sync: Pair, model_dir: Path, other_weights: Path, at: str) -> None:
    await check_weights(sync, at, prompt_of(30 + (at == "a")), model_dir, other_weights)


@pytest.mark.rest
async def test_pause_of_an_asynchronous_engine_succeeds_while_blocks_are_copied(asynchronous: Pair) -> None:
    await check(asynchronous, "b", "pause", prompt_of(40))


@pytest.mark.full
@pytest.mark.parametrize("at", "ab")
@pytest.mark.parametrize("name", ["pause", "pause-wait", "sleep", "reset"])
async def test_call_succeeds_at_an_asynchronous_engine(asynchronous: Pair, at: str, name: str) -> None:
    await check(asynchronous, at, name, prompt_of(50 + [*CALLS].index(name) + 10 * (at == "a")))


@pytest.mark.full
@pytest.mark.parametrize("at", "ab")
async def test_no_cache_of_old_weights_arrives_at_an_asynchronous_engine(
    asynchronous: Pair, model_dir: Path, other_weights: Path, at: str
) -> None:
    await check_weights(asynchronous, at, prompt_of(80 + (at == "a")), model_dir, other_weights)


CYCLES = 100
LENGTH = 200
"""Tokens of a stream, which takes several times as long as a move."""
CYCLE = ("pause", "pause-keep", "sleep", "pause-keep", "pause-wait")


@pytest.fixture(scope="module")
def brisk(model_dir: Path, log_dir: Path) -> Iterator[Pair]:
    yield from pair_of(model_dir, log_dir, "v2", rate=20_000_000)


class Traffic:
    """Streams at both engines, one after the other, and all of them moved to the other engine again and again."""

    def __init__(self, pair: Pair, prompts: Sequence[list[int]]) -> None:
        self.pair = pair
        self.prompts = prompts
        self.moves = Counter[str]()
        self.streams = Counter[str]()
        self.expected: dict[int, list[int]] = {}

    async def learn(self) -> None:
        for number, prompt in enumerate(self.prompts):
            self.expected[number] = await continuation(self.pair.a, prompt, "alone", LENGTH)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        jobs = [asyncio.create_task(self._stream(self.pair[n % 2], n, stop)) for n in range(len(self.prompts))]
        jobs.append(asyncio.create_task(self._move(stop)))
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*jobs)

    async def _stream(self, home: Server, number: int, stop: asyncio.Event) -> None:
        async with Client(home.base_url) as client:
            while not stop.is_set():
                stream = await client.complete(self.prompts[number], LENGTH, **GREEDY)
                tokens = (await stream.result()).token_ids
                assert tokens == self.expected[number][: len(tokens)], f"stream {number}: wrong tokens"
                # vLLM says nothing of how a request ended that was aborted before its first token.
                assert stream.finish_reason == ("length" if len(tokens) == LENGTH else "abort" if tokens else None)
                self.streams[stream.finish_reason or "abort"] += 1

    async def _move(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for source, destination in (self.pair, reversed(self.pair)):
                ids = [one.request_id for one in await requests(source) if one.movable]
                for move in await migrate(source, destination, request_ids=ids, force=True) if ids else ():
                    self.moves[f"{move.phase} {move.reason}".strip()] += 1
            await asyncio.sleep(0.05)

    async def next_move(self, at: Server) -> None:
        """Waits until another move has ended well and a further one has blocks at the destination."""
        moved, deadline = self.moves["moved"], time.monotonic() + 100.0
        while self.moves["moved"] == moved or not await self._holds(at):
            assert time.monotonic() < deadline, f"nothing moves: {self.moves}"
            await asyncio.sleep(0.01)

    async def _holds(self, at: Server) -> bool:
        held = await holdings(at)
        return bool(held.pinned_blocks or held.reserved_blocks)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_hundred_pauses_under_continuous_moves(brisk: Pair) -> None:
    before = {server: await wait_idle(server) for server in brisk}
    traffic = Traffic(brisk, [prompt_of(100 + number)[:200] for number in range(4)])
    await traffic.learn()
    seconds = []
    async with traffic.running():
        for cycle in range(CYCLES):
            server, call = brisk[cycle % 2], CALLS[CYCLE[cycle // 2 % len(CYCLE)]]
            await traffic.next_move(server)
            began = time.monotonic()
            await post(server, call.path)
            seconds.append(time.monotonic() - began)
            held = await holdings(server)
            assert not (held.pinned_blocks + held.reserved_blocks + held.draining_blocks), f"cycle {cycle}: {held}"
            await post(server, call.undo)
    await assert_conserved(before)
    print(f"{CYCLES} cycles, longest {max(seconds):.2f} s; moves {traffic.moves}; streams {traffic.streams}")
    for server in brisk:
        assert "not conserved" not in server.log_text()
