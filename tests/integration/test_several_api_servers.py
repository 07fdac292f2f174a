# SPDX-License-Identifier: Apache-2.0
"""One engine behind two API server processes, each the origin of its own streams."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from benchmarks.client import Client, Stream
from benchmarks.harness import Fleet, ServerSpec, free_port
from benchmarks.moves import move_stream
from tests.integration.test_lost_owner import AT, KILLED_S, LENGTH, PROMPT, ends, engine_of
from tests.support.conservation import wait_idle
from tests.support.failures import failure

pytestmark = pytest.mark.asyncio


async def begin(client: Client, count: int) -> list[Stream]:
    """Streams on connections of their own: the kernel spreads those over the processes."""
    salts = [uuid.uuid4().hex for _ in range(count)]
    return [await client.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=salt) for salt in salts]


@failure(
    "kill -9 of the engine behind several API servers",
    "not moving",
    "each API server replays its own streams on a peer; all of them end after their last stream",
)
async def test_streams_of_both_move_and_outlive_their_engine(model_dir: Path, log_dir: Path) -> None:
    with Fleet(log_dir / "several") as fleet:
        port = free_port()
        fp32 = ("--dtype", "float32")
        haven_flags = (*fp32, "--llumlet-port", str(port))
        twin_flags = (*fp32, "--api-server-count", "2", "--llumlet-peers", f"127.0.0.1:{port}")
        haven, twin = fleet.start(
            ServerSpec(model_dir, name="haven", instance_id="haven", flags=haven_flags),
            ServerSpec(model_dir, name="twin", instance_id="twin", flags=twin_flags),
        )
        async with Client(twin.base_url) as client:
            expected = await (await begin(client, 1))[0].result()
            streams = await begin(client, 6)
            for stream in streams:
                await stream.wait_for(AT)
            for stream in streams[:2]:
                assert (await move_stream(twin, haven, stream)).live
            engine_of(twin).kill()
            for stream in streams:
                await stream.result()
                assert stream.token_ids == expected.token_ids
                assert max(stream.gaps) < KILLED_S
        await ends(twin)
        await wait_idle(haven)
