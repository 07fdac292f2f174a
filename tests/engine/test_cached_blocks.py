# SPDX-License-Identifier: Apache-2.0
"""What is told of the prefix cache is what vLLM's holds: after any history, on vLLM's real block pool."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from llumlet.contract.block_hashes import HASH_BYTES, adapter_mask, chain, held_names, root_of
from tests.engine.rig import BLOCK_SIZE, Rig, window
from vllm_llumnix.engine.blocks import cached_blocks
from vllm_llumnix.engine.blocks.cached_blocks import CachedBlocks


class Reader:
    """Believes what it is told, as a scheduler does."""

    def __init__(self, blocks: CachedBlocks) -> None:
        self.blocks = blocks
        self.names: set[int] = set()
        self.resets = 0
        blocks.follow(True)

    def read(self) -> set[int]:
        changes = self.blocks.take()
        if changes is None:
            self.resets += 1
            self.names = names_in(self.blocks.held())
            return self.names
        for change in changes:
            (self.names.add if change > 0 else self.names.discard)(abs(change))
        return self.names


def names_in(packed: bytes) -> set[int]:
    return set(in_order(packed))


def in_order(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + HASH_BYTES], "little") for at in range(0, len(packed), HASH_BYTES)]


class Oracle:
    """Knows our name for each of vLLM's hashes, by the requests that had them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.requests: list[Request] = []

    def held(self) -> set[int]:
        """Our names of what vLLM's map holds."""
        ours = {}
        for request in self.requests:
            mask = adapter_mask(request.lora_request.lora_name) if request.lora_request else 0
            names = chain(list(request.all_token_ids), BLOCK_SIZE, root_of(BLOCK_SIZE, request.cache_salt or ""))
            for theirs, name in zip(request.block_hashes, names, strict=False):
                ours[theirs] = int.from_bytes(name, "little") ^ mask
        return {ours[key[:-4]] for key in self.rig.port.block_pool.cached_block_hash_to_block._cache}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("seed", range(6))
