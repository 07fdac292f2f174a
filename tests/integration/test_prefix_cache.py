# SPDX-License-Identifier: Apache-2.0
"""What a scheduler believes of a real engine's prefix cache is what vLLM then finds there, and requests go there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumlet.contract.block_hashes import held_names
from llumlet.contract.client import LlumletClient
from llumlet.contract.types import CachedPrefixRequest
from llumlet.process.credentials import NONE
from llumsched.cluster.instance import Instance
from llumsched.prefix.hits import PrefixHits
from llumsched.prefix.index import PrefixIndex
from llumsched.prefix.watches import CacheWatches
from llumsched.request import Request
from llumsched.up.ports import free_port
from tests.integration.conftest import StartServer
from tests.integration.test_command_line import llumnix
from tests.llumsched.cases import table
from tests.llumsched.gateway.support import until
from tests.support.client import Client, Stream
from tests.support.control import Control
from tests.support.harness import Server

pytestmark = pytest.mark.asyncio

SIZE = 32
NUM_BLOCKS = 60
CACHED = ("--enable-prompt-tokens-details",)
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


class Belief:
    """What one scheduler knows of one engine."""

    def __init__(self, instance: Instance, llumlet: str) -> None:
        self._instance = instance
        self._llumlet = llumlet
        self._table = table(instance)
        self.hits = PrefixHits(PrefixIndex(10_000))
        self.watches = CacheWatches(self.hits, NONE)
        self.hits.appeared(instance)
        self.watches.appeared(instance)

    async def until_current(self, prompt: list[int], salt: str) -> None:
        """Until what has been told of the prompt's blocks is what the engine says when it is asked: it tells what it
        has lost in its own time."""
        asked = CachedPrefixRequest(blocks=held_names(prompt, SIZE, salt), block_size=SIZE)
        async with asyncio.timeout(10), LlumletClient(self._llumlet) as llumlet:
            while self.hit([*prompt, 1], salt) != (await llumlet.cached_prefix(asked)).num_tokens:  # noqa: ASYNC110 - feeds tell nobody
                await asyncio.sleep(0.01)

    def hit(self, prompt: list[int], salt: str = "") -> int:
        names = held_names(prompt, SIZE, salt)
        asked = Request(prompt_num_tokens=len(prompt), prompt_blocks=names, prompt_block_size=SIZE)
        (values,) = self.hits.of_request(asked, self._table)
        return int(values[0])


@contextlib.asynccontextmanager
async def belief_of(engine: Server) -> AsyncIterator[Belief]:
    async with LlumletClient(str(engine.llumlet)) as llumlet:
        metadata = await llumlet.get_instance_metadata()
    belief = Belief(Instance(metadata, None, 0.0), str(engine.llumlet))
    try:
        yield belief
    finally:
        await belief.watches.close()


def cached_tokens(stream: Stream) -> int:
    """As vLLM counts them."""
    assert stream.usage is not None
    return int((stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def test_predicted_prefix_hits_are_those_of_vllm(start_server: StartServer) -> None:
    """Through growth, evictions, salts and a reset; and a scheduler that comes later believes the same."""
    engine = start_server(num_kv_blocks=NUM_BLOCKS, max_model_len=1024, block_size=SIZE, flags=CACHED, env=DEV)
    draw = random.Random(3)
    families = [[draw.randrange(100, 1000) for _ in range(700)] for _ in range(4)]
    seen: list[tuple[int, int]] = []
    async with belief_of(engine) as belief, Client(engine.base_url) as client:
        await until(lambda: bool(belief.watches.in_sync))
        for number in range(30):
            prompt = draw.choice(families)[: draw.randrange(40, 700)]
            salt = draw.choice(["", "", "salted"])
            await belief.until_current(prompt, salt)
            believed = belief.hit(prompt, salt)
            stream = await client.complete(prompt, draw.randrange(1, 40), cache_salt=salt or None, ignore_eos=True)
            result = await stream.result()
            seen.append((believed, cached_tokens(result)))
            # The answer is in the cache, too.
            whole = [*prompt, *result.token_ids[:-1]]
            full = len(whole) // SIZE * SIZE
            await until(functools.partial(lambda *asked: belief.hit(*asked[:2]) == asked[2], [*whole, 1], salt, full))
            if number == 20:
                async with aiohttp.ClientSession() as session, session.post(f"{engine.base_url}/reset_prefix_cache"):
                    await until(lambda: not any(belief.hit(family) for family in families))
        assert [said for said, _ in seen] == [found for _, found in seen]
        hits = [found for _, found in seen if found]
        assert len(hits) > 8, "there were hits to be believed"
        assert belief.hits.num_resyncs == 0
        async with belief_of(engine) as late:
            await until(lambda: bool(late.watches.in_sync))
            prompts = [family[:length] for family in families for length in range(SIZE, 700, SIZE)]
            assert [late.hit(prompt) for prompt in prompts] == [belief.hit(prompt) for prompt in prompts]
            assert any(late.hit(prompt) for prompt in prompts)


@pytest.mark.rest
async def test_a_conversation_stays_where_its_cache_is(
    start_server: StartServer, model_dir: Path, tmp_path: Path
) -> None:
    cms = f"127.0.0.1:{free_port()}"
    policy = ("--scheduling-policy", "prefix-cache")
    async with Control(tmp_path, f"listen://{cms}", model=model_dir, schedulers=[policy]) as control:
        engines = [start_server(name=name, block_size=SIZE, flags=(*CACHED, "--llumlet-cms", cms)) for name in "ab"]
        await control.knows(2)
        async with Client(control.gateway_url) as client:
            await (await client.chat([{"role": "user", "content": "hello"}], 1)).result()  # the gateway learns
            turns: dict[str, list[tuple[int, int]]] = {}
            messages = {
                name: [{"role": "user", "content": f"{name} tells a long story. " + f"And then {name} went on. " * 40}]
                for name in ("anna", "bert", "carl")
            }
            for _ in range(4):
                for name, told in messages.items():
                    await asyncio.sleep(0.3)
                    stream = await (await client.chat(told, 24, ignore_eos=True)).result()
                    assert stream.usage is not None
                    turns.setdefault(name, []).append((stream.usage["prompt_tokens"], cached_tokens(stream)))
                    told += [
                        {"role": "assistant", "content": stream.text},
                        {"role": "user", "content": "And what happened after that, in a few words?"},
                    ]
        for told in turns.values():
            for (before, _), (_, cached) in itertools.pairwise(told):
                assert cached >= before // SIZE * SIZE - SIZE, f"all that was there the turn before: {told}"
        code, text = await llumnix("explain", "--scheduler", control.scheduler_url.removeprefix("http://"), "--json")
        assert code == 0, text
        (stage,) = json.loads(text)["stages"]
        assert {one["kv_cache_hit_len"] for one in stage["instances"]} == {0}, "no prompt was told"
        served = [await _num_requests(engine) for engine in engines]
        assert min(served) > 0, f"conversations begin where there is least to do: {served}"


async def _num_requests(engine: Server) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.base_url}/metrics") as answer:
        text = await answer.text()
    lines: list[Any] = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_queries_total")]
    return float(lines[0].rpartition(" ")[2])
