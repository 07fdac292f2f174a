# SPDX-License-Identifier: Apache-2.0
"""A Redis that instances report to, for several schedulers, in the layout of `llumlet.contract.cms.redis_reports`.

First everything is read (SCAN, MGET), then the instances named by the channel, so that a write is seen when it is
published. A lost connection begins anew. Every `RESCAN_S` a scan finds expired records and heals misses. While Redis is
unreachable no instance counts as silent: the view stays and ages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import DecodeError
from redis.exceptions import RedisError

from llumlet.contract.cms.links import LinkLost
from llumlet.contract.cms.redis_reports import Layout
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of
from llumlet.process.tasks import end
from llumsched.cms.followed import FollowedStore
from llumsched.cms.intake import MAX_INSTANCES, PATIENCE, Intake, Patience, ReportRefused
from llumsched.cms.validation import MAX_ID_CHARACTERS, MAX_REPORT_BYTES

logger = logging.getLogger(__name__)

RESCAN_S: Final = 5.0
BEAT_S: Final = 1.0
"""Time between two pings of a quiet server."""
_MGET: Final = 500
"""Instances per MGET."""
_READ_EVERY_S: Final = 0.005
"""Shortest time between two reads."""


class RedisStore(FollowedStore):
    """Follows a Redis. Raises ValueError for a bad URL."""

    def __init__(self, url: str, *, patience: Patience = PATIENCE) -> None:
        super().__init__(checked_name(url))
        self._url, self._layout = url, Layout.of(url)
        self._prefixes = self._layout.metadata, self._layout.status
        self._intake = Intake(self.view, patience)
        self._changed: dict[str, None] = {}
        self._news = asyncio.Event()
        self._metadata: dict[str, bytes] = {}
        """Metadata as last read, since most reads find the same."""
        self._refused: dict[str, str] = {}
        """Faults of an instance's records that were logged once."""

    async def _follow(self) -> None:
        try:
            async with contextlib.aclosing(connect(self._url)) as client:
                await self._follow_by(client)
        except (RedisError, OSError) as error:
            raise LinkLost(reason_of(error)) from error

    async def _follow_by(self, client: Any) -> None:
        """Follows the channel until the connection is lost."""
        async with client.pubsub(ignore_subscribe_messages=True) as channel:
            # A Redis Cluster refuses keys of several slots, also while nobody has written any.
            await client.mget(list(self._prefixes))
            # Before the scan: a write between the two is then read twice, rather than not at all.
            await channel.subscribe(*self._layout.heard_channels)
            listener = asyncio.create_task(self._listen(channel), name=f"listen to {self._name}")
            watcher = asyncio.create_task(_stay_with_master(client), name=f"stay with the master of {self._name}")
            for task in (listener, watcher):
                task.add_done_callback(lambda _: self._news.set())
            sweeper = asyncio.create_task(self._intake.keep_sweeping(), name=f"sweep after {self._name}")
            try:
                await self._scan(client)
                self._reached()
                self.complete.set()
                await self._keep_reading(client, listener, watcher)
            finally:
                await end(listener, watcher, sweeper)

    async def _listen(self, channel: Any) -> None:
        """Collects published ids; the newest record is read however often an id came."""
        async for message in channel.listen():
            instance_id = _id(message["data"])
            if instance_id is not None and len(self._changed) < MAX_INSTANCES:
                self._changed[instance_id] = None
                self._news.set()
        raise ConnectionError("the subscription has ended")

    async def _keep_reading(self, client: Any, *ending: asyncio.Task[None]) -> None:
        """Reads changes until one of the tasks raises."""
        scanned_s = heard_s = time.monotonic()
        while not any(task.done() for task in ending):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S / 4):
                    await self._news.wait()
            self._news.clear()
            changed, self._changed = self._changed, {}
            now_s = time.monotonic()
            if changed:
                await self._read(client, changed, published=True)
            elif now_s - heard_s > BEAT_S:
                await client.ping()
            else:
                continue
            self.view.heard_s = heard_s = time.monotonic()
            if now_s - scanned_s > RESCAN_S:
                await self._scan(client)
                scanned_s = now_s
            # A read costs the same for one and for a few.
            await asyncio.sleep(_READ_EVERY_S)
        for task in ending:
            if task.done():
                await task

    async def _scan(self, client: Any) -> None:
        ids: dict[str, None] = {}
        prefix = self._layout.metadata
        async for key in client.scan_iter(match=prefix + "*", count=1000):
            instance_id = _id(key[len(prefix) :])
            if instance_id is not None and len(ids) < MAX_INSTANCES:
                ids[instance_id] = None
        await self._read(client, ids, published=False)

    async def _read(self, client: Any, ids: Iterable[str], *, published: bool) -> None:
        wanted = list(ids)
        for begin in range(0, len(wanted), _MGET):
            some = wanted[begin : begin + _MGET]
            values = await client.mget([prefix + each for each in some for prefix in self._prefixes])
            for instance_id, metadata, status in zip(some, values[::2], values[1::2], strict=True):
                try:
                    self._take(instance_id, metadata, status, published)
                    self._refused.pop(instance_id, None)
                except ReportRefused as refusal:
                    self._refuse(instance_id, str(refusal))

    def _take(
        self, instance_id: str, metadata_bytes: bytes | None, status_bytes: bytes | None, published: bool
    ) -> None:
        if metadata_bytes is None:
            # Removed, if it was published. Otherwise lost with the server's memory, perhaps: silence will tell.
            if published and status_bytes is None:
                self._intake.remove(instance_id)
            return
        known = self.view.get(instance_id)
        if known is None or self._metadata.get(instance_id) != metadata_bytes:
            metadata = InstanceMetadata()
            _parse(metadata, metadata_bytes)
            if metadata.instance_id != instance_id:
                named = metadata.instance_id[:MAX_ID_CHARACTERS]
                raise ReportRefused(f"the metadata under its key is that of {named!r}")
            if known is None or known.metadata != metadata:
                self._intake.metadata(metadata)
            known = self.view[instance_id]
            self._metadata[instance_id] = metadata_bytes
        if status_bytes is not None:
            status = InstanceStatus()
            _parse(status, status_bytes)
            self._intake.status(status, instance_id, known.metadata.incarnation)

    def _refuse(self, instance_id: str, why: str) -> None:
        if self._refused.get(instance_id) != why and len(self._refused) < MAX_INSTANCES:
            self._refused[instance_id] = why
            logger.warning("%s has a faulty record of instance %s, which is ignored: %s", self._name, instance_id, why)


async def _stay_with_master(client: Any) -> None:
    """Raises when the Sentinels replace the master, which may still answer readers."""
    while True:
        await asyncio.sleep(RESCAN_S)
        if await follow_master(client):
            raise ConnectionError("the Sentinels name another master")


def _id(raw: bytes) -> str | None:
    """An instance's id; None for an invalid one, as anybody may publish and write keys."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if 0 < len(text) <= MAX_ID_CHARACTERS else None


def _parse(message: InstanceMetadata | InstanceStatus, value: bytes) -> None:
    if len(value) > MAX_REPORT_BYTES:
        raise ReportRefused(f"{len(value)} bytes are too many")
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise ReportRefused("it is not a valid message") from error