def test_any_history(model_dir: Path, asynchronous: bool, seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(model_dir, asynchronous=asynchronous, num_blocks=24)
    oracle, reader = Oracle(rig), Reader(rig.port.cached_blocks)
    for number in range(60):
        if draw.random() < 0.4:
            request = rig.request(
                f"r{number}", draw.choice([20, 70, 200, 330]), draw.randrange(1, 90), draw.choice([5, 6])
            )
            oracle.requests.append(request)
            rig.scheduler.add_request(request)
        if draw.random() < 0.1 and rig.scheduler.running:
            name = draw.choice(rig.scheduler.running).request_id
            rig.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        rig.turns(draw.randrange(1, 12))
        if draw.random() < 0.7:
            assert reader.read() == oracle.held()
            for request in oracle.requests:
                names = held_names(list(request.all_token_ids), BLOCK_SIZE, request.cache_salt or "")
                found = [name in reader.names for name in in_order(names)]
                assert rig.port.cached_blocks.num_leading(names) == [*found, False].index(False)
    assert reader.read() == oracle.held() == names_in(rig.port.cached_blocks.held())
    assert reader.resets == 1, "all else came as changes"
    assert reader.names


def test_two_blocks_of_one_content_are_held_until_the_last_goes(model_dir: Path) -> None:
    rig = Rig(model_dir, max_num_batched_tokens=1024)
    oracle, reader = Oracle(rig), Reader(rig.port.cached_blocks)
    for name in ("one", "other"):  # vLLM computes the last block again, for the logits of its last token
        oracle.requests.append(rig.add(name, num_prompt=3 * BLOCK_SIZE, max_tokens=3))
    rig.turn()
    pool = rig.port.block_pool
    (twice,) = [blocks for blocks in pool.cached_block_hash_to_block._cache.values() if isinstance(blocks, dict)]
    assert len(reader.read()) == 3
    first, second = twice
    pool.evict_blocks({first})
    assert reader.read() == oracle.held()
    assert len(reader.names) == 3, "the other one is left"
    pool.evict_blocks({second})
    assert reader.read() == oracle.held()
    assert len(reader.names) == 2


def test_reset_tells_everything_anew(model_dir: Path) -> None:
    rig = Rig(model_dir)
    reader = Reader(rig.port.cached_blocks)
    rig.add("a", num_prompt=100, max_tokens=2)
    rig.turn()
    assert not rig.port.block_pool.reset_prefix_cache()
    rig.turns(3)
    assert len(reader.read()) == 3, "the reset failed while the request ran"
    assert rig.port.block_pool.reset_prefix_cache()
    assert reader.read() == set()
    assert reader.resets == 2


def test_changes_that_nobody_takes_are_bounded_and_known_to_be_lost(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_blocks, "MOST_CHANGES", 4)
    rig = Rig(model_dir)
    oracle, reader = Oracle(rig), Reader(rig.port.cached_blocks)
    reader.read()
    oracle.requests.append(rig.add("a", num_prompt=6 * BLOCK_SIZE, max_tokens=1))
    rig.turns(3)
    assert len(rig.port.cached_blocks._changes) == 4
    assert reader.read() == oracle.held()
    assert (len(reader.names), reader.resets) == (6, 2)


def test_unwatched_cache_keeps_no_changes(model_dir: Path) -> None:
    rig = Rig(model_dir)
    reader = Reader(rig.port.cached_blocks)
    reader.read()
    rig.port.cached_blocks.follow(False)
    rig.add("a", num_prompt=100, max_tokens=1)
    rig.turns(3)
    assert not rig.port.cached_blocks._changes
    rig.port.cached_blocks.follow(True)
    assert len(reader.read()) == 3


def test_salt_and_adapter_make_other_names(model_dir: Path) -> None:
    def names(salt: str | None, adapter: str | None) -> set[int]:
        rig = Rig(model_dir, enable_lora=True)
        reader = Reader(rig.port.cached_blocks)
        request = rig.request("a", 100, 1, adapter=LoRARequest(adapter, 1, "/nowhere") if adapter else None)
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
        rig.scheduler.add_request(request)
        rig.turns(3)
        return set(reader.read())

    told = [names(salt, adapter) for salt in (None, "s") for adapter in (None, "a", "b")]
    assert len(set().union(*told)) == 6 * 3
    plain = chain([5 + index % 90 for index in range(100)], BLOCK_SIZE, root_of(BLOCK_SIZE))
    assert told[1] == {int.from_bytes(name, "little") ^ adapter_mask("a") for name in plain}
    token_ids = [5 + index % 90 for index in range(100)]
    assert told[4] == names_in(held_names(token_ids, BLOCK_SIZE, "s", "a"))


def test_no_names_from_the_first_image_on(model_dir: Path) -> None:
    rig = Rig(model_dir)
    reader = Reader(rig.port.cached_blocks)
    request = rig.request("a", 200, 1)
    request.mm_features = [Mock(identifier="x", mm_position=Mock(offset=70, length=10))]
    rig.port.cached_blocks._name(request, [Mock(block_id=at) for at in range(1, 7)], 0, 6)
    assert len(reader.read()) == 2
    rig.port.cached_blocks._name(request, [Mock(block_id=at) for at in range(1, 7)], 3, 6)
    assert len(reader.read()) == 2


def test_an_engine_goes_on_without_names_and_says_so_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(model_dir)
    reader = Reader(rig.port.cached_blocks)
    monkeypatch.setattr(CachedBlocks, "_name", Mock(side_effect=ValueError("no such thing")))
    monkeypatch.setattr(cached_blocks.logger, "propagate", True)
    for name in ("a", "b"):
        rig.add(name, num_prompt=100, max_tokens=3)
    rig.turns(6)
    assert not rig.scheduler.running, "both have come to their end"
    assert not reader.read()
    assert [record.levelname for record in caplog.records if "get no names" in record.message] == ["ERROR"]


def test_a_hit_that_is_no_simple_prefix_is_not_told(model_dir: Path) -> None:
    rig = Rig(model_dir, groups=[window(64)])
    rig.add("a", num_prompt=100, max_tokens=1)
    rig.turns(3)
    assert rig.port.cached_blocks.block_size == 0
    assert not rig.port.cached_blocks.held()
