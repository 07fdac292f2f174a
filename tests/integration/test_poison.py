# SPDX-License-Identifier: Apache-2.0
"""A request of which every engine dies: it takes two of them, and whoever was beside it goes on.

Three engines that know each other. The poison is a token in a prompt: two workers are killed by the first step of a
request that has it, the third engine by any step, before it can say that it has the request. And one that vLLM has by
itself: its V2 runner ends with more than 128 stop tokens that are masked until `min_tokens`.

Or the engine ends while it compiles a grammar, and the request was in no step.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_STOP_TOKEN_IDS

from tests.integration.test_lost_owner import has_engine
from tests.llumlet.fake_agent import until
from tests.support.client import Client, Stream, StreamFailed
from tests.support.conservation import wait_idle
from tests.support.failures import failure
from tests.support.faults import with_faults
from tests.support.harness import Fleet, Server, ServerSpec, free_port

pytestmark = pytest.mark.asyncio

POISON = 999
PROMPTS = [[100 + index * step % 800 for index in range(80)] for step in (7, 11, 13, 17)]
LENGTH = 300
V2_LENGTH = 140
AT = 40
"""Tokens that have arrived when the poison comes."""
ENDS_S = 60.0


def three(model: Path, **fields: Any) -> list[ServerSpec]:
    """Each knows the others."""
    ports = {name: free_port() for name in "abc"}
    specs = []
    for name, port in ports.items():
        peers = ",".join(f"127.0.0.1:{other}" for other in ports.values() if other != port)
        flags = ("--dtype", "float32", "--llumlet-port", str(port), "--llumlet-peers", peers)
        specs.append(ServerSpec(model, name=name, instance_id=name, flags=flags, executor="mp", **fields))
    return specs


def dying(spec: ServerSpec, point: str) -> ServerSpec:
    fault = {"point": point, "token": POISON, "action": "kill"}
    return dataclasses.replace(spec, env=with_faults([fault]))


@pytest.fixture
def servers(model_dir: Path, log_dir: Path) -> Iterator[list[Server]]:
    points = ("worker.model", "loop.model", "loop.model")
    with Fleet(log_dir / "poison") as fleet:
        yield fleet.start(*map(dying, three(model_dir), points))


@pytest.fixture
def grammar_servers(model_dir: Path, log_dir: Path) -> Iterator[list[Server]]:
    with Fleet(log_dir / "poison_grammar") as fleet:
        yield fleet.start(*(dying(spec, "engine.grammar") for spec in three(model_dir)))


@pytest.fixture
def v2_servers(model_dir: Path, log_dir: Path) -> Iterator[list[Server]]:
    with Fleet(log_dir / "poison_v2") as fleet:
        yield fleet.start(*three(model_dir, runner="v2", max_model_len=1500))


async def begin(client: Client, number: int, *more: int, length: int = LENGTH, **parameters: Any) -> Stream:
    return await client.complete([*PROMPTS[number], *more], length, ignore_eos=True, temperature=0.0, **parameters)


@failure(
    "every engine dies of a request",
    "it is in a step",
    "two do, the second of it alone on trial; it ends with an error; who was beside it is tried and goes on",
)
async def test_two_engines_die_of_it(servers: list[Server]) -> None:
    await assert_two_die(servers, LENGTH, lambda client: begin(client, 3, POISON))
    (survivor,) = (server for server in servers[1:] if has_engine(server))
    async with Client(survivor.base_url, headers={"X-Llumnix-Attempt": "2"}) as client:
        poison = await begin(client, 3, POISON)  # and its gateway has seen an instance die of it
        with pytest.raises(StreamFailed, match=r"2 engines died or hung.*\(unknown here, [bc]\).*not sent to a third"):
            await asyncio.wait_for(poison.result(), ENDS_S)


@pytest.mark.full
async def test_two_v2_engines_die_of_their_own(v2_servers: list[Server]) -> None:
    stops = list(range(100, 100 + MAX_NUM_STOP_TOKEN_IDS + 1))
    await assert_two_die(v2_servers, V2_LENGTH, lambda client: begin(client, 3, min_tokens=5, stop_token_ids=stops))


@failure(
    "every engine dies of a request",
    "its grammar is being compiled; it is in no step",
    "two do, the second of it alone on trial; it ends with an error; who was in a step is tried and goes on",
)
@pytest.mark.full
async def test_two_engines_die_of_its_grammar(grammar_servers: list[Server]) -> None:
    grammar = {"regex": "a+"}
    await assert_two_die(grammar_servers, LENGTH, lambda client: begin(client, 3, POISON, structured_outputs=grammar))


async def assert_two_die(servers: list[Server], length: int, poisoned: Callable[[Client], Awaitable[Stream]]) -> None:
    home = servers[0]
    async with Client(servers[2].base_url) as client:
        expected = [await (await begin(client, number, length=length)).result() for number in range(len(PROMPTS) - 1)]
    async with Client(home.base_url) as client:
        healthy = [await begin(client, number, length=length) for number in range(len(expected))]
        for stream in healthy:
            await stream.wait_for(AT)
        poison = await poisoned(client)
        with pytest.raises(StreamFailed, match=r"2 engines died or hung.*\(a, [bc]\).*not sent to a third"):
            await asyncio.wait_for(poison.result(), ENDS_S)
        results = [await stream.result() for stream in healthy]
    assert [stream.token_ids for stream in results] == [stream.token_ids for stream in expected]
    assert {stream.finish_reason for stream in results} == {"length"}
    await until(lambda: not home.alive(), ENDS_S)
    (survivor,) = (server for server in servers[1:] if has_engine(server))
    await wait_idle(survivor)
