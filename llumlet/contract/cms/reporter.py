# SPDX-License-Identifier: Apache-2.0
"""Tells the cluster metadata store (CMS) that an instance is there, and how loaded it is.

The load is pushed when it changes: `Reporter.changed` marks it dirty, and the newest status goes out as soon as the one
before has been taken, so that at most one push is in flight and nothing queues up. An idle instance repeats itself
every `KEEPALIVE_S`. A store that is away, slow or stuck costs the engine nothing: it is tried again, less and less
often, and finds the newest status when it is back.

Several stores may be named (`HOST:PORT,HOST:PORT`): each scheduler with a CMS of its own is told by itself, and none
waits for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

from llumlet.contract.cms.links import Link, LinkLost
from llumlet.contract.cms.stores import open_link
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.redis_url import split_stores
from llumlet.process.tasks import end, post

logger = logging.getLogger(__name__)

KEEPALIVE_S: Final = 1.0
"""Time between two pushes of an instance whose load does not change."""
PUSH_DEADLINE_S: Final = 3.0
"""Time from a push to its answer, after which the store is held to be stuck, and connected to anew."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 2.0
"""The pause before a new attempt doubles from the first to the last, each spread by half of it both ways."""
LEAVE_S: Final = 1.0
"""Time that `leave` waits for the stores, all together."""
_TICK_S: Final = KEEPALIVE_S / 4


