# SPDX-License-Identifier: Apache-2.0
"""Real engines under a policy that packs: what little decodes comes to one of them, and every stream stays exact."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from pathlib import Path

import pytest

from llumsched.up.ports import free_port
from tests.integration.test_cluster import PROMPT, RESCHEDULING, homes
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.control import Control, rescheduling
from tests.support.harness import Fleet, ServerSpec

pytestmark = pytest.mark.rest

LENGTH = 3000
"""Tokens of a stream, which none of them comes to."""
AFTER = 40
"""Tokens that each stream has after the last move before it is compared."""
POLICY = ("--rescheduling-policies", "binpacking_consolidation", "--tpot-slo", "60000")
"""With an objective that every engine meets: all are idle enough to be emptied."""


@pytest.mark.asyncio
async def test_the_emptier_engine_gives_all_that_decodes_to_the_fuller(model_dir: Path, log_dir: Path) -> None:
    cms, logs = f"127.0.0.1:{free_port()}", log_dir / "packing"
    flags = ("--dtype", "float32", "--llumlet-cms", cms)
    spec = ServerSpec(model_dir, max_model_len=4096, num_kv_blocks=700, flags=flags)
    with Fleet(logs) as fleet:
        control = Control(logs, f"listen://{cms}", model=model_dir, schedulers=[(*RESCHEDULING, *POLICY)])
        try:
            few, many = fleet.start(*(dataclasses.replace(spec, name=name, instance_id=name) for name in "ab"))
            await control.knows(2)
            async with Client(few.base_url) as emptied, Client(many.base_url) as filled:
                placed = [(filled, 3), (emptied, 2)]
                streams = [
                    await engine.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=uuid.uuid4().hex)
                    for engine, number in placed
                    for _ in range(number)
                ]
                while (await homes([many], streams))[many.name] < len(streams):
                    assert not any(stream.done for stream in streams), await rescheduling(control.scheduler_url)
                    await asyncio.sleep(0.1)
                for stream in streams:
                    await stream.wait_for(len(stream.token_ids) + AFTER)
                for stream in streams:
                    await stream.disconnect()
                longest = max((stream.token_ids for stream in streams), key=len)
                assert all(stream.token_ids == longest[: len(stream.token_ids)] for stream in streams)
            told = await rescheduling(control.scheduler_url)
            moves = {(one["policy"], one["source"], one["destination"]) for one in told["moves"] if one["num_moved"]}
            assert moves == {("binpacking_consolidation", few.name, many.name)}, json.dumps(told["moves"])
            for engine in (few, many):
                await wait_idle(engine)
        finally:
            control.stop()
