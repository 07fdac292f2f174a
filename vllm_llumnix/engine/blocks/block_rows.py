# SPDX-License-Identifier: Apache-2.0
"""The block tables of a request, one for each KV cache group, counted as one.

Groups may have blocks of different sizes, keep what a window spans and no more, or hold one state that changes with
every step instead of something for each token. Who moves a request counts in rows:

    row n    the blocks of tokens [n * size, (n + 1) * size) of every group that keeps tokens: `width` of them, group by
             group, vLLM's null block (id 0) where a window has gone on or nothing is there yet
    states   of every other group, the one block that each step changes: with the state behind the last computed token,
             see `latest_states` for what that is beside speculative decoding, or the request's ring

Final blocks of a row do not change any more; states do until the request is frozen.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import cast

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_llumnix.engine.vllm_types import Block, GroupManager, Request, Scheduler
from vllm_llumnix.kv.vllm_worker_types import KVCacheGroup, StateSpec

NULL_ID = 0
"""Id of vLLM's null block."""


class GroupKind(enum.Enum):
    """Content of the blocks of a group."""

    ALL = "keys and values of every token"
    WINDOW = "those of the latest tokens"
    STATE = "a state that changes with every step"
    RING = "a ring of tokens that are not compressed yet"


def kind_of(group: KVCacheGroup) -> GroupKind | None:
    """None if it is none that can be carried, or several."""
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", {}).values() or [spec]
    kinds = {_kind_of_layer(layer) for layer in layers}
    return kinds.pop() if len(kinds) == 1 else None


def _kind_of_layer(spec: object) -> GroupKind | None:
    if isinstance(spec, HiddenStateCacheSpec | SinkFullAttentionSpec):
        return None
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec | RSWASpec):
        return GroupKind.WINDOW
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.ALL
    if isinstance(spec, CircularBufferSpec):
        return GroupKind.RING
    return GroupKind.STATE if isinstance(spec, MambaSpec) else None


def _is_replayed(group: KVCacheGroup) -> bool:
    """True if the window behind a prefix of which the cache has the other groups' blocks is computed again."""
    return group.kv_cache_spec.prefix_replay_tokens > 0


def _seen(group: KVCacheGroup) -> int:
    """Number of tokens that a window spans; 0 if there is no such number."""
    spec = group.kv_cache_spec
    (layer, *_) = getattr(spec, "kv_cache_specs", {}).values() or [spec]
    if isinstance(layer, SlidingWindowSpec):
        return int(layer.sliding_window + layer.extra_retained_tokens)
    return int(layer.attention_chunk_size) if isinstance(layer, ChunkedLocalAttentionSpec) else 0


