# SPDX-License-Identifier: Apache-2.0
"""What is it worth to send prompts where their prefix is cached?

Two real engines, each step as long as a device's (`benchmarks.calibrate.steps_on_cpu`), with 3,168 tokens of KV cache
each, report to two schedulers with a gateway each: one goes by load alone (load-balance), one by prefix caches, too
(prefix-cache). The same requests at the same moments go through the one and then, with empty caches, through the other.
Hits are vLLM's own count, times to the first token what clients see.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.calibrate.engines import MODEL, spec
from benchmarks.objectives.outcome import Outcome
from benchmarks.rebalance import TOKEN_IDS
from llumsched.up.ports import free_port
from tests.support.client import Client
from tests.support.control import Control
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import build
from tests.support.progress import Say
from tests.support.stats import median, quantile

POLICIES: Final = ("load-balance", "prefix-cache")
"""The baseline, and ours."""
NUM_ENGINES: Final = 2
FASTER: Final = 1.25
NO_SLOWER: Final = 0.95
_SETTLE_S: Final = 1.5
_NUM_WARM: Final = 4
_OUTPUTS: Final = (8, 32)
_COUNTS: Final = {"hits": "vllm:prefix_cache_hits_total", "queries": "vllm:prefix_cache_queries_total"}

Play = Callable[["Run"], Awaitable[None]]


@dataclass(frozen=True)
class Load:
    name: str
    play: Play
    seconds: float
    ratio: float | None
    """What the baseline's TTFT p90 is to be over ours, at least."""


class Run:
    """The requests of one load under one policy: the same ones, at the same moments, under each."""

    def __init__(self, client: Client, seed: int, seconds: float) -> None:
        self.chance = random.Random(seed)
        self.ttft_ms: list[float] = []
        self._client = client
        self._end_s = time.monotonic() + seconds

    async def serve(self, prompt: list[int], num_output: int) -> list[int]:
        """Sends one request; returns its answer."""
        began_s = time.monotonic()
        stream = await self._client.complete(prompt, num_output, ignore_eos=True)
        await stream.result()
        self.ttft_ms.append((stream.times[0] - began_s) * 1e3)
        return stream.token_ids

    def tokens(self, number: int) -> list[int]:
        return self.chance.choices(TOKEN_IDS, k=number)

    async def at_random(self, rate: float, begin: Callable[[], Awaitable[object]]) -> None:
        """Begins something so many times a second, and waits for the end of all."""
        tasks = []
        at_s = time.monotonic()
        while (at_s := at_s + self.chance.expovariate(rate)) < self._end_s:
            await asyncio.sleep(at_s - time.monotonic())
            tasks.append(asyncio.ensure_future(begin()))
        await asyncio.gather(*tasks)


async def system_prompts(run: Run, rate: float = 2.6) -> None:
    """Requests that share one of six long prefixes: more than one engine can hold, and less than two."""
    prefixes = [run.tokens(640) for _ in range(6)]

    def one() -> Awaitable[object]:
        return run.serve(run.chance.choice(prefixes) + run.tokens(40), run.chance.randint(*_OUTPUTS))

    await run.at_random(rate, one)


async def conversations(run: Run, rate: float = 0.5) -> None:
    """Conversations of five turns, each with all that was said before, and a pause before the next."""

    def one() -> Awaitable[object]:
        turns = [(run.tokens(run.chance.randint(60, 160)), run.chance.randint(16, 48)) for _ in range(5)]
        return _converse(run, turns, [run.chance.uniform(1, 4) for _ in turns])

    await run.at_random(rate, one)


async def _converse(run: Run, turns: Sequence[tuple[list[int], int]], pauses_s: Sequence[float]) -> None:
    said: list[int] = []
    for (words, num_output), pause_s in zip(turns, pauses_s, strict=True):
        said = said + words
        said = said + await run.serve(said, num_output)
        await asyncio.sleep(pause_s)


async def strangers(run: Run, rate: float = 2.0) -> None:
    """Requests that have nothing in common."""

    def one() -> Awaitable[object]:
        return run.serve(run.tokens(run.chance.randint(8, 800)), run.chance.randint(24, 120))

    await run.at_random(rate, one)


