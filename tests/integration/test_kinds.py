# SPDX-License-Identifier: Apache-2.0
"""Instances that are there for one stage each: placed by stage, and rescheduled among their own kind.

Two prefill and two decode instances behind a real scheduler with its rescheduler inside. No engine hands a request over
between the stages: requests are sent to a decode instance as a gateway that does would send them, and computed there as
a whole. In float32: what is moved must be exact in whatever company.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumsched.up.ports import free_port
from tests.integration.test_cluster import PROMPT, RESCHEDULING, SECONDS, homes
from tests.integration.test_command_line import llumnix
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.control import Control, rescheduling
from tests.support.failures import failure
from tests.support.harness import SERVED_NAME, Fleet, Server, ServerSpec

pytestmark = pytest.mark.asyncio

TYPES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
LENGTH = 3000
"""Tokens of a stream, which none of them comes to."""
AFTER = 40
"""Tokens that each stream has after the last move before it is compared."""
NUM_STREAMS = 6
NUM_BLOCKS = 700
"""Of 32 tokens: room for all streams in one engine."""
NOBODY = "127.0.0.1:1"
"""The place of a llumlet that does not exist."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    engines: dict[str, Server]
    control: Control
    cms: str


@pytest.fixture(scope="module")
def cluster(model_dir: Path, log_dir: Path) -> Iterator[Cluster]:
    cms, logs = f"127.0.0.1:{free_port()}", log_dir / "kinds"
    flags = ("--dtype", "float32", "--llumlet-cms", cms, "--llumlet-instance-type")
    spec = ServerSpec(model_dir, max_model_len=4096, num_kv_blocks=NUM_BLOCKS)
    specs = [
        dataclasses.replace(spec, name=name, instance_id=name, flags=(*flags, kind)) for name, kind in TYPES.items()
    ]
    with Fleet(logs) as fleet:
        control = Control(logs, f"listen://{cms}", model=model_dir, schedulers=[RESCHEDULING])
        try:
            yield Cluster(dict(zip(TYPES, fleet.start(*specs), strict=True)), control, cms)
        finally:
            control.stop()


async def post(control: Control, path: str, body: Any) -> bytes:
    async with (
        aiohttp.ClientSession() as session,
        session.post(control.scheduler_url + path, json=body, raise_for_status=True) as answer,
    ):
        return await answer.read()


async def begin(engine: Client) -> Stream:
    return await engine.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=uuid.uuid4().hex)


async def until_at(cluster: Cluster, name: str, streams: Sequence[Stream], number: int) -> None:
    """Until so many of the streams are at an engine, all of them under way."""
    engine = cluster.engines[name]
    async with asyncio.timeout(SECONDS):
        while (await homes([engine], list(streams)))[name] < number:
            if any(stream.done for stream in streams):
                pytest.fail(f"too late: {json.dumps(await rescheduling(cluster.control.scheduler_url))}")
            await asyncio.sleep(0.1)


async def test_each_stage_is_placed_at_its_kind(cluster: Cluster) -> None:
    await cluster.control.knows(len(TYPES))
    asked: dict[str, Any] = {"model": SERVED_NAME, "prompt_num_tokens": len(PROMPT), "scheduling_mode": "pd_batch"}
    placed = [json.loads(await post(cluster.control, "/schedule", {"id": f"r{one}", **asked})) for one in range(2)]
    results = [one["scheduling_result"] for one in placed]
    assert [[place["infer_type"] for place in result] for result in results] == 2 * [["prefill", "decode"]]
    assert sorted(result[0]["id"] for result in results) == ["p1", "p2"]
    assert sorted(result[1]["id"] for result in results) == ["d1", "d2"]
    await post(cluster.control, "/release", placed)
    assert await cluster.control.num_on_their_way() == 0


@failure(
    "a decode instance is drained and reaches none of those that are to take its requests",
    "decoding",
    "the rescheduler moves them to the other decode instances",
)
@pytest.mark.rest
async def test_decode_instances_are_evened_out_and_emptied(cluster: Cluster) -> None:
    """Into each other only: prefill instances, which are as empty and as able, get nothing and keep their own."""
    await cluster.control.knows(len(TYPES))
    prefill, other, hot, cold = cluster.engines.values()
    async with Client(hot.base_url) as decoding, Client(prefill.base_url) as undisturbed:
        streams = [await begin(decoding) for _ in range(NUM_STREAMS)]
        expected = await begin(undisturbed)
        await until_at(cluster, cold.name, streams, 2)
        await emptied(cluster, hot, cold, streams)
        await go_on(streams, expected)
    assert await moved(cluster) == {(policy, hot.name, cold.name) for policy in ("decode_load", "decode_failover")}
    for engine in (prefill, other, cold):
        await wait_idle(engine)


@failure(
    "a prefill instance is drained and reaches none of those that are to take its requests",
    "computing what it was sent",
    "the rescheduler moves them to the other prefill instances",
)
@pytest.mark.rest
async def test_prefill_instances_are_emptied_into_each_other(cluster: Cluster) -> None:
    leaves, stays = cluster.engines["p1"], cluster.engines["p2"]
    known = await moved(cluster)
    async with Client(leaves.base_url) as leaving, Client(stays.base_url) as undisturbed:
        expected = await begin(undisturbed)
        streams = [await begin(leaving) for _ in range(2)]
        await emptied(cluster, leaves, stays, streams)
        await go_on(streams, expected)
    assert await moved(cluster) - known == {("prefill_failover", leaves.name, stays.name)}
    await wait_idle(stays)


async def go_on(streams: Sequence[Stream], expected: Stream) -> None:
    """As one that nobody disturbs, for a while."""
    for stream in streams:
        await stream.wait_for(len(stream.token_ids) + AFTER)
    for stream in streams:
        await stream.disconnect()
    await expected.wait_for(max(len(stream.token_ids) for stream in streams))
    await expected.disconnect()
    for stream in streams:
        assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]


async def emptied(cluster: Cluster, leaves: Server, stays: Server, streams: Sequence[Stream]) -> None:
    """An engine that is drained by somebody who knows of no other has its requests moved there all the same."""
    drain = llumnix("drain", leaves.name, "--cms", cluster.cms, "--to", NOBODY, "--timeout", "120", "--json")
    draining = asyncio.create_task(drain)
    await until_at(cluster, stays.name, streams, len(streams))
    code, text = await draining
    assert code == 0, text
    assert json.loads(text.splitlines()[-1])["num_moved"] == 0, "none by the drain itself"


async def moved(cluster: Cluster) -> set[tuple[str, str, str]]:
    """By which policy, whence and where."""
    told = (await rescheduling(cluster.control.scheduler_url))["moves"]
    return {(one["policy"], one["source"], one["destination"]) for one in told if one["num_moved"]}
