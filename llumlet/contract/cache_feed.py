# SPDX-License-Identifier: Apache-2.0
"""Tells schedulers the blocks in an engine's prefix cache: `WatchCache`.

A watcher gets everything once, and then the net changes since its last message. Its backlog is bounded; a watcher that
is too slow gets everything again (`reset`). So a stream is complete at every moment, or says that it was not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Final, Protocol

from llumlet.contract.block_hashes import HASH_BYTES
from llumlet.contract.types import CacheChanges

LEAST_INTERVAL_S: Final = 0.05
KEEPALIVE_S: Final = 5.0
"""Time without news after which a watcher gets an empty message."""
MOST_WAITING: Final = 1 << 16
"""Largest backlog of one watcher, in changes."""
MESSAGE_BLOCKS: Final = 1 << 13
"""Largest number of names in a message, as its reader does nothing else meanwhile."""


class Blocks(Protocol):
    """The blocks of one cache, which may change on another thread."""

    def follow(self, watched: bool) -> None:
        """Keeps changes for `take`, or stops doing so."""
        ...

    def take(self) -> list[int] | None:
        """Changes since the last call, in order: a name that is held now, or, negative, one that is not. None: some
        were lost."""
        ...

    def held(self) -> bytes:
        """Names of all held blocks, as on the wire, possibly with repetitions. Concurrent changes are also among the
        changes."""
        ...


class CacheFeed:
    """The watchers of one cache. On one event loop."""

    def __init__(self, blocks: Blocks, clock: Callable[[], float] = time.monotonic) -> None:
        self._blocks = blocks
        self._clock = clock
        self._watchers: set[_Watcher] = set()

    async def watch(self, interval_s: float) -> AsyncGenerator[CacheChanges, None]:
        """Messages for one watcher, for ever."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        self._blocks.follow(True)
        number, told_s = 0, self._clock()
        try:
            while True:
                self._collect()
                for changes in self._messages(watcher, told_s):
                    number += 1
                    changes.number = number
                    told_s = self._clock()
                    yield changes
                await asyncio.sleep(max(interval_s, LEAST_INTERVAL_S))
        finally:
            self._watchers.discard(watcher)
            self._blocks.follow(bool(self._watchers))

    def _collect(self) -> None:
        """Passes changes on to all watchers."""
        taken = self._blocks.take()
        for watcher in self._watchers:
            if taken is None or watcher.changes is None or len(watcher.changes) + len(taken) > MOST_WAITING:
                watcher.changes = None
            else:
                watcher.changes.update((abs(change), change > 0) for change in taken)

    def _messages(self, watcher: _Watcher, told_s: float) -> list[CacheChanges]:
        changes, watcher.changes = watcher.changes, {}
        if changes is None:
            messages = [CacheChanges(stored=part) for part in _parts(self._blocks.held())] or [CacheChanges()]
            messages[0].reset = True
            return messages
        if not changes and self._clock() - told_s < KEEPALIVE_S:
            return []
        stored, removed = (
            packed(name for name, is_held in changes.items() if is_held is wanted) for wanted in (True, False)
        )
        # What is gone first: between two messages nothing is believed to be there that is not.
        messages = [CacheChanges(removed=part) for part in _parts(removed)]
        messages += [CacheChanges(stored=part) for part in _parts(stored)]
        return messages or [CacheChanges()]


class _Watcher:
    def __init__(self) -> None:
        self.changes: dict[int, bool] | None = None
        """Its backlog: true for blocks that are held. None: everything."""


def _parts(names: bytes) -> list[bytes]:
    size = MESSAGE_BLOCKS * HASH_BYTES
    return [names[at : at + size] for at in range(0, len(names), size)]


def packed(names: Iterable[int]) -> bytes:
    """Names as they are on the wire."""
    return b"".join(name.to_bytes(HASH_BYTES, "little") for name in names)
