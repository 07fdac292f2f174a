# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4 under the V2 runner and asynchronous scheduling: windows, compressed tokens, and those that are not
compressed yet move, there and back, with the tokens and log probabilities of an unmoved run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.test_matrix import outcome
from tests.integration.test_sensitivity import arm
from tests.runner_v2.there_and_back import LENGTH, assert_as_unmoved
from tests.support.client import Client, Stream
from tests.support.deepseek_v4 import FLAGS, WINDOW, build
from tests.support.faults import with_faults
from tests.support.harness import Fleet, ServerSpec
from tests.support.moves import move_stream

pytestmark = [pytest.mark.asyncio, pytest.mark.full]

PROMPT = [100 + index * 41 % 900 for index in range(240)]
"""Longer than seven windows; 16 tokens before the next 128 are compressed into one, and the next row of blocks begins.
"""
AT = 3
"""Tokens that have arrived when a request moves. The source then has one block of each of both groups with windows, one
of compressed tokens, two or three of the last four tokens and those before, and the latest ones of 128."""
PLACES = {
    "a window": {"which": 0, "offset": 28 * 576},
    "the other layers' window": {"which": 1, "offset": 28 * 576},
    "compressed tokens": {"which": 2, "offset": 17280},
    "what four will be made of": {"which": 4, "offset": 17280},
    "what 128 will be made of": {"which": -1},
}
"""Blocks of the last copy, one of each group, and where in it lies what counts. Indexers, which lie first, choose among
more than 512 compressed tokens only."""
assert len(PROMPT) > 7 * WINDOW


class Pair:
    """`a`, and `b`, which corrupts what a fault names when it arrives: none until its file is there, and once."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self.faults: list[dict[str, Any]] = [
            {"point": "mover.pulled", "action": "corrupt", "final": True, "layer": 0, "offset": 0, "bytes": 8192,
             "file": str(directory / str(number)), **place}
            for number, place in enumerate(PLACES.values())
        ]  # fmt: skip
        env = with_faults(self.faults)
        self.a, self.b = fleet.start(self._spec("a"), self._spec("b", env=env))

    @staticmethod
    def _spec(name: str, **fields: Any) -> ServerSpec:
        return ServerSpec(build(), name=name, instance_id=name, runner="v2", max_model_len=1024, flags=FLAGS, **fields)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("deepseek-v4")
    with Fleet(directory) as fleet:
        yield Pair(fleet, directory)


async def begin(client: Client) -> Stream:
    return await client.complete(PROMPT, LENGTH, ignore_eos=True, logprobs=2, cache_salt=uuid.uuid4().hex)


async def test_there_and_back(pair: Pair) -> None:
    await assert_as_unmoved([pair.a, pair.b], begin)


async def test_corrupted_bytes_of_any_group_do_not_go_unnoticed(pair: Pair) -> None:
    """Log probabilities show those of a single one of many compressed tokens."""
    unchanged = []
    async with Client(pair.a.base_url) as client:

        async def moved() -> Any:
            stream = await begin(client)
            await stream.wait_for(AT)
            move = await move_stream(pair.a, pair.b, stream, method="live")
            assert move.live, f"{move.phase} {move.reason} {move.detail}"
            assert len(PROMPT) + AT <= move.context_tokens <= len(PROMPT) + 14, "void: the blocks are others"
            return outcome(await stream.result())

        expected = await moved()
        for name, fault in zip(PLACES, pair.faults, strict=True):
            arm(fault)
            if await moved() == expected:
                unchanged.append(name)
        assert await moved() == expected
    assert not unchanged, f"went unnoticed: {unchanged}"
