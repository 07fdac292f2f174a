# SPDX-License-Identifier: Apache-2.0
"""Images and prompt embeddings under the V2 runner and asynchronous scheduling: there and back, with the tokens and log
probabilities of an unmoved run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness.test_matrix import held_by, outcome
from tests.integration.test_images import Begin, feel, look, mixed
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import migrate
from tests.support.vision_models import VISION, build

LENGTH = 64
FLAGS = ("--dtype", "float32", "--enable-prompt-embeds")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    model = build(VISION["paddleocr-vl"])
    with Fleet(tmp_path_factory.mktemp("inputs")) as fleet:
        specs = [
            ServerSpec(model, name=name, instance_id=name, runner="v2", max_model_len=1024, flags=FLAGS)
            for name in "ab"
        ]
        yield fleet.start(*specs)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("begin", "arguments"),
    [
        pytest.param(look, (1, 2), id="images"),
        pytest.param(feel, (70,), id="embeddings", marks=pytest.mark.full),
        pytest.param(mixed, (71,), id="embeddings-among-tokens"),
    ],
)
async def test_there_and_back(pair: list[Server], begin: Begin, arguments: tuple[int, ...]) -> None:
    a, b = pair
    shown = {"logprobs": 2} if begin is feel else {"logprobs": True, "top_logprobs": 2}
    async with Client(a.base_url) as client:
        unmoved, again = [await (await begin(client, *arguments, length=LENGTH, **shown)).result() for _ in range(2)]
        assert outcome(unmoved) == outcome(again), "void: two unmoved runs differ"
        stream = await begin(client, *arguments, length=LENGTH, **shown)
        moves = []
        for count, source, destination in ((12, a, b), (30, b, a)):
            held = await held_by(source, stream, count)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        moved = await stream.result()
    assert [(it.phase, it.mode, it.recomputed_tokens) for it in moves] == [("moved", "live", 0)] * 2, moves
    assert outcome(moved) == outcome(unmoved)
    assert len(set(moved.token_ids)) > LENGTH / 3, "a loop: too little depends on what came before"
    for server in pair:
        await wait_idle(server)
