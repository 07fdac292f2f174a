# SPDX-License-Identifier: Apache-2.0
"""KV caches of several kinds under the V2 runner and asynchronous scheduling: there and back, with the tokens and log
probabilities of an unmoved run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.integration.test_hybrids import PROMPT
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import migrate
from tests.support.other_models import OTHER, build

LENGTH = 64
FAMILIES = ["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt-oss", "windows", "qwen3-next"))]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    model = OTHER[request.param]
    with Fleet(tmp_path_factory.mktemp(request.param)) as fleet:
        specs = [
            ServerSpec(
                build(model),
                name=name,
                instance_id=name,
                runner="v2",
                max_model_len=1024,
                flags=("--dtype", model.dtype),
            )
            for name in "ab"
        ]
        yield fleet.start(*specs)


async def begin(client: Client) -> Stream:
    return await client.complete(PROMPT, LENGTH, ignore_eos=True, logprobs=2, cache_salt=uuid.uuid4().hex)


@pytest.mark.asyncio
async def test_there_and_back(pair: list[Server]) -> None:
    """The prompt is longer than four windows."""
    a, b = pair
    for server in pair:
        assert "behind AsyncScheduler, steps in flight: 2" in server.log_text()
    async with Client(a.base_url) as client:
        unmoved, again = [await (await begin(client)).result() for _ in range(2)]
        assert outcome(unmoved) == outcome(again), "void: two unmoved runs differ"
        moves = []
        stream = await begin(client)
        for count, source, destination in ((12, a, b), (30, b, a)):
            held = await held_by(source, stream, count)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        moved = await stream.result()
    assert [(it.phase, it.mode, it.recomputed_tokens) for it in moves] == [("moved", "live", 0)] * 2, moves
    assert outcome(moved) == outcome(unmoved)
    assert len(set(moved.token_ids)) > LENGTH / 2, "a loop: too little depends on what came before"
    for server in pair:
        await wait_idle(server)
