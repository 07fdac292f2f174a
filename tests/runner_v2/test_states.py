# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, are half-way through their prefill or were preempted, and clients that leave before, during or
after a move: on engines with the V2 runner and asynchronous scheduling.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import RequestInfo
from tests.exactness.test_matrix import held_by
from tests.integration.test_any_state import in_phase
from tests.runner_v2.conftest import Cast
from tests.support.client import Client, Stream
from tests.support.conservation import assert_conserved, reserved_at, wait_idle
from tests.support.harness import Server
from tests.support.moves import migrate, move_stream

pytestmark = pytest.mark.asyncio

SEEDED: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 7, "frequency_penalty": 0.3}
PROMPT = list(range(100, 180))
LENGTH = 40


@pytest_asyncio.fixture
async def conserved(cast: Cast) -> AsyncIterator[None]:
    before = {server: await wait_idle(server) for server in (cast.a, cast.b, cast.small)}
    yield
    await assert_conserved(before)


async def start(client: Client, prompt: list[int] = PROMPT, length: int = LENGTH) -> Stream:
    """A seeded stream that shares no cached block with any other."""
    return await client.complete(prompt, length, cache_salt=uuid.uuid4().hex, **SEEDED)


async def unmoved(server: Server, prompt: list[int] = PROMPT, length: int = LENGTH) -> list[int]:
    async with Client(server.base_url) as client:
        return (await (await start(client, prompt, length)).result()).token_ids


@pytest.mark.usefixtures("conserved")
async def test_waiting(cast: Cast) -> None:
    expected = await unmoved(cast.a)
    async with Client(cast.small.base_url) as client:
        hogs = [await start(client, list(range(300 + n, 340 + n)), 400) for n in range(2)]
        await asyncio.gather(*(hog.wait_for(1) for hog in hogs))
        stream = await start(client)
        waits = await in_phase(cast.small, RequestInfo.WAITING)
        (move,) = await migrate(cast.small, cast.a, request_ids=[waits])
        result = await stream.result()
        assert not any(hog.done for hog in hogs), "it had not waited for long"
        for hog in hogs:
            await hog.disconnect()
    assert (move.phase, move.mode, move.recomputed_tokens, move.copied_bytes) == ("moved", "waiting", 0, 0), move
    assert result.token_ids == expected


@pytest.mark.usefixtures("conserved")
async def test_half_prefilled(cast: Cast) -> None:
    prompt = [100 + index * 7 % 900 for index in range(1300)]
    expected = await unmoved(cast.small, prompt)
    async with Client(cast.small.base_url) as client:
        stream = await start(client, prompt)
        await in_phase(cast.small, RequestInfo.PREFILL)
        move = await move_stream(cast.small, cast.a, stream, method="blocking")
        result = await stream.result()
    assert (move.phase, move.mode, move.recomputed_tokens) == ("moved", "blocking", 0), move
    assert move.context_tokens == len(prompt), "the prefill had ended"
    assert move.copied_bytes > 0
    assert result.token_ids == expected


@pytest.mark.usefixtures("conserved")
async def test_preempted(cast: Cast) -> None:
    """Two requests outgrow the small engine's blocks; steps are in flight when that is found out."""
    prompt, length = [100 + index * 7 % 900 for index in range(700)], 120
    expected = await unmoved(cast.a, prompt, length)
    async with Client(cast.small.base_url) as client:
        streams = [await start(client, prompt, length) for _ in range(2)]
        victim = await in_phase(cast.small, RequestInfo.PREEMPTED)
        (move,) = await migrate(cast.small, cast.a, request_ids=[victim])
        results = await asyncio.gather(*(stream.result() for stream in streams))
    assert (move.phase, move.mode) == ("moved", "recompute"), move
    assert move.recomputed_tokens == move.context_tokens - 1 > len(prompt)
    assert [result.token_ids for result in results] == [expected, expected]


@pytest.mark.usefixtures("conserved")
@pytest.mark.parametrize(
    "when", ["during", *(pytest.param(when, marks=pytest.mark.rest) for when in ("before", "after"))]
)
async def test_the_client_leaves(cast: Cast, when: str) -> None:
    """Both engines hold nothing afterwards, and what the destination had copied disturbs nobody."""
    a, b = cast.a, cast.b
    expected = await unmoved(b)
    async with Client(a.base_url) as client:
        stream = await start(client, length=400)
        request_id = (await held_by(a, stream, 5)).request_id
        if when == "before":
            _, moves = await asyncio.gather(stream.disconnect(), migrate(a, b, request_ids=[request_id]))
            assert [move.phase for move in moves] in ([], ["gone"], ["moved"]), moves
        elif when == "during":
            with copying_slowly(cast):
                moving = asyncio.create_task(migrate(a, b, request_ids=[request_id]))
                await reserved_at(b)
                await stream.disconnect()
                assert [move.phase for move in await moving] == ["gone"], await moving
        else:
            (move,) = await migrate(a, b, request_ids=[request_id])
            assert move.live, move
            await stream.disconnect()
    for server in (a, b):
        await wait_idle(server)
    assert await unmoved(b) == expected


@contextlib.contextmanager
def copying_slowly(cast: Cast) -> Any:
    cast.slow.touch()
    try:
        yield
    finally:
        cast.slow.unlink()


@pytest.mark.usefixtures("conserved")
async def test_steps_are_told_to_last_as_long_as_the_client_waits_for_tokens(cast: Cast) -> None:
    """Two batches are in flight, and the time of each is counted once."""
    async with Client(cast.a.base_url) as client, LlumletClient(str(cast.a.llumlet)) as llumlet:
        stream = await start(client, length=400)
        statuses, counts = [], []
        for number in (40, 340):
            await stream.wait_for(number)
            statuses.append(await llumlet.get_instance_status())
            counts.append(len(stream.times) - 1)
        begin, end = (stream.times[count] for count in counts)
        await stream.disconnect()
    num_steps = statuses[1].num_decode_steps - statuses[0].num_decode_steps
    assert num_steps == pytest.approx(counts[1] - counts[0], rel=0.1)
    assert statuses[1].decode_steps_s - statuses[0].decode_steps_s == pytest.approx(end - begin, rel=0.1)
    assert statuses[1].decode_steps_requests - statuses[0].decode_steps_requests == num_steps
    (sample,) = statuses[1].steps[-1:]
    assert (sample.num_decodes, sample.prefill_tokens) == (1, 0)
    assert len(PROMPT) + 40 < sample.decode_kv <= len(PROMPT) + 400
