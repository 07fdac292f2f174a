# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of one engine, as vLLM's block pool hands them out, caches their content, and evicts it.

Schedules do not depend on a block's number. They depend on which contents are still cached and in which order they
are evicted: a free block without content first, then the content that was freed the longest ago; of one request, its
last block first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from llumlet.protocol.move.shortage import Shortages
from llumsim import PS


class Holder(Protocol):
    """The fields of a request that the pool reads and writes."""

    id: str
    content: Sequence[Hashable] | None
    """Names of the prompt's full blocks, if prompts may share them; each also stands for everything before it."""
    num_blocks: int
    """Blocks that the request holds."""
    cached: list[Block]
    """The first of these blocks, whose content is known."""


class Block:
    """A block with known content, in use or free."""

    __slots__ = ("content", "num_holders")

    def __init__(self, content: Hashable) -> None:
        self.content = content
        self.num_holders = 1


class Blocks:
    """The pool: `num_free` blocks may be taken, some of which still have content that a request may hit."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_free = num_blocks
        self._block_size = block_size
        self._caching = caching
        self._known: dict[Hashable, list[Block]] = {}
        """Blocks by content, the oldest first: two requests may compute the same."""
        self._evictable: OrderedDict[Block, None] = OrderedDict()

    def hit(self, request: Holder, num_tokens: int) -> tuple[int, int]:
        """Count the request's first blocks, within `num_tokens`, that are cached, and how many of these are free."""
        found = num_free = 0
        for index in range(num_tokens // self._block_size if self._caching else 0):
            blocks = self._known.get(_content(request, index))
            if blocks is None:
                break
            found += 1
            num_free += not blocks[0].num_holders
        return found, num_free

    def adopt(self, request: Holder, num_blocks: int) -> None:
        """Give a request that holds nothing its first blocks, which are cached."""
        for index in range(num_blocks):
            block = self._known[_content(request, index)][0]
            if not block.num_holders:
                del self._evictable[block]
                self.num_free -= 1
            block.num_holders += 1
            request.cached.append(block)
        request.num_blocks = num_blocks

    def take(self, num_blocks: int) -> None:
        """Take free blocks, evicting content where needed. The caller keeps count of them."""
        num_without_content = self.num_free - len(self._evictable)
        for _ in range(num_blocks - num_without_content):
            block, _ = self._evictable.popitem(last=False)
            same = self._known[block.content]
            same.remove(block)
            if not same:
                del self._known[block.content]
        self.num_free -= num_blocks

    def fill(self, request: Holder, num_full: int) -> None:
        """Note that the request's first `num_full` blocks are full, or will be after the step."""
        if not self._caching:
            return
        for index in range(len(request.cached), num_full):
            block = Block(_content(request, index))
            self._known.setdefault(block.content, []).append(block)
            request.cached.append(block)

    def release(self, request: Holder, num_full: int) -> None:
        """Take all blocks from a request. The content of its first `num_full` stays cached until it is evicted."""
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
        """Free blocks without content."""
        self.num_free += num_blocks


def _content(request: Holder, index: int) -> Hashable:
    if request.content is not None and index < len(request.content):
        return request.content[index]
    return request.id, index


class Shortage:
    """The blocks that a step lacks, and production's decision (`llumlet.protocol.shortage`) to wait for a move."""

    def __init__(self) -> None:
        self.asks = False
        """True if a rescheduler reads statuses and may move a request."""
        self.gives_blocks: Callable[[], bool] = lambda: False
        """Tells if a move under way will give blocks back."""
        self.num_blocks = 0
        """Blocks that the step under way lacked."""
        self.has_held = False
        """True if a request was left out of this step."""
        self._shortages = Shortages()

    @property
    def num_averted(self) -> int:
        return self._shortages.num_averted

    def begin(self) -> None:
        """Begin a step."""
        self.num_blocks, self.has_held = 0, False

    def waits(self, num_blocks: int, num_preemptions: int, now_ps: int) -> bool:
        """Decide about a request that lacks `num_blocks`: True leaves it out of the step, False preempts another."""
        self.num_blocks += num_blocks
        moving = self.gives_blocks()
        waits = self._shortages.waits(now_ps / PS, num_preemptions, moving=moving, asks=self.asks)
        self.has_held |= waits
        return waits

    def scheduled(self, num_preemptions: int) -> None:
        """Note that the step has been scheduled."""
        if not self.num_blocks:
            self._shortages.over(num_preemptions)