class Reporter:
    """Feeds every store in `cms`. Raises ValueError with all faults.

    `metadata` and `status` are called on the loop of `run` and return messages that the reporter may keep. It stamps
    `utc_update` and `timestamp_ms`, in increasing order.
    """

    def __init__(
        self,
        cms: str,
        metadata: Callable[[], InstanceMetadata],
        status: Callable[[], InstanceStatus],
        credentials: Credentials = NONE,
    ) -> None:
        faults = cms_faults(cms)
        if faults:
            raise ValueError("; ".join(faults))
        self._metadata = metadata
        self._status = status
        self._feeds = [_Feed(open_link(store, credentials), self) for store in split_stores(cms)]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = threading.Lock()
        self._marked = False
        self._timestamp_ms = 0

    def changed(self) -> None:
        """Says that the load has changed. Any thread may; O(1), and nearly nothing while a change waits already."""
        if self._loop is not None and self._mark():
            post(self._loop, self._wake)

    def metadata_changed(self) -> None:
        """Says that the metadata has changed: an adapter was loaded, say. Any thread may."""
        if self._loop is not None:
            post(self._loop, self._describe)

    def _mark(self) -> bool:
        """True if the loop has not been woken yet."""
        if self._marked:
            return False
        with self._lock:
            first, self._marked = not self._marked, True
        return first

    async def run(self) -> None:
        """Report until `leave` is called. Cancelled, it falls silent without a word."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(feed.run(), name=f"report to {feed.link.name}") for feed in self._feeds]
        ticker = asyncio.create_task(self._tick(), name="report ticks")
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await end(ticker, *self._tasks)

    async def leave(self) -> None:
        """Tell the stores that can be reached that the instance ends, and stop. At most `LEAVE_S` seconds."""
        for feed in self._feeds:
            feed.leave()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_S)
        await end(*self._tasks)

    @property
    def connected(self) -> dict[str, bool]:
        """True for each store, by name, that takes what is pushed."""
        return {feed.link.name: feed.connected for feed in self._feeds}

    def metadata_now(self) -> InstanceMetadata:
        metadata = self._metadata()
        metadata.utc_update = time.time()
        return metadata

    def status_now(self) -> InstanceStatus:
        status = self._status()
        # Also when the clock is set back: what is not newer is not taken.
        self._timestamp_ms = max(int(time.time() * 1e3), self._timestamp_ms + 1)
        status.timestamp_ms = self._timestamp_ms
        return status

    def _wake(self) -> None:
        self._marked = False
        for feed in self._feeds:
            feed.wake()

    def _describe(self) -> None:
        for feed in self._feeds:
            feed.describe()

    async def _tick(self) -> None:
        """Runs one timer for all: a timer for every push would cost more than the push."""
        while True:
            await asyncio.sleep(_TICK_S)
            for feed in self._feeds:
                feed.tick()


class _Feed:
    """A store, and the state that it has been told."""

    def __init__(self, link: Link, reporter: Reporter) -> None:
        self.link = link
        self.connected = False
        self._reporter = reporter
        self._dirty = asyncio.Event()
        self._left = asyncio.Event()
        self._pushed_s = 0.0
        self._in_flight = False
        self._delayed = False
        self._metadata_due = False
        self._retry_s = FIRST_RETRY_S
        self._began_s = 0.0

    def wake(self) -> None:
        """Marks the status as new, to be pushed now or when the pushes are far enough apart."""
        if self._dirty.is_set() or self._delayed:
            return
        wait_s = self._pushed_s + self.link.min_interval_s - time.monotonic()
        if wait_s <= 0:
            self._dirty.set()
        else:
            self._delayed = True
            asyncio.get_running_loop().call_later(wait_s, self._undelay)

    def describe(self) -> None:
        """Marks the metadata as new: it goes with the next push, or opens the next session, as it is then."""
        self._metadata_due = True
        self.wake()

    def leave(self) -> None:
        self._left.set()
        self._dirty.set()

    def tick(self) -> None:
        waited_s = time.monotonic() - self._pushed_s
        if self._in_flight and waited_s > PUSH_DEADLINE_S:
            self.link.abort(f"no answer within {PUSH_DEADLINE_S:g} s")
        elif not self._in_flight and waited_s > KEEPALIVE_S - _TICK_S:
            self._dirty.set()

    def _undelay(self) -> None:
        self._delayed = False
        self._dirty.set()

    async def run(self) -> None:
        while not self._left.is_set():
            self._began_s = time.monotonic()
            try:
                await self._session()
            except LinkLost as loss:
                self._lost(str(loss))
            except Exception:
                logger.exception("The report to %s failed", self.link.name)
                self._lost("see above")
            finally:
                self.connected = self._in_flight = False
                await self.link.close()
            if not self._left.is_set():
                await self._pause()

    async def _session(self) -> None:
        self._metadata_due = False
        await self._bounded(self.link.open(self._reporter.metadata_now(), self._dirty.set))
        while not self._left.is_set():
            self._dirty.clear()
            if self._metadata_due:
                self._metadata_due = False
                await self._bounded(self.link.describe(self._reporter.metadata_now()))
            await self._bounded(self.link.push(self._reporter.status_now(), self._reporter.metadata_now))
            if not self.connected:
                self.connected = True
                logger.info("Reporting to %s", self.link.name)
            await self._dirty.wait()
        await self._bounded(self.link.leave())

    async def _bounded(self, exchange: Awaitable[None]) -> None:
        """Awaits an exchange with the store. The ticker keeps its deadline."""
        self._pushed_s, self._in_flight = time.monotonic(), True
        await exchange
        self._in_flight = False

    async def _pause(self) -> None:
        pause_s = self._retry_s * random.uniform(0.5, 1.5)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._left.wait()

    def _lost(self, why: str) -> None:
        """Logs that the store is away, once per outage. One that takes a report and then refuses it is away, too."""
        if self.connected and time.monotonic() - self._began_s > LAST_RETRY_S:
            self._retry_s = FIRST_RETRY_S
        level = logging.WARNING if self._retry_s == FIRST_RETRY_S else logging.DEBUG
        logger.log(level, "The CMS at %s does not listen: %s", self.link.name, why)


def cms_faults(cms: str) -> list[str]:
    """Faults of the value of `--llumlet-cms`, a sentence each."""
    stores = split_stores(cms)
    if not stores:
        return ["HOST:PORT or redis://HOST:PORT of a CMS is missing"]
    faults = []
    for store in stores:
        try:
            open_link(store, NONE)
        except ValueError as error:
            faults.append(str(error))
    return faults
