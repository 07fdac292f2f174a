# SPDX-License-Identifier: Apache-2.0
"""The rescheduler in its own process: a store, the loop, and optional HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import cancel
from llumsched.cluster.view import View
from llumsched.cms.store import Store, open_store
from llumsched.prefix.hits import PrefixHits
from llumsched.prefix.index import PrefixIndex
from llumsched.prefix.prefix_metrics import PrefixMetrics
from llumsched.prefix.watches import CacheWatches
from llumsched.rescheduling import http
from llumsched.rescheduling.planning.draft import Shares, caches_unknown
from llumsched.rescheduling.rescheduler import Rescheduler, lease_of
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig


@dataclass(frozen=True)
class RunningRescheduler:
    """A running rescheduler. `port` is 0 without HTTP."""

    rescheduler: Rescheduler
    store: Store
    port: int
    _loop: asyncio.Task[None]
    _stack: contextlib.AsyncExitStack

    async def close(self) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits for the loop, which ends only by an error."""
        await asyncio.shield(self._loop)


async def serve(
    cms: str,
    config: ReschedulingConfig,
    credentials: Credentials = NONE,
    *,
    num_cached_blocks: int = 0,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> RunningRescheduler:
    """Starts a rescheduler. `port` None: no HTTP, 0: any free one. An unreachable CMS is retried. `num_cached_blocks`:
    largest number of known blocks of prefix caches; 0 follows none.

    Raises OSError if the port is not available.
    """
    async with contextlib.AsyncExitStack() as stack:
        registry = CollectorRegistry()
        store = open_store(cms, credentials, silent_s=config.staleness_s)
        await store.start()
        stack.push_async_callback(store.close)
        lease = lease_of(cms)
        stack.push_async_callback(lease.close)
        await lease.start()
        shares = _watch_caches(stack, store.view, num_cached_blocks, credentials, registry)
        rescheduler = Rescheduler(store.view, config, credentials, registry, lease=lease, shares=shares)
        stack.push_async_callback(rescheduler.close)
        loop = asyncio.create_task(rescheduler.run(), name="rescheduler")
        stack.push_async_callback(cancel, loop)
        bound = 0
        if port is not None:
            runner = web.AppRunner(http.standalone(store.view, rescheduler, registry), access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, port).start()
            bound = runner.addresses[0][1]
        return RunningRescheduler(rescheduler, store, bound, loop, stack.pop_all())
    raise AssertionError("unreachable")


def _watch_caches(
    stack: contextlib.AsyncExitStack, view: View, num_blocks: int, credentials: Credentials, registry: CollectorRegistry
) -> Shares:
    """Follows all instances' caches until the stack is closed."""
    if not num_blocks:
        return caches_unknown
    hits = PrefixHits(PrefixIndex(num_blocks))
    watches = CacheWatches(hits, credentials)
    stack.push_async_callback(watches.close)
    stack.callback(view.observe(hits, watches))
    registry.register(PrefixMetrics(hits))
    return hits.shares
