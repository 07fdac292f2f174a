# SPDX-License-Identifier: Apache-2.0
"""Images, prompt embeddings and custom logits processors under the V2 runner and asynchronous scheduling: there and
back, with the tokens and log probabilities of an unmoved run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.exactness.test_matrix import outcome
from tests.integration.test_images import Begin, feel, look, mixed
from tests.runner_v2.there_and_back import LENGTH, assert_as_unmoved
from tests.support.client import Client, Stream
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.vision_models import VISION, build

FLAGS = ("--dtype", "float32", "--enable-prompt-embeds", "--logprobs-mode", "processed_logprobs",
         "--logits-processors", "tests.runner_v2.processor:AvoidsTheLatest")  # fmt: skip
PROMPT = list(range(100, 160))


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
        pytest.param(mixed, (71,), id="embeddings-among-tokens", marks=pytest.mark.rest),
    ],
)
async def test_there_and_back(pair: list[Server], begin: Begin, arguments: tuple[int, ...]) -> None:
    shown = {"logprobs": 2} if begin is feel else {"logprobs": True, "top_logprobs": 2}
    await assert_as_unmoved(pair, lambda client: begin(client, *arguments, length=LENGTH, **shown))


@pytest.mark.asyncio
async def test_a_custom_logits_processor(pair: list[Server]) -> None:
    """It goes by the tokens so far, whichever engine has drawn them, and by what the request's `vllm_xargs` say."""

    async def begin(client: Client, **xargs: Any) -> Stream:
        salt = uuid.uuid4().hex
        return await client.complete(PROMPT, LENGTH, ignore_eos=True, logprobs=2, cache_salt=salt, **xargs)

    async with Client(pair[0].base_url) as client:
        plain = await (await begin(client)).result()
        lists: list[list[int]] = [[], plain.token_ids]
        others = [await (await begin(client, vllm_xargs={"avoid": avoided})).result() for avoided in lists]
    found = {str(outcome(stream)) for stream in (plain, *others)}
    assert len(found) == 3, "neither the tokens so far nor the list make a difference"
    await assert_as_unmoved(pair, lambda client: begin(client, vllm_xargs={"avoid": lists[1]}))
