# SPDX-License-Identifier: Apache-2.0
"""A request of which every engine dies: it takes two of them, and whoever was beside it goes on.

Three engines that know each other. The poison is a token in a prompt: two workers are killed by the first step of a
request that has it, the third engine by any step, before it can say that it has the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.client import Client, Stream, StreamFailed
from benchmarks.harness import Fleet, Server, ServerSpec, free_port
from tests.integration.test_lost_owner import has_engine
from tests.llumlet.fake_agent import until
from tests.support.conservation import wait_idle
from tests.support.failures import failure

pytestmark = pytest.mark.asyncio

POISON = 999
PROMPTS = [[100 + index * step % 800 for index in range(80)] for step in (7, 11, 13, 17)]
LENGTH = 300
AT = 40
"""Tokens that have arrived when the poison comes."""
ENDS_S = 60.0


def spec(model: Path, name: str, point: str, port: int, ports: list[int]) -> ServerSpec:
    peers = ",".join(f"127.0.0.1:{other}" for other in ports if other != port)
    fault = {"point": point, "token": POISON, "action": "kill"}
    flags = ("--dtype", "float32", "--llumlet-port", str(port), "--llumlet-peers", peers)
    return ServerSpec(model, name=name, instance_id=name, flags=flags, env={"LLUMNIX_FAULTS": json.dumps([fault])})


@pytest.fixture(scope="module")
def servers(model_dir: Path, log_dir: Path) -> Iterator[list[Server]]:
    points = {"a": "worker.request", "b": "loop.request", "c": "loop.request"}
    ports = [free_port() for _ in points]
    with Fleet(log_dir / "poison") as fleet:
        specs = [
            spec(model_dir, name, point, port, ports) for (name, point), port in zip(points.items(), ports, strict=True)
        ]
        yield fleet.start(*specs)


async def begin(client: Client, number: int, *more: int) -> Stream:
    return await client.complete([*PROMPTS[number], *more], LENGTH, ignore_eos=True, temperature=0.0)


@failure(
    "every engine dies of a request",
    "it is in a step",
    "two do, the second of it alone on trial; it ends with an error; who was beside it is tried and goes on",
)
async def test_two_engines_die_of_it(servers: list[Server]) -> None:
    home = servers[0]
    async with Client(servers[2].base_url) as client:
        expected = [await (await begin(client, number)).result() for number in range(len(PROMPTS) - 1)]
    async with Client(home.base_url) as client:
        healthy = [await begin(client, number) for number in range(len(expected))]
        for stream in healthy:
            await stream.wait_for(AT)
        poison = await begin(client, 3, POISON)
        with pytest.raises(StreamFailed, match=r"2 engines died or hung.*\(a, [bc]\).*not sent to a third"):
            await asyncio.wait_for(poison.result(), ENDS_S)
        results = [await stream.result() for stream in healthy]
    assert [stream.token_ids for stream in results] == [stream.token_ids for stream in expected]
    assert {stream.finish_reason for stream in results} == {"length"}
    await until(lambda: not home.alive(), ENDS_S)
    (survivor,) = (server for server in servers[1:] if has_engine(server))
    await wait_idle(survivor)
