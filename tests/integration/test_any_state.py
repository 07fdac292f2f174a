# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, are half-way through their prefill or were preempted move too, and their tokens are the same.

In float32: the destination computes what is not carried with other batches and chunks than an unmoved run.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llumlet.contract.types import RequestInfo
from tests.support.client import Client, Stream
from tests.support.conservation import assert_conserved, wait_idle
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import migrate, move_stream, requests

pytestmark = [pytest.mark.asyncio, pytest.mark.rest]

SEEDED: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "top_p": 0.95, "top_k": 200, "seed": 7}
PROMPT = list(range(100, 180))


class Pair(NamedTuple):
    """A small engine that makes requests wait, and one with room."""

    small: Server
    roomy: Server


@pytest.fixture(scope="module")
def pair(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = ("--dtype", "float32", "--max-num-batched-tokens")
    small = ServerSpec(
        model_dir,
        name="small",
        instance_id="small",
        max_num_seqs=2,
        num_kv_blocks=100,
        max_model_len=3000,
        flags=(*flags, "32"),
    )
    roomy = ServerSpec(
        model_dir, name="roomy", instance_id="roomy", max_model_len=3000, flags=(*flags, "3000", "--max-num-seqs", "8")
    )
    with Fleet(tmp_path_factory.mktemp("any_state"), lambda text: None) as fleet:
        yield Pair(*fleet.start(small, roomy))


async def start(client: Client, prompt: list[int] = PROMPT, length: int = 100) -> Stream:
    """A seeded stream that shares no cached block with any other."""
    return await client.complete(prompt, length, cache_salt=uuid.uuid4().hex, **SEEDED)


async def unmoved(server: Server, prompt: list[int] = PROMPT, length: int = 100) -> list[int]:
    async with Client(server.base_url) as client:
        return (await (await start(client, prompt, length)).result()).token_ids


async def in_phase(server: Server, phase: RequestInfo.Phase, timeout_s: float = 60.0) -> str:
    """The engine's id of the first request in this phase."""
    async with asyncio.timeout(timeout_s):
        while True:
            for info in await requests(server):
                if info.phase == phase:
                    return str(info.request_id)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("order", ["FCW", "FCWSR"])
async def test_waiting(pair: Pair, order: str) -> None:
    before = {server: await wait_idle(server) for server in pair}
    expected = await unmoved(pair.roomy)
    async with Client(pair.small.base_url) as client:
        hogs = [await start(client, list(range(300 + n, 340 + n)), 1400) for n in range(2)]
        await asyncio.gather(*(hog.wait_for(1) for hog in hogs))
        stream = await start(client)
        await in_phase(pair.small, RequestInfo.WAITING)
        (move,) = await migrate(pair.small, pair.roomy, rule=("NUM_REQ", order, 1))
        result = await stream.result()
        assert not any(hog.done for hog in hogs), "it had not waited for long"
        for hog in hogs:
            await hog.disconnect()
    assert (move.phase, move.reason, move.mode) == ("moved", "", "waiting"), move.detail
    assert (move.recomputed_tokens, move.copied_bytes) == (0, 0)
    assert result.token_ids == expected
    await assert_conserved(before)


async def test_half_prefilled(pair: Pair) -> None:
    prompt = [100 + index * 7 % 900 for index in range(2800)]
    before = {server: await wait_idle(server) for server in pair}
    expected = await unmoved(pair.small, prompt)
    async with Client(pair.small.base_url) as client:
        stream = await start(client, prompt)
        await in_phase(pair.small, RequestInfo.PREFILL)
        move = await move_stream(pair.small, pair.roomy, stream, method="blocking")
        result = await stream.result()
    assert (move.phase, move.mode) == ("moved", "blocking"), f"{move.reason} {move.detail}"
    assert move.context_tokens == len(prompt), "the prefill had ended"
    assert move.copied_bytes > 0
    assert move.recomputed_tokens == 0
    assert result.token_ids == expected
    await assert_conserved(before)


async def test_preempted(pair: Pair) -> None:
    prompt = [100 + index * 7 % 900 for index in range(1400)]
    before = {server: await wait_idle(server) for server in pair}
    expected = await unmoved(pair.small, prompt, 600)
    async with Client(pair.small.base_url) as client:
        streams = [await start(client, prompt, 600) for _ in range(2)]
        victim = await in_phase(pair.small, RequestInfo.PREEMPTED)
        (move,) = await migrate(pair.small, pair.roomy, request_ids=[victim])
        results = await asyncio.gather(*(stream.result() for stream in streams))
    assert (move.phase, move.mode) == ("moved", "recompute"), f"{move.reason} {move.detail}"
    assert move.recomputed_tokens == move.context_tokens - 1 > len(prompt)
    assert [result.token_ids for result in results] == [expected, expected]
    await assert_conserved(before)
