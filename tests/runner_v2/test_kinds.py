# SPDX-License-Identifier: Apache-2.0
"""Every kind of request, moved between engines with the V2 runner and asynchronous scheduling, as if unmoved."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest

from tests.exactness.cells import SAMPLING, Cell
from tests.exactness.test_matrix import PROMPT, company, held_by, outcome, run, skip_if_void
from tests.runner_v2.cells import COVER, OTHERS, PACE, more, pace
from tests.runner_v2.conftest import MAX_MODEL_LEN, Cast
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.moves import migrate, requests

MAX_VOID = 2
FULL, REST = pytest.mark.full, pytest.mark.rest
_void: list[str] = []


def _parameters() -> list[Any]:
    """All kinds: `make test` plays a quarter of `COVER`, `make test-rest` another, `make test-full` the others."""
    marks = itertools.chain(
        itertools.islice(itertools.cycle(((), FULL, REST, FULL)), len(COVER)), itertools.repeat(FULL)
    )
    rows = zip([*COVER, *more()], marks, strict=False)
    return [pytest.param(cell, marks=marks, id="-".join(cell.values()).replace(" ", "_")) for cell, marks in rows]


def test_the_engines_are_what_gpus_run(cast: Cast) -> None:
    """What the objects in the processes are, told by the llumlet as it attaches to them, and not what was asked for."""
    for server in (cast.a, cast.b, cast.small):
        found = "vllm.v1.worker.cpu.model_runner.CPUModelRunner behind AsyncScheduler, steps in flight: 2"
        assert f"this engine has {found}" in server.log_text()


@pytest.mark.parametrize("cell", _parameters())
@pytest.mark.asyncio
async def test_moved_as_if_unmoved(cast: Cast, cell: Cell, request: pytest.FixtureRequest) -> None:
    servers = {"a": cast.a, "b": cast.b, "c": cast.small}
    path = [servers[letter] for letter in cell["route"]]
    for server in path:
        await wait_idle(server)
    async with company({*path} if cell["company"] == "neighbours" else set(), MAX_MODEL_LEN - 60):
        unmoved, _ = await run(path[:1], cell, pace(cell))
        moved, moves = await run(path, cell, pace(cell))
        await skip_if_void(path, cell, pace(cell), unmoved, moved, request.node.name, _void)
    for move in moves:
        assert move.live, f"{move.phase} {move.reason} {move.detail}"
    assert len(moves) == len(path) - 1
    if cell["prefix"] == "cached":
        assert moves[0].hit_tokens > 0
    assert outcome(moved) == outcome(unmoved)


@pytest.mark.asyncio
async def test_children_move_to_different_engines(cast: Cast) -> None:
    """n = 2: one child goes to each of two other engines; the unmoved run has the two in one batch."""
    a, b, small = cast.a, cast.b, cast.small
    parameters = {"n": 2, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    async with Client(a.base_url) as client:
        expected = await (await client.complete(PROMPT, PACE.length, cache_salt="n", **parameters)).result()
        moved = await client.complete(PROMPT, PACE.length, cache_salt=uuid.uuid4().hex, **parameters)
        await moved.wait_for(2 * PACE.first)
        children = sorted(info.request_id for info in await requests(a) if moved.request_id in info.request_id)
        assert len(children) == 2
        moves = [
            move
            for child, to in zip(children, (b, small), strict=True)
            for move in await migrate(a, to, request_ids=[child])
        ]
        await moved.result()
    assert [move.live for move in moves] == [True, True], moves
    assert set(moved.choices) == {0, 1}
    assert moved.choices == expected.choices
    assert moved.usage == expected.usage


@pytest.mark.asyncio
async def test_a_stop_string_is_found_after_the_move(cast: Cast) -> None:
    """The API server finds it while the engine that runs ahead has computed more; the owner is told to stop."""
    a, b = cast.a, cast.b
    async with Client(a.base_url) as client:
        free = await (await client.complete(PROMPT, PACE.length, ignore_eos=True)).result()
        half = len(free.text) // 2
        stop = next(word for word in free.text[half:].split()[1:] if free.text.index(word) > half)
        parameters = {"ignore_eos": True, "stop": [stop]}
        expected = await (await client.complete(PROMPT, PACE.length, **parameters)).result()
        stream = await client.complete(PROMPT, PACE.length, **parameters)
        (move,) = await migrate(a, b, request_ids=[(await held_by(a, stream, PACE.first)).request_id])
        result = await stream.result()
    assert move.live, move
    assert result.stop_reason == stop
    assert outcome(result) == outcome(expected)
    for server in (a, b):
        await wait_idle(server)


def test_few_cells_are_void() -> None:
    assert len(_void) <= MAX_VOID, "\n".join(_void)


def test_the_cover_holds_every_value() -> None:
    for axis, values in {"sampling": [*SAMPLING], **OTHERS, "logprobs": ["output", "output and prompt"]}.items():
        assert {cell[axis] for cell in COVER} == {*values}, axis
