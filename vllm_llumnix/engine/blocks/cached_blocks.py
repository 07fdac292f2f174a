# SPDX-License-Identifier: Apache-2.0
"""The blocks that vLLM's prefix cache holds, by names that others can compute (`llumlet.contract.block_hashes`).

vLLM's own events would have to be switched on, sent by ZMQ, and translated by everybody who hears them. Here the block
pool's methods are wrapped where a block's hash is set and taken off, and the name of each block is kept beside the
block: 8 bytes for each. Nothing is named of which a prompt's tokens do not say the content: blocks from the first image
on, prompts that are embeddings. Several blocks may hold the same; the name goes with the last of them.

    vLLM's loop        wraps: some microseconds for a block that is filled, nothing in a step that fills none
    llumlet's thread   follow(), take(), held(), num_leading()
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec

from llumlet.contract.block_hashes import HASH_BYTES, adapter_mask, chain, root_of
from vllm_llumnix.engine.vllm_types import Block, Request, Scheduler
from vllm_llumnix.seams import ENGINE

logger = logging.getLogger("vllm.llumnix")

MOST_CHANGES: Final = 1 << 17
"""Changes that wait for the llumlet's thread. It takes them many times a second; when it does not, they are lost."""
_UNNAMED: Final = 0


def block_size_of(scheduler: Scheduler) -> int:
    """Tokens of a block that gets a name; 0 if none does: a hit is then no simple prefix, or nothing is cached."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if not scheduler.kv_cache_manager.enable_caching or len(groups) != 1:
        return 0
    spec = groups[0].kv_cache_spec
    simple = isinstance(spec, FullAttentionSpec) and spec.sliding_window is None and spec.attention_chunk_size is None
    same_size = scheduler.kv_cache_manager.block_pool.hash_block_size == scheduler.block_size
    return int(scheduler.block_size) if simple and same_size else 0


class CachedBlocks:
    """Implements `llumlet.contract.cache_feed.Blocks`. Before the scheduler has a request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.block_size = block_size_of(scheduler)
        """Tokens of a block; 0: none is ever named."""
        pool = scheduler.kv_cache_manager.block_pool
        self._names = memoryview(bytearray(HASH_BYTES * pool.num_gpu_blocks)).cast("Q")
        """Names by block id."""
        self._changes: deque[int] = deque()
        self._followed = False
        self._num_losses = 0
        """Times that changes were lost; written by the loop alone."""
        self._known_losses: int | None = None
        self._has_failed = False
        """Blocks got no names for an error, of which the log was told."""
        if self.block_size:
            self._wrap(pool)

    # Llumlet thread

    def follow(self, watched: bool) -> None:
        if watched and not self._followed:
            self._known_losses = None
        self._followed = watched
        if not watched:
            self._changes.clear()

    def take(self) -> list[int] | None:
        # In this order: who hears of a loss reads `held` after it, and what is lost from here on is heard of next time.
        losses = self._num_losses
        is_whole, self._known_losses = losses == self._known_losses, losses
        changes: list[int] = []
        with contextlib.suppress(IndexError):
            while len(changes) < MOST_CHANGES:
                changes.append(self._changes.popleft())
        return changes if is_whole else None

    def held(self) -> bytes:
        names = np.frombuffer(self._names, "=u8")
        held: bytes = names[names != _UNNAMED].astype("<u8").tobytes()
        return held

    def num_leading(self, names: bytes) -> int:
        """Number of leading blocks of a request that are held. By halves, each with one pass over the names: vLLM gives
        up what is behind a block before the block itself."""
        held, asked = np.frombuffer(self._names, "=u8"), np.frombuffer(names, "<u8")
        return bisect_left(range(len(asked)), True, key=lambda at: not (held == asked[at]).any())

    # Loop thread

    def _wrap(self, pool: Any) -> None:
        cache_full_blocks, remove_hashes, reset = (
            pool.cache_full_blocks,
            pool._remove_cached_block_hashes,
            pool.reset_prefix_cache,
        )
        names = self._names

        def cache(
            request: Request,
            blocks: Sequence[Block],
            num_cached_blocks: int,
            num_full_blocks: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            try:
                self._name(request, blocks, num_cached_blocks, num_full_blocks)
            except Exception:
                # Whatever it is, the engine goes on: blocks without a name are never promised to anybody.
                level = logging.DEBUG if self._has_failed else logging.ERROR
                self._has_failed = True
                logger.log(level, "llumlet: cached blocks of %s get no names", request.request_id, exc_info=True)

        def remove(block: Block) -> list[Any]:
            key = block.block_hash
            removed: list[Any] = remove_hashes(block)
            if name := names[block.block_id]:
                names[block.block_id] = _UNNAMED
                if pool.cached_block_hash_to_block.get_one_block(key) is None:
                    self._note(-name)
            return removed

        def reset_prefix_cache() -> bool:
            done: bool = reset()
            if done:
                names.cast("B")[:] = bytes(names.nbytes)
                self._changes.clear()
                self._num_losses += 1
            return done

        ENGINE.wrap(pool, "BlockPool.cache_full_blocks", cache)
        ENGINE.wrap(pool, "BlockPool._remove_cached_block_hashes", remove)
        ENGINE.wrap(pool, "BlockPool.reset_prefix_cache", reset_prefix_cache)

    def _name(self, request: Request, blocks: Sequence[Block], first: int, end: int) -> None:
        """Names blocks `[first, end)` of a request's table, as far as their content is known by tokens."""
        if request.prompt_embeds is not None:
            return
        size, names = self.block_size, self._names
        if request.mm_features:
            end = min(end, request.mm_features[0].mm_position.offset // size)
        if first >= end:
            return
        adapter = request.lora_request
        mask = adapter_mask(adapter.lora_name) if adapter is not None else 0
        if first:
            before = names[blocks[first - 1].block_id]
            if before == _UNNAMED:
                return
            parent = (before ^ mask).to_bytes(HASH_BYTES, "little")
        else:
            parent = root_of(size, request.cache_salt or "")
        token_ids = request.all_token_ids[first * size : end * size]
        for block, link in zip(blocks[first:end], chain(token_ids, size, parent), strict=True):
            if block.block_hash is None:
                return  # vLLM has left it out, and nothing behind it can be found
            names[block.block_id] = name = int.from_bytes(link, "little") ^ mask
            self._note(name)

    def _note(self, change: int) -> None:
        if not self._followed:
            return
        if len(self._changes) < MOST_CHANGES:
            self._changes.append(change)
        else:
            self._num_losses += 1