LOADS: Final = (
    Load("shared system prompts", system_prompts, 45.0, FASTER),
    Load("conversations", conversations, 45.0, None),
    Load("nothing shared", strangers, 45.0, NO_SLOWER),
)


@dataclass(frozen=True)
class Seen:
    ttft_ms: Sequence[float]
    hit_rate: float
    """Share of the prompts' tokens that the engines found in their caches."""


async def measure(logs: Path, loads: Sequence[Load], overlap: float, seed: int, say: Say) -> list[Outcome]:
    stores = [f"127.0.0.1:{free_port()}" for _ in POLICIES]
    controls = [
        Control(logs, f"listen://{store}", model=build(MODEL), schedulers=[["--scheduling-policy", name]], name=name)
        for name, store in zip(POLICIES, stores, strict=True)
    ]
    fleet = Fleet(logs)
    try:
        say(f"prefix: starting {NUM_ENGINES} engines")
        specs = [_caching(spec(number, stores, logs, overlap)) for number in range(NUM_ENGINES)]
        engines = await asyncio.to_thread(fleet.start, *specs)
        for control in controls:
            await control.knows(NUM_ENGINES)
        found = []
        for number, load in enumerate(loads):
            seen = {}
            for name, control in zip(POLICIES, controls, strict=True):
                say(f"prefix: {load.name}, {name}, {load.seconds:.0f} s")
                seen[name] = await _run(load, control, engines, seed + number)
            found += outcomes(load, *(seen[name] for name in POLICIES))
        return found
    finally:
        for control in controls:
            await asyncio.to_thread(control.stop)
        await asyncio.to_thread(fleet.close)


def _caching(one: ServerSpec) -> ServerSpec:
    flags = tuple(flag for flag in one.flags if flag != "--no-enable-prefix-caching")
    return replace(one, flags=flags, env={**one.env, "VLLM_SERVER_DEV_MODE": "1"})


async def _run(load: Load, control: Control, engines: Sequence[Server], seed: int) -> Seen:
    async with Client(control.gateway_url) as client, aiohttp.ClientSession() as session:
        warm = Run(client, seed, 0.0)
        for _ in range(_NUM_WARM):  # after the first, the gateway knows what the scheduler wants to know
            await warm.serve(warm.tokens(100), 4)
        await asyncio.sleep(_SETTLE_S)
        for engine in engines:
            async with session.post(f"{engine.base_url}/reset_prefix_cache", raise_for_status=True):
                pass
        await asyncio.sleep(_SETTLE_S)
        before = await _counts(session, engines)
        run = Run(client, seed, load.seconds)
        await load.play(run)
        after = await _counts(session, engines)
    queries = after["queries"] - before["queries"]
    return Seen(run.ttft_ms, (after["hits"] - before["hits"]) / max(queries, 1.0))


async def _counts(session: aiohttp.ClientSession, engines: Sequence[Server]) -> dict[str, float]:
    """vLLM's counters of its prefix cache, in tokens, of all engines together."""
    sums = dict.fromkeys(_COUNTS, 0.0)
    for engine in engines:
        async with session.get(f"{engine.base_url}/metrics", raise_for_status=True) as answer:
            lines = (await answer.text()).splitlines()
        for name, metric in _COUNTS.items():
            sums[name] += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{"))
    return sums


def outcomes(load: Load, baseline: Seen, ours: Seen) -> list[Outcome]:
    found = []
    for share, name in ((0.5, "TTFT p50, ms"), (0.9, "TTFT p90, ms")):
        figures = [median(one.ttft_ms) if share == 0.5 else quantile(one.ttft_ms, share) for one in (baseline, ours)]
        target = figures[0] / load.ratio if load.ratio is not None and share == 0.9 else None
        more = {"requests": len(ours.ttft_ms), "times_faster": figures[0] / figures[1]}
        found.append(Outcome(f"prefix: {load.name}", name, *figures, target, more))
    if baseline.hit_rate:
        found.append(Outcome(f"prefix: {load.name}", "hit rate", baseline.hit_rate, ours.hit_rate))
    return found
