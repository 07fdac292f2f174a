# SPDX-License-Identifier: Apache-2.0
"""A stream whose engine is lost goes on where its tokens are cached, and is not computed a second time there."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import InstanceStatus
from tests.integration.test_lost_owner import engine_of, stopped
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec, free_port

pytestmark = [pytest.mark.asyncio, pytest.mark.rest]

SIZE = 32
"""Tokens of a block."""
PROMPT_TOKENS = 10 * SIZE
LENGTH = 120
AT = 40
"""Tokens that have arrived when the engine stops."""


class Cast(NamedTuple):
    home: Server
    survivors: tuple[Server, Server]


@pytest.fixture
def cast(model_dir: Path, tmp_path: Path) -> Iterator[Cast]:
    ports = [free_port(), free_port()]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    flags = {"home": ("--llumlet-peers", peers)} | {f"survivor-{port}": ("--llumlet-port", str(port)) for port in ports}
    with Fleet(tmp_path) as fleet:
        home, one, other = fleet.start(
            *(
                ServerSpec(model_dir, name=name, instance_id=name, block_size=SIZE, flags=("--dtype", "float32", *more))
                for name, more in flags.items()
            )
        )
        yield Cast(home, (one, other))


async def status_of(server: Server) -> InstanceStatus:
    async with LlumletClient(str(server.llumlet)) as client:
        return await client.get_instance_status()


async def test_a_lost_stream_goes_on_where_it_is_cached(cast: Cast) -> None:
    """By chance it would go there every second time."""
    draw = random.Random(11)
    for turn in (0, 1, 0):
        cached, uncached = cast.survivors[turn], cast.survivors[1 - turn]
        prompt = [draw.randrange(100, 1000) for _ in range(PROMPT_TOKENS)]
        asked: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, "cache_salt": uuid.uuid4().hex}
        async with Client(cached.base_url) as client:
            expected = await (await client.complete(prompt, LENGTH, **asked)).result()
        before, elsewhere = await status_of(cached), await status_of(uncached)
        async with Client(cast.home.base_url) as client:
            stream = await client.complete(prompt, LENGTH, **asked)
            await stream.wait_for(AT)
            async with stopped(engine_of(cast.home)):
                found = await stream.result()
        assert found.token_ids == expected.token_ids
        after = await status_of(cached)
        assert after.num_adopted == before.num_adopted + 1
        assert after.num_recomputed_tokens - before.num_recomputed_tokens <= SIZE
        assert (await status_of(uncached)).num_adopted == elsewhere.num_adopted
        for server in (cast.home, *cast.survivors):
            await wait_idle(server)
