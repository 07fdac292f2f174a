# SPDX-License-Identifier: Apache-2.0
"""What a watcher of a prefix cache believes is what the cache holds, however slow the watcher is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from llumlet.contract import cache_feed
from llumlet.contract.cache_feed import CacheFeed, packed
from llumlet.contract.types import CacheChanges

pytestmark = pytest.mark.asyncio


class Blocks:
    def __init__(self) -> None:
        self.names: set[int] = set()
        self.changes: list[int] = []
        self.is_whole = False
        self.followed = False

    def follow(self, watched: bool) -> None:
        self.is_whole &= self.followed
        self.followed = watched

    def take(self) -> list[int] | None:
        changes, self.changes = self.changes, []
        is_whole, self.is_whole = self.is_whole, True
        return changes if is_whole else None

    def held(self) -> bytes:
        return packed(self.names)

    def put(self, *names: int) -> None:
        self.names.update(names)
        self.changes += names

    def drop(self, *names: int) -> None:
        self.names.difference_update(names)
        self.changes += [-name for name in names]


class Watcher:
    def __init__(self, feed: CacheFeed, interval_s: float = 0.0) -> None:
        self.names: set[int] = set()
        self.messages: list[CacheChanges] = []
        self._stream: AsyncGenerator[CacheChanges, None] = feed.watch(interval_s)

    async def hear(self) -> CacheChanges:
        async with asyncio.timeout(5):
            changes = await anext(self._stream)
        self.messages.append(changes)
        assert changes.number == len(self.messages)
        if changes.reset:
            self.names.clear()
        self.names |= names_in(changes.stored)
        self.names -= names_in(changes.removed)
        return changes

    async def leave(self) -> None:
        await self._stream.aclose()


def names_in(content: bytes) -> set[int]:
    return {int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), 8)}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "LEAST_INTERVAL_S", 0.001)


async def test_everything_once_then_what_changes() -> None:
    blocks = Blocks()
    blocks.put(1, 2)
    watcher = Watcher(CacheFeed(blocks))
    assert (await watcher.hear()).reset
    blocks.put(3)
    blocks.drop(1)
    changes = await watcher.hear()
    assert (names_in(changes.removed), changes.reset) == ({1}, False), "what is gone first"
    assert names_in((await watcher.hear()).stored) == {3}
    blocks.put(4)
    blocks.drop(4)
    blocks.drop(3)
    blocks.put(3)
    told = await watcher.hear(), await watcher.hear()
    assert [names_in(changes.removed) for changes in told] == [{4}, set()], "where each of them ended"
    assert [names_in(changes.stored) for changes in told] == [set(), {3}]
    assert watcher.names == blocks.names
    await watcher.leave()
    assert not blocks.followed


async def test_two_watchers_and_any_changes() -> None:
    blocks, draw = Blocks(), random.Random(5)
    feed = CacheFeed(blocks)
    one, other = Watcher(feed), Watcher(feed)
    for _ in range(50):
        for _ in range(draw.randrange(1, 9)):
            (blocks.put if draw.random() < 0.6 else blocks.drop)(draw.randrange(1, 30))
        for watcher in (one, other):
            if draw.random() < 0.6:
                await watcher.hear()
    for watcher in (one, other):
        blocks.put(100 + len(watcher.messages))
        while watcher.names != blocks.names:
            await watcher.hear()
    assert [sum(message.reset for message in watcher.messages) for watcher in (one, other)] == [1, 1]
    await one.leave()
    assert blocks.followed
    await other.leave()
    assert not blocks.followed


async def test_a_watcher_that_is_too_slow_is_told_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "MOST_WAITING", 10)
    monkeypatch.setattr(cache_feed, "MESSAGE_BLOCKS", 10)
    blocks = Blocks()
    feed = CacheFeed(blocks)
    slow, fast = Watcher(feed), Watcher(feed)
    await slow.hear()
    await fast.hear()
    for name in range(1, 26):
        blocks.put(name)
        await fast.hear()
    assert (await slow.hear()).reset
    await slow.hear()
    await slow.hear()
    assert [len(message.stored) // 8 for message in slow.messages] == [0, 10, 10, 5], "no message is longer"
    assert slow.names == fast.names == blocks.names
    assert sum(message.reset for message in fast.messages) == 1


async def test_changes_that_the_cache_lost_are_found_in_what_it_holds() -> None:
    blocks = Blocks()
    watcher = Watcher(CacheFeed(blocks))
    await watcher.hear()
    blocks.names = {7}
    blocks.is_whole = False
    assert (await watcher.hear()).reset
    assert watcher.names == {7}


async def test_idle_watcher_gets_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "KEEPALIVE_S", 0.02)
    watcher = Watcher(CacheFeed(Blocks()))
    await watcher.hear()
    changes = await watcher.hear()
    assert (changes.stored, changes.removed, changes.reset) == (b"", b"", False)
