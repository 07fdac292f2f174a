# SPDX-License-Identifier: Apache-2.0
"""Images and prompt embeddings under the V2 runner and asynchronous scheduling: there and back, with the tokens and log
probabilities of an unmoved run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.test_images import Begin, feel, look, mixed
from tests.runner_v2.there_and_back import LENGTH, assert_as_unmoved
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.vision_models import VISION, build

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
    shown = {"logprobs": 2} if begin is feel else {"logprobs": True, "top_logprobs": 2}
    await assert_as_unmoved(pair, lambda client: begin(client, *arguments, length=LENGTH, **shown))