class BlockRows:
    """The rows and states of the requests of one scheduler. Loop thread only.

    `size`: tokens of a row. `is_simple`: there is one group, which keeps every token; a row is then a block.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._manager = scheduler.kv_cache_manager
        kinds = [kind_of(group) for group in scheduler.kv_cache_config.kv_cache_groups]
        managers: Sequence[GroupManager] = scheduler.kv_cache_manager.coordinator.single_type_managers
        tokens = [index for index, kind in enumerate(kinds) if kind in (GroupKind.ALL, GroupKind.WINDOW)]
        self.takes_kv = bool(kinds) and None not in kinds
        self.is_simple = kinds == [GroupKind.ALL]
        self._states = {
            index: managers[index] for index, kind in enumerate(kinds) if kind in (GroupKind.STATE, GroupKind.RING)
        }
        self._rings = {index for index, kind in enumerate(kinds) if kind is GroupKind.RING}
        groups = scheduler.kv_cache_config.kv_cache_groups
        recurrent = self._states.keys() - self._rings
        state_specs = [cast(StateSpec, groups[index].kv_cache_spec) for index in recurrent]
        self.num_drafts = max((spec.num_speculative_blocks for spec in state_specs), default=0)
        """Drafts of a step: of each group with states a request holds a block for each, behind that for the state."""
        self.state_size = max((int(managers[index].block_size) for index in recurrent), default=0)
        """Tokens between two states that are kept."""
        self.caches_prefixes = not recurrent
        """True if computed blocks of a request serve the next one that begins with the same tokens. A state does so
        only by chance."""
        self.takes_hits = not self._states and not any(map(_is_replayed, groups))
        """True if a prefix in the cache is enough to go on from."""
        sizes = {index: int(managers[index].block_size) for index in tokens}
        self.size = math.lcm(*sizes.values()) if sizes else int(scheduler.block_size)
        self._sizes = sizes
        self._seen = {index: _seen(groups[index]) for index, kind in enumerate(kinds) if kind is GroupKind.WINDOW}
        self.width = sum(self.size // size for size in sizes.values())

    def of_size(self, size: int) -> BlockRows:
        """The same in rows of `size` tokens, a multiple of this one."""
        if size == self.size:
            return self
        rows = copy.copy(self)
        rows.size, rows.width = size, self.width * (size // self.size)
        return rows

    @property
    def has_windows(self) -> bool:
        """True if some group frees the blocks that a window has left behind."""
        return bool(self._seen)

    @property
    def most_in_last(self) -> int:
        """Blocks that the last row can have: of windows no more than they span."""
        seen = {index: -(-tokens // self._sizes[index]) + 1 for index, tokens in self._seen.items() if tokens}
        return sum(min(self.size // size, seen.get(index, self.size)) for index, size in self._sizes.items())

    @property
    def holds_several(self) -> bool:
        """True if some group has several blocks in a row."""
        return any(size < self.size for size in self._sizes.values())

    @property
    def column_sizes(self) -> list[int]:
        """Tokens of a block of each group that keeps tokens."""
        return list(self._sizes.values())

    @property
    def num_states(self) -> int:
        return len(self._states)

    @property
    def ring_places(self) -> list[int]:
        """Places among the states that are rings."""
        return [place for place, index in enumerate(self._states) if index in self._rings]

    def rows_of(self, num_tokens: int) -> int:
        """Rows that hold so many tokens, the last of them in part."""
        return -(-num_tokens // self.size)

    def blocks(self, request: Request, num_tokens: int, from_row: int = 0) -> list[Block]:
        """Blocks of its first `num_tokens` tokens, row by row, from `from_row` on."""
        tables = self._manager.get_blocks(request.request_id).blocks
        null = self._manager.block_pool.null_block
        num_rows = self.rows_of(num_tokens) - from_row
        columns: list[Sequence[Block]] = []
        for index, size in self._sizes.items():
            each = self.size // size
            part = tables[index][from_row * each : -(-num_tokens // size)]
            columns += [part[place::each] for place in range(each)]
        if len(columns) == 1:
            return list(columns[0])
        padded = [itertools.chain(column, itertools.repeat(null, num_rows - len(column))) for column in columns]
        return list(itertools.chain.from_iterable(zip(*padded, strict=True)))

    def count(self, request: Request) -> int:
        """Its rows. Of nothing but states there is always a row."""
        if not self._sizes:
            return self.rows_of(self._manager.max_model_len)
        tables = self._manager.get_blocks(request.request_id).blocks
        return self.rows_of(max(len(tables[index]) * size for index, size in self._sizes.items()))

    def states(self, request: Request, num_tokens: int, num_accepted: int = 0) -> list[Block]:
        """The states behind `num_tokens` tokens, which are computed, one of each group that has them. Beside drafts,
        that many are what the last step was given, and the state looked for is that behind `num_accepted` drafts."""
        tables = self._manager.get_blocks(request.request_id).blocks
        return [
            tables[index][0 if index in self._rings else _place(manager, num_tokens) + num_accepted]
            for index, manager in self._states.items()
        ]

    def states_to_come(self, request: Request) -> list[Block]:
        """Blocks for the states of a reservation, wherever they are in their tables; they stay the same ones."""
        tables = self._manager.get_blocks(request.request_id).blocks
        return [block for index in self._states for block in present(tables[index])[:1]]

    def seat_states(self, request: Request, computed_tokens: int) -> None:
        """Puts the states of a reservation where the scheduler will look for those behind `computed_tokens` tokens, as
        the last of their tables but for those of drafts. It was made, and perhaps grown, for other numbers of tokens.
        """
        pool = self._manager.block_pool
        for index, manager in self._states.items():
            if index in self._rings:
                continue
            table = manager.req_to_blocks[request.request_id]
            held = present(table)
            kept = 1 + self.num_drafts
            table[:] = [pool.null_block] * _place(manager, computed_tokens) + held[:kept]
            pool.free_blocks(reversed(held[kept:]))

    def give_back(self, request: Request, positions: int) -> None:
        """Frees the blocks that are held for what comes behind so many positions."""
        pool = self._manager.block_pool
        managers: Sequence[GroupManager] = self._manager.coordinator.single_type_managers
        for index, size in self._sizes.items():
            table = managers[index].req_to_blocks[request.request_id]
            first = -(-positions // size)
            pool.free_blocks(reversed(present(table[first:])))
            del table[first:]

    def num_held(self, request: Request) -> int:
        """Blocks of all groups."""
        tables = self._manager.get_blocks(request.request_id).blocks
        if self.is_simple:
            return len(tables[0])
        return sum(block.block_id != NULL_ID for table in tables for block in table)


def _place(manager: GroupManager, computed_tokens: int) -> int:
    return (computed_tokens - 1) // int(manager.block_size)


def ids_of(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def to_copy(there: Iterable[int], here: Iterable[int]) -> list[tuple[int, int]]:
    """The blocks of a source and their places here, but for what a window has left behind on either side."""
    return [pair for pair in zip(there, here, strict=True) if NULL_ID not in pair]


def present(blocks: Sequence[Block]) -> list[Block]:
    """Without null blocks."""
    return [block for block in blocks if block.block_id != NULL_ID]
