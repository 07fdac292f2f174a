# SPDX-License-Identifier: Apache-2.0
"""Measures the steps of a live engine with prompts of all lengths and decoding batches.

With a llumlet the engine reports its steps. Without, they are inferred from a client's view: the time to the first
token of a single request is its prefill step, including the network; the time between two tokens of a batch is a decode
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import aiohttp

from llumlet.contract.client import LlumletClient
from llumsched.latency.fitting import MeasuredStep, pairs

_TOKEN_IDS: Final = range(100, 900)
"""Tokens that any vocabulary has."""
_OUTPUT: Final = 32
"""Output tokens per request of a decoding batch."""
_REPEATED: Final = 3
_FILLED: Final = 0.8
"""Largest share of the KV cache that a batch uses, so that nothing is preempted."""
_ASK_S: Final = 0.05
"""Pause between two queries for the latest steps; the engine keeps those of 0.2 s."""
_REQUEST_S: Final = 300.0
_TRIES: Final = 3
"""Attempts at a request whose tokens all come in one event: a busy API server merges what it has not sent yet."""
PROMPTS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS: Final = (32, 256, 1024, 4096, 16384)


class ProfileFailed(Exception):
    """Raised if an engine cannot be measured, with the reason."""


class Cell(NamedTuple):
    """A number of equal requests at the same time."""

    number: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Target:
    """The API server of an engine, and its limits."""

    url: str
    model: str
    api_key: str
    most_tokens: int
    """Limit of prompt and output of one request."""
    capacity: int
    """Size of the KV cache in tokens."""


def cells(target: Target, most_requests: int) -> list[Cell]:
    """The measurements, each several times: single prompts, and batches at several lengths."""
    most = min(target.most_tokens, int(_FILLED * target.capacity))
    prompts = [Cell(1, prompt, 2) for prompt in PROMPTS if prompt + 2 <= most]
    decodes = [
        Cell(number, context, _OUTPUT)
        for number, context in itertools.product(BATCHES, CONTEXTS)
        if number <= most_requests
        and context + _OUTPUT <= most
        and number * (context + _OUTPUT) <= _FILLED * target.capacity
    ]
    return [cell for cell in (*prompts, *decodes) for _ in range(_REPEATED)]


async def measure(
    target: Target, plan: Sequence[Cell], llumlet: LlumletClient | None, done: Callable[[], None], seed: int = 0
) -> list[MeasuredStep]:
    """Measures all cells and calls `done` after each. Raises ProfileFailed."""
    chance = random.Random(seed)
    found: dict[int, MeasuredStep] = {}
    seen: list[MeasuredStep] = []
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    asking = asyncio.create_task(_ask(llumlet, found)) if llumlet is not None else None
    try:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            await _play(session, target, Cell(1, 16, 2), chance)  # whatever is made at the first request is made
            found.clear()
            for cell in plan:
                seen += _as_steps(cell, await _play(session, target, cell, chance))
                done()
                if asking is not None and asking.done():
                    await asking  # it has failed
    finally:
        if asking is not None:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
    return seen if llumlet is None else list(found.values())


async def _ask(llumlet: LlumletClient, found: dict[int, MeasuredStep]) -> None:
    """Collects the engine's reported steps until it is cancelled."""
    while True:
        status = await llumlet.get_instance_status()
        for sample in status.steps:
            found[sample.number] = MeasuredStep.of(sample)
        await asyncio.sleep(_ASK_S)


async def _play(session: aiohttp.ClientSession, target: Target, cell: Cell, chance: random.Random) -> list[list[float]]:
    """Arrival times of each request's tokens, in seconds after it was sent."""
    prompts = [chance.choices(_TOKEN_IDS, k=cell.prompt) for _ in range(cell.number)]
    return await asyncio.gather(*(_complete(session, target, prompt, cell.output) for prompt in prompts))


async def _complete(session: aiohttp.ClientSession, target: Target, prompt: list[int], output: int) -> list[float]:
    for _ in range(_TRIES):
        times = await _stream(session, target, prompt, output)
        if len(times) > 1:
            return times
    raise ProfileFailed(f"{target.url} sent {output} tokens in one event, {_TRIES} times: measure it when it is idle")


async def _stream(session: aiohttp.ClientSession, target: Target, prompt: list[int], output: int) -> list[float]:
    body: dict[str, Any] = {
        "model": target.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    began_s, times = time.monotonic(), []
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ProfileFailed(f"{target.url} answers {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if "error" in (event := json.loads(line[6:])):
                        raise ProfileFailed(f"{target.url} ends a request: {event['error']}")
                    times.append(time.monotonic() - began_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProfileFailed(f"{target.url}: {error or 'no answer'}") from None
    return times


def _as_steps(cell: Cell, times: Sequence[Sequence[float]]) -> list[MeasuredStep]:
    """Converts a client's measurements to steps of the engine."""
    if cell.number == 1 and cell.output == 2:
        return [MeasuredStep(cell.prompt, pairs(0, cell.prompt), 0, 0, times[0][0])]
    gaps = [(each[-1] - each[0]) / (cell.output - 1) for each in times]
    kv = cell.number * (cell.prompt + cell.output // 2)
    return [MeasuredStep(0, 0, cell.number, kv, sum(gaps) / len(gaps))]
