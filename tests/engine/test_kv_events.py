# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events while requests move between two of its schedulers: who follows them believes in no block that is not
there, whenever the question is answered that the move has asked of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from tests.engine.loop import Loop
from tests.engine.rig import BLOCK_SIZE, Rig, full, window

pytestmark = pytest.mark.asyncio

EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
GROUPS = pytest.mark.parametrize(
    "groups", [[full()], [full(), window(2 * BLOCK_SIZE)]], ids=["full", "a window beside"]
)


class Follower(EventPublisher):
    """Believes what is published of one engine."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._pool = rig.port.block_pool
        self.believed: set[tuple[int, Any]] = set()
        """Groups and hashes of blocks."""
        self.stored: list[BlockStored] = []
        rig.scheduler.kv_event_publisher = self

    def publish(self, events: KVEventBatch) -> None:
        for event in events.events:
            names = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            if isinstance(event, BlockStored):
                self.believed |= names
                self.stored.append(event)
            else:
                assert isinstance(event, BlockRemoved)
                self.believed -= names
        self.check()

    def shutdown(self) -> None:
        pass

    def check(self) -> None:
        assert self.believed <= set(self._held()), "it believes in blocks that are not there"

    def knows_all(self) -> bool:
        return self.believed == set(self._held())

    def _held(self) -> Iterator[tuple[int, Any]]:
        for number in range(self._pool.num_gpu_blocks):
            block = self._pool.blocks[number]
            if (key := block.block_hash) is not None:
                group = int.from_bytes(key[-4:], "big")
                yield group, maybe_convert_block_hash(get_block_hash(key))


class Engine:
    def __init__(self, model: Path, groups: Any, num_blocks: int) -> None:
        self.loop = Loop(Rig(model, num_blocks=num_blocks, groups=groups, kv_events_config=EVENTS), 1)
        self.rig = self.loop.rig
        self.follower = Follower(self.rig)
        kvconn = self.loop.kvconn
        assert kvconn is not None
        self.kvconn = kvconn

    async def answer(self, asked: asyncio.Future[Any]) -> Any:
        """Of an engine that makes no step for it."""
        self.kvconn.step()
        self.follower.check()
        return await asyncio.wait_for(asked, 1)

    async def fill(self, request_id: str, first: int, num_blocks: int = 8) -> Any:
        """A request that has computed as many blocks, and ended."""
        request = self.rig.add(request_id, num_prompt=num_blocks * BLOCK_SIZE + 3, first=first, max_tokens=2)
        while request_id in self.rig.scheduler.requests:
            self.loop.turn()
        return request


@GROUPS
async def test_cache_index_follows_two_engines(model_dir: Path, groups: Any) -> None:
    source, destination = (Engine(model_dir, groups, num_blocks=20 * len(groups)) for _ in range(2))
    for number in range(4):
        await destination.fill(f"before {number}", first=50 + number)
    old = source.rig.add("a", num_prompt=6 * BLOCK_SIZE + 5)
    source.loop.turns(BLOCK_SIZE)
    new = destination.rig.request("a", num_prompt=6 * BLOCK_SIZE + 5)
    new.append_output_token_ids(list(old.output_token_ids))
    believed = set(destination.follower.believed)
    asked = destination.kvconn.call_for_blocks(destination.kvconn.reserve, new, False, True, old.num_computed_tokens)
    await destination.answer(asked)
    assert believed - destination.follower.believed, "nothing was evicted: the test shows nothing"
    assert destination.follower.knows_all()

    source.rig.port.freeze(old)
    frozen = source.rig.port.drained(old, 0)
    assert frozen is not None
    stored = len(destination.follower.stored)
    await destination.answer(destination.kvconn.call(destination.kvconn.admit, new, frozen.computed_tokens))
    assert destination.follower.knows_all()
    arrived = [event for event in destination.follower.stored[stored:] if event.group_idx == 0]
    assert [event.parent_block_hash for event in arrived] == [None]
    there = [name for event in source.follower.stored if event.group_idx == 0 for name in event.block_hashes]
    assert arrived[0].block_hashes == there
    assert arrived[0].token_ids == old.all_token_ids[: len(there) * BLOCK_SIZE]
    source.rig.port.release(old)
    source.rig.port.unpin(frozen.pin)
    source.loop.turns(2)
    assert source.follower.knows_all(), "what was released is still cached"

    destination.loop.turns(2 * BLOCK_SIZE)
    later = [event for event in destination.follower.stored[stored:] if event.group_idx == 0][1:]
    assert later
    assert later[0].parent_block_hash == there[-1]
    for number in range(6):
        await source.fill(f"after {number}", first=20 + number)
    assert not {(0, name) for name in there} & source.follower.believed, "evicted where it came from"
    destination.rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    destination.loop.turns(2)
    for engine in (source, destination):
        assert engine.follower.knows_all()


@GROUPS
async def test_hits_are_not_stored_again(model_dir: Path, groups: Any) -> None:
    """Their children name them as parents."""
    engine = Engine(model_dir, groups, num_blocks=60)
    before = await engine.fill("before", first=5)
    request = engine.rig.request("a", num_prompt=11 * BLOCK_SIZE, first=5)
    assert request.all_token_ids[: 8 * BLOCK_SIZE] == before.all_token_ids[: 8 * BLOCK_SIZE]
    stored = len(engine.follower.stored)
    computed = 11 * BLOCK_SIZE - 1
    asked = engine.kvconn.call_for_blocks(engine.kvconn.reserve, request, False, True, computed)
    reserved = await engine.answer(asked)
    assert reserved.num_hits == 8
    await engine.answer(engine.kvconn.call(engine.kvconn.admit, request, computed))
    arrived = [event for event in engine.follower.stored[stored:] if event.group_idx == 0]
    assert len(arrived) == 1
    assert len(arrived[0].block_hashes) == 2
    parents = [event for event in engine.follower.stored[:stored] if event.group_idx == 0]
    assert arrived[0].parent_block_hash == [name for event in parents for name in event.block_hashes][7]
    assert engine.follower.knows_all()
