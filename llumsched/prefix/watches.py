# SPDX-License-Identifier: Apache-2.0
"""Follows the contents of every instance's prefix cache (`WatchCache`).

Each instance in the view has a stream and is told how often to report, so that all together send about a thousand
messages a second. If a stream ends, is silent or misses a message, the instance's contents are forgotten until the next
stream has repeated everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, Protocol

from llumlet.contract.cache_feed import KEEPALIVE_S, LEAST_INTERVAL_S
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import CacheChanges, WatchCacheRequest
from llumlet.process.credentials import Credentials
from llumlet.process.tasks import cancel
from llumsched.cluster.instance import Instance
from llumsched.prefix.hits import PrefixHits, names_in

logger = logging.getLogger(__name__)
SILENCE_S: Final = 3 * KEEPALIVE_S
"""Silence after which a stream counts as broken."""
LONGEST_STREAM_S: Final = 3600.0
"""Longest time before a stream is restarted."""
MOST_MESSAGES_PER_S: Final = 1000
_MOST_INTERVAL_S: Final = 5.0
_FIRST_RETRY_S: Final = 0.25
_LAST_RETRY_S: Final = 10.0


class Broken(Exception):
    """Raised if a part of a stream is missing."""


class Watchable(Protocol):
    """The interface used of `llumlet.contract.client.LlumletClient`."""

    def watch_cache(
        self, request: WatchCacheRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[CacheChanges, None]: ...

    async def close(self) -> None: ...


Connect = Callable[[Instance], Watchable]


class CacheWatches:
    """Observes a view, on its event loop, after `hits`, which gets what is heard."""

    def __init__(self, hits: PrefixHits, credentials: Credentials, connect: Connect | None = None) -> None:
        self._hits = hits
        self.after = (hits,)
        self._connect = connect or (lambda instance: LlumletClient(instance.llumlet, credentials=credentials))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.in_sync: set[str] = set()
        """Ids of the instances with known contents."""

    # From the view

    def appeared(self, instance: Instance) -> None:
        if instance.metadata.cache_block_size > 0:
            task = asyncio.get_running_loop().create_task(self._watch(instance), name=f"cache of {instance.id}")
            self._tasks[instance.id] = task

    def changed(self, instance: Instance) -> None:
        """Does nothing: a status says nothing about the cache, and a restarted engine is another instance."""

    def left(self, instance: Instance) -> None:
        task = self._tasks.pop(instance.id, None)
        if task is not None:
            task.cancel()
            self._void(instance.id)

    async def close(self) -> None:
        await cancel(*self._tasks.values())

    # One instance

    async def _watch(self, instance: Instance) -> None:
        retry_s, was_void = _FIRST_RETRY_S, False
        client = self._connect(instance)
        try:
            while True:
                try:
                    async for _ in self._heard(client, instance):
                        self._hits.num_resyncs += was_void
                        retry_s, was_void = _FIRST_RETRY_S, False
                    why = "the stream has ended"
                except (LlumletCallFailed, Broken, TimeoutError, ValueError) as error:
                    why = str(error) or f"silent for {SILENCE_S:g} s"
                except Exception as error:
                    logger.exception("what the prefix cache of %s holds cannot be taken in", instance.id)
                    why = type(error).__name__
                was_void = True
                logger.log(
                    logging.INFO if retry_s == _FIRST_RETRY_S else logging.DEBUG,
                    "it is not known what the prefix cache of %s holds: %s",
                    instance.id,
                    why,
                )
                self._void(instance.id)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
        finally:
            await client.close()

    async def _heard(self, client: Watchable, instance: Instance) -> AsyncGenerator[None, None]:
        """Reads one stream, message by message. Raises Broken if one is missing."""
        interval_s = min(max(LEAST_INTERVAL_S, len(self._tasks) / MOST_MESSAGES_PER_S), _MOST_INTERVAL_S)
        metadata = instance.metadata
        request = WatchCacheRequest(
            engine_id=metadata.instance_id, incarnation=metadata.incarnation, interval_s=interval_s
        )
        number = 0
        limit_s = random.uniform(0.5, 1.0) * LONGEST_STREAM_S  # not all at the same time
        async with aclosing(client.watch_cache(request, deadline_s=limit_s)) as stream:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    changes = await anext(stream, None)
                if changes is None:
                    return
                number += 1
                if changes.number != number or (number == 1) > changes.reset:
                    raise Broken(f"message {number} of its changes is missing")
                async with self._turn:
                    self._take(instance, changes)
                    await asyncio.sleep(0)  # what else there is to do comes in between two messages
                yield

    def _take(self, instance: Instance, changes: CacheChanges) -> None:
        if changes.reset:
            self._hits.forget(instance.id)
        self._hits.holds(instance.id, names_in(changes.stored), instance.metadata.cache_block_size)
        if changes.removed:
            self._hits.lacks(instance.id, names_in(changes.removed))
        self.in_sync.add(instance.id)

    def _void(self, instance_id: str) -> None:
        self._hits.forget(instance_id)
        self.in_sync.discard(instance_id)
