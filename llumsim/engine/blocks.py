# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of one engine, as vLLM's block pool hands them out, keeps them for later hits, and evicts them.

Which number a block has does not matter to any schedule; what does is which contents are still cached, and in which
order they go. A free block without content goes first; then the content that was freed the longest ago, of one
request its last block first.

`SharedBlocks` knows the content of every block. `UniqueBlocks` is for requests that share nothing: all that can be hit
is what a preempted request left behind itself, so that runs of blocks are kept instead of blocks, and an operation
costs the same whatever the length of the request. Both do the same there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Protocol


class Holder(Protocol):
    """What is looked at of a request, and kept in it."""

    id: str
    content: Sequence[Hashable] | None
    """Names of its prompt's full blocks, if any of it may be shared; each stands for all that is before it as well."""
    num_blocks: int
    """Number of blocks that it holds."""
    cached: list[Block]
    """Number of its blocks of which the content is known to `SharedBlocks`."""


class Block:
    """One with known content, in use or free."""

    __slots__ = ("content", "num_holders")

    def __init__(self, content: Hashable) -> None:
        self.content = content
        self.num_holders = 1


class Blocks(Protocol):
    num_free: int

    def hit(self, request: Holder, num_tokens: int) -> tuple[int, int]:
        """How many of its first blocks, within so many tokens, are cached, and how many of those are free."""
        ...

    def adopt(self, request: Holder, num_blocks: int) -> None:
        """Give it its first blocks, which are cached. It holds none."""
        ...

    def take(self, num_blocks: int) -> None:
        """Blocks without content, of which the caller keeps count. They are free, or fewer would be asked for."""
        ...

    def fill(self, request: Holder, num_full: int) -> None:
        """Notes how many blocks of its prompt are full, or will be after the step."""
        ...

    def release(self, request: Holder, num_full: int) -> None:
        """Takes all blocks from a request. Its first `num_full` stay cached until they are evicted."""
        ...

    def give_back(self, num_blocks: int) -> None:
        """Blocks without content that nobody holds any more."""
        ...


class SharedBlocks:
    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_free = num_blocks
        self._block_size = block_size
        self._caching = caching
        self._known: dict[Hashable, list[Block]] = {}
        """Blocks by content, the oldest first: two requests may compute the same."""
        self._evictable: OrderedDict[Block, None] = OrderedDict()

    def hit(self, request: Holder, num_tokens: int) -> tuple[int, int]:
        found = num_free = 0
        for index in range(num_tokens // self._block_size if self._caching else 0):
            blocks = self._known.get(_content(request, index))
            if blocks is None:
                break
            found += 1
            num_free += not blocks[0].num_holders
        return found, num_free

    def adopt(self, request: Holder, num_blocks: int) -> None:
        for index in range(num_blocks):
            block = self._known[_content(request, index)][0]
            if not block.num_holders:
                del self._evictable[block]
                self.num_free -= 1
            block.num_holders += 1
            request.cached.append(block)
        request.num_blocks = num_blocks

    def take(self, num_blocks: int) -> None:
        num_without_content = self.num_free - len(self._evictable)
        for _ in range(num_blocks - num_without_content):
            block, _ = self._evictable.popitem(last=False)
            same = self._known[block.content]
            same.remove(block)
            if not same:
                del self._known[block.content]
        self.num_free -= num_blocks

    def fill(self, request: Holder, num_full: int) -> None:
        if not self._caching:
            return
        for index in range(len(request.cached), num_full):
            block = Block(_content(request, index))
            self._known.setdefault(block.content, []).append(block)
            request.cached.append(block)

    def release(self, request: Holder, num_full: int) -> None:
        self.fill(request, num_full)
        for block in reversed(request.cached):
            block.num_holders -= 1
            if not block.num_holders:
                self._evictable[block] = None
                self.num_free += 1
        self.num_free += request.num_blocks - len(request.cached)
        request.cached.clear()
        request.num_blocks = 0

    def give_back(self, num_blocks: int) -> None:
        self.num_free += num_blocks


def _content(request: Holder, index: int) -> Hashable:
    if request.content is not None and index < len(request.content):
        return request.content[index]
    return request.id, index


class _Run:
    """Free blocks `[first, end)` of one request, with their content. They are evicted from the end."""

    __slots__ = ("end", "first", "owner")

    def __init__(self, owner: str, first: int, end: int) -> None:
        self.owner, self.first, self.end = owner, first, end


class UniqueBlocks:
    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_free = num_blocks
        self._block_size = block_size
        self._caching = caching
        self._num_cached = 0
        """Free blocks with content."""
        self._runs: deque[_Run] = deque()
        """Free cached blocks in the order in which they are evicted; those with nothing left are skipped."""
        self._left_by: dict[str, list[_Run]] = {}
        """Cached blocks by the request that left them, in the order in which their content was computed."""

    def hit(self, request: Holder, num_tokens: int) -> tuple[int, int]:
        runs = self._left_by.get(request.id)
        if runs is None:
            return 0, 0
        most, end = num_tokens // self._block_size, 0
        while end < most and (covering := [run.end for run in runs if run.first <= end < run.end]):
            end = min(max(covering), most)
        return end, end

    def adopt(self, request: Holder, num_blocks: int) -> None:
        """Nothing to do: of two blocks with the same content, the older one is taken."""
        request.num_blocks = num_blocks
        self._num_cached -= num_blocks
        self.num_free -= num_blocks
        position, runs = 0, self._left_by.get(request.id, [])
        while position < num_blocks:
            number, run = next((number, run) for number, run in enumerate(runs) if run.first <= position < run.end)
            if position > run.first:
                rest = _Run(request.id, run.first, position)  # evicted after what is behind it
                runs.insert(number + 1, rest)
                self._runs.insert(self._runs.index(run) + 1, rest)
            older = (one.first for one in runs[:number] if position < one.first < one.end)
            position = min(run.end, num_blocks, min(older, default=num_blocks))
            run.first = position
        self._forget_empty(request.id)

    def take(self, num_blocks: int) -> None:
        evicted = num_blocks - (self.num_free - self._num_cached)
        self.num_free -= num_blocks
        if evicted <= 0:
            return
        self._num_cached -= evicted
        while evicted:
            run = self._runs[0]
            number = min(evicted, run.end - run.first)
            run.end -= number
            evicted -= number
            if run.first >= run.end:
                self._runs.popleft()
                self._forget_empty(run.owner)

    def fill(self, request: Holder, num_full: int) -> None:
        """Nobody else asks for it."""

    def release(self, request: Holder, num_full: int) -> None:
        self.num_free += request.num_blocks
        request.num_blocks = 0
        if num_full and self._caching:
            run = _Run(request.id, 0, num_full)
            self._num_cached += num_full
            self._runs.append(run)
            self._left_by.setdefault(request.id, []).append(run)

    def give_back(self, num_blocks: int) -> None:
        self.num_free += num_blocks

    def _forget_empty(self, owner: str) -> None:
        left = [run for run in self._left_by.get(owner, ()) if run.first < run.end]
        if left:
            self._left_by[owner] = left
        else:
            self._left_by.pop(owner, None)
