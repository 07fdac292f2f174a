# SPDX-License-Identifier: Apache-2.0
"""Engines with the V2 runner and asynchronous scheduling that hang, die or are drained: every stream goes on with every
token exactly once, with steps in flight when it happens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import Any

import pytest

from tests.integration.test_drain import exit_code
from tests.integration.test_lost_owner import KILLED_S, STOPPED_S, assert_goes_on, engine_of, stopped, worker_of
from tests.integration.test_rescue import awake, rescued, status_of
from tests.runner_v2.conftest import Cast
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Server
from tests.support.moves import move_stream

pytestmark = pytest.mark.asyncio

LENGTH = 90
AT = 15
"""Tokens that have arrived when the story begins."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "seeded": {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.3, "logprobs": 2},
}


async def begin(client: Client, sampling: str, length: int = LENGTH) -> Stream:
    tokens = [100 + index * 7 % 900 for index in range(200)]
    return await client.complete(tokens, length, ignore_eos=True, cache_salt=uuid.uuid4().hex, **SAMPLINGS[sampling])


async def undisturbed(server: Server) -> dict[str, Stream]:
    async with Client(server.base_url) as client:
        return {sampling: await (await begin(client, sampling)).result() for sampling in SAMPLINGS}


@pytest.mark.full
async def test_a_worker_hangs_and_wakes_up(cast: Cast) -> None:
    """Its requests go on at the peer with their KV cache, one token computed; what it computed late is published
    nowhere."""
    victim = cast.small
    expected = await undisturbed(cast.a)
    before = await status_of(cast.a)
    async with Client(victim.base_url) as client:
        streams = {sampling: await begin(client, sampling) for sampling in SAMPLINGS}
        for stream in streams.values():
            await stream.wait_for(AT)
        async with stopped(worker_of(victim)):
            for stream in streams.values():
                await stream.wait_for(len(stream.token_ids) + AT)
        for sampling, stream in streams.items():
            assert_goes_on(await stream.result(), expected[sampling], STOPPED_S)
    assert await rescued(before, cast.a) == (2, 2)
    await awake(victim)
    await asyncio.gather(wait_idle(victim), wait_idle(cast.a))
    again = await undisturbed(victim)
    assert [it.token_ids for it in again.values()] == [it.token_ids for it in expected.values()]


async def test_the_owner_is_killed(cast: Cast) -> None:
    """A guest is replayed by its origin, and a request of its own by its API server, which outlives the engine."""
    victim = cast.small
    expected = await undisturbed(cast.a)
    async with Client(victim.base_url) as client, Client(cast.a.base_url) as elsewhere:
        guest = await begin(elsewhere, "seeded")
        await guest.wait_for(AT)
        assert (await move_stream(cast.a, victim, guest)).live
        own = await begin(client, "greedy")
        await asyncio.gather(own.wait_for(AT), guest.wait_for(2 * AT))
        engine_of(victim).kill()
        assert_goes_on(await guest.result(), expected["seeded"], KILLED_S)
        assert_goes_on(await own.result(), expected["greedy"], KILLED_S)
    await wait_idle(cast.a)


@pytest.mark.full
async def test_drain(cast: Cast) -> None:
    """SIGTERM: all that it has moves to its peer, live, and it ends when its last stream has."""
    leaver = cast.b
    expected = await undisturbed(cast.a)
    async with Client(leaver.base_url) as client:
        streams = {sampling: await begin(client, sampling) for sampling in SAMPLINGS}
        for stream in streams.values():
            await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        for sampling, stream in streams.items():
            assert_goes_on(await stream.result(), expected[sampling], 3.0)
    assert await exit_code(leaver) == 0
    assert "2 moved away" in leaver.log_text()
    await wait_idle(cast.a)
