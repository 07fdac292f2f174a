# SPDX-License-Identifier: Apache-2.0
"""Moved requests of every kind on real engines, token for token against unmoved runs.

Each cell runs twice in the same company: unmoved, then moved. If they differ, a second unmoved run is the control: if
that differs from the first one too, the cell is void. It says so, and too many void cells fail the last test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from llumlet.contract.types import Reason, RequestInfo
from tests.exactness.cells import COVER, FEW, SAMPLING, Cell, Configuration, all_cells, name
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Server
from tests.support.moves import Move, migrate, requests

PROMPT = list(range(100, 260))
TALK = [{"role": "user", "content": "tell me a long story about " + "ba de fi go ku " * 12}]


class Pace(NamedTuple):
    """Output tokens: of the whole answer, before the first move, and before each further one."""

    length: int
    first: int
    between: int


PACE = Pace(130, 25, 25)
JUST_ARRIVED = (Reason.HANDOVER_OPEN, Reason.NOT_STARTED)
"""Why a request cannot move on yet that has moved a moment ago: until its last move is over on either side."""
MAX_VOID = 3

NUM_MORE = 300
"""Cells that only `make test-full` runs, drawn from the product, beside those of `COVER`."""
_void: list[str] = []


def _parameters() -> list[Any]:
    drawn = random.Random(0).sample(all_cells(), NUM_MORE)
    rows = [*COVER, *(row for row in drawn if row not in COVER)]
    return [pytest.param(*row, marks=() if row in FEW else pytest.mark.full, id=name(*row)) for row in rows]


@pytest.mark.parametrize(("fleet_of", "cell"), _parameters(), indirect=["fleet_of"], scope="package")
@pytest.mark.asyncio
async def test_moved_as_if_unmoved(fleet_of: dict[str, Server], cell: Cell, request: pytest.FixtureRequest) -> None:
    for server in fleet_of.values():
        await wait_idle(server)
    path = [fleet_of[letter] for letter in cell["route"]]
    neighbours = {*path} if cell["company"] == "neighbours" else set()
    async with company(neighbours):
        unmoved, _ = await run(path[:1], cell)
        moved, moves = await run(path, cell)
        await skip_if_void(path, cell, PACE, unmoved, moved, request.node.name, _void)
    for move in moves:
        assert move.live, f"{move.phase} {move.reason} {move.detail}"
    assert len(moves) == len(path) - 1
    where: Configuration = request.node.callspec.params["fleet_of"]
    assert {move.transport for move in moves} == {where.transport}
    if cell["prefix"] == "cached":
        assert (moves[0].hit_tokens == 0) is where.exact
    assert outcome(moved) == outcome(unmoved)
    if cell["sampling"] == "repetition detection":
        assert moved.stop_reason == "repetition_detected"


def test_few_cells_are_void() -> None:
    assert len(_void) <= MAX_VOID, "\n".join(_void)


async def skip_if_void(
    path: list[Server], cell: Cell, pace: Pace, unmoved: Stream, moved: Stream, name: str, void: list[str]
) -> None:
    """Skips a cell whose runs differ also without moves, and notes its name."""
    if outcome(moved) != outcome(unmoved):
        again, _ = await run(path[:1], cell, pace)
        if outcome(again) != outcome(unmoved):
            void.append(name)
            pytest.skip("void: two unmoved runs differ")


async def run(path: list[Server], cell: Cell, pace: Pace = PACE) -> tuple[Stream, list[Move]]:
    """One run of the cell along `path`, under a salt of its own."""
    salt = uuid.uuid4().hex
    parameters = body(cell, pace.length) | {"cache_salt": salt}
    async with contextlib.AsyncExitStack() as stack:
        client, *others = [await stack.enter_async_context(Client(server.base_url)) for server in path]
        if cell["prefix"] == "cached" and others:
            await (await ask(others[0], cell, {"cache_salt": salt}, 1)).result()
        stream = await ask(client, cell, parameters, pace.length)
        moves = []
        for hop, (source, destination) in enumerate(itertools.pairwise(path)):
            held = await held_by(source, stream, pace.first + hop * pace.between)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        return await stream.result(), moves


def body(cell: Cell, length: int) -> dict[str, Any]:
    """The fields of the request, without prompt and salt."""
    parameters = {"ignore_eos": True, **SAMPLING[cell["sampling"]]}
    if "min_tokens" in parameters:
        parameters["min_tokens"] = length - 10
    if "structured_outputs" in parameters:
        del parameters["ignore_eos"]
    chat = cell["endpoint"] == "chat"
    if cell["logprobs"] != "none":
        parameters |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    if cell["logprobs"] == "output and prompt":
        parameters["prompt_logprobs"] = 2
    if cell["delivery"] == "whole":
        parameters["stream"] = False
    if cell["extras"] == "priority":
        parameters["priority"] = 3
    return parameters


async def ask(client: Client, cell: Cell, parameters: dict[str, Any], length: int) -> Stream:
    if cell["endpoint"] == "chat":
        return await client.chat(TALK, length, **parameters)
    return await client.complete(PROMPT, length, **parameters)


async def held_by(server: Server, stream: Stream, num_tokens: int, timeout_s: float = 60.0) -> RequestInfo:
    """What `server` says of the stream's request once that has `num_tokens` output tokens there and may move on."""
    deadline = time.monotonic() + timeout_s
    while True:
        for info in await requests(server):
            is_it = stream.request_id in info.request_id and info.output_tokens >= num_tokens
            if is_it and info.reason not in JUST_ARRIVED:
                return info
        if stream.done:
            await stream.result()
        assert not stream.done, f"the request ended after {len(stream.token_ids)} tokens, before its move"
        assert time.monotonic() < deadline, f"{server.name}: {await requests(server)}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def company(servers: set[Server], length: int = 8100) -> AsyncIterator[None]:
    """One other request in the batch of each server, from before until after; `length`: what it generates at most."""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for server in servers:
            client = await stack.enter_async_context(Client(server.base_url))
            streams.append(await client.complete(list(range(300, 340)), length, ignore_eos=True))
        for stream in streams:
            await stream.wait_for(1)
        yield
        for stream in streams:
            assert not stream.done, "the neighbour ended before the test"
            await stream.disconnect()


def outcome(stream: Stream) -> tuple[Any, ...]:
    """Everything the client can see of the answer."""
    return (
        stream.choices,
        stream.text,
        _by_token(stream.logprobs),
        stream.prompt_logprobs,
        stream.finish_reason,
        stream.stop_reason,
        stream.usage,
    )


def _by_token(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Log probabilities without the cut into events: tokens that come close together share one."""
    joined: dict[str, list[Any]] = {}
    for event in events:
        for key, values in event.items():
            joined.setdefault(key, []).extend(values or [])
    return joined
