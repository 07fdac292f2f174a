# SPDX-License-Identifier: Apache-2.0
"""KV caches of several kinds under the V2 runner and asynchronous scheduling: there and back, with the tokens and log
probabilities of an unmoved run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.integration.test_hybrids import PROMPT
from tests.runner_v2.there_and_back import LENGTH, assert_as_unmoved
from tests.support.client import Client, Stream
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.other_models import OTHER, build

pytestmark = pytest.mark.rest

MORE = ("gpt-oss", "windows", "qwen3-next", "nemotron-h", "mamba2")
FAMILIES = ["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    model = OTHER[request.param]
    with Fleet(tmp_path_factory.mktemp(request.param)) as fleet:
        specs = [
            ServerSpec(build(model), name=name, instance_id=name, runner="v2", max_model_len=1024, flags=model.flags)
            for name in "ab"
        ]
        yield fleet.start(*specs)


@pytest.mark.asyncio
async def test_there_and_back(pair: list[Server]) -> None:
    """The prompt is longer than four windows."""

    async def begin(client: Client) -> Stream:
        return await client.complete(PROMPT, LENGTH, ignore_eos=True, logprobs=2, cache_salt=uuid.uuid4().hex)

    await assert_as_unmoved(pair, begin)
