# SPDX-License-Identifier: Apache-2.0
"""Redis as a cluster metadata store: what an instance writes, in the layout of `redis_layout`.

Keys live for `TTL_S`; an instance that ends removes its own. A reader that hears an id reads its keys; one that wants
to know of a few others draws them from the set. The keys lie in several slots, so the server is no Redis Cluster.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.exceptions import RedisError

from llumlet.contract.cms.redis_layout import Layout
from llumlet.contract.cms.report_links import Abortable, LinkLost
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of

LEAST_INTERVAL_S: Final = 0.04
MOST_WRITES_PER_S: Final = 4000.0
"""Statuses of all instances together: a fifth of a core of each reader."""
TTL_S: Final = 10
METADATA_EVERY_S: Final = 3.0
"""Time between two writes of the metadata, which must last as long as the status."""

_WRITE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Writes a status and tells readers. A script: the client's transactions take twice the time of the engine's host."""

_DESCRIBE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
local now = tonumber(redis.call('TIME')[1])
for _, set in ipairs({KEYS[2], KEYS[3]}) do
  redis.call('ZADD', set, now, ARGV[4])
  redis.call('ZREMRANGEBYSCORE', set, '-inf', now - tonumber(ARGV[2]))
  redis.call('EXPIRE', set, ARGV[2])
end
redis.call('PUBLISH', ARGV[3], ARGV[4])
return redis.call('ZCARD', KEYS[3])
"""
"""Writes metadata, and the id among peers and among all; returns their number. It uses the server's clock, so that no
writer's clock can expire others."""

_REMOVE_OWN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('ZREM', KEYS[4], ARGV[3])
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
"""
"""Removes the keys of this life only: the next life of the same id may have begun."""


class RedisLink(Abortable):
    """A `Link` to a Redis. Each write costs each reader some 50 µs, so `min_interval_s` grows with the cluster until
    all instances together write `MOST_WRITES_PER_S` times a second. Raises ValueError for an invalid URL."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.name = checked_name(url)
        self.min_interval_s = LEAST_INTERVAL_S
        self._url, self._layout = url, Layout.of(url)
        self._client: Any = None
        self._id = ""
        self._digest = ""
        self._written = b""
        self._written_s = 0.0

    async def open(self, metadata: InstanceMetadata, ended: Callable[[], None]) -> None:
        self._client = connect(self._url)
        await self.describe(metadata)

    async def push(self, status: InstanceStatus, metadata: Callable[[], InstanceMetadata]) -> None:
        if time.monotonic() - self._written_s > METADATA_EVERY_S:
            await self._run(follow_master(self._client))
            await self.describe(metadata())
        keys = [self._layout.status + self._id]
        await self._run_script(_WRITE, keys, [status.SerializeToString(), TTL_S, self._layout.channel, self._id])

    async def describe(self, metadata: InstanceMetadata) -> None:
        self._id, self._digest = metadata.instance_id, metadata.compatibility_digest
        self._written = metadata.SerializeToString()
        layout = self._layout
        keys = [layout.metadata + self._id, layout.peers(self._digest), layout.instances]
        num_instances = await self._run_script(_DESCRIBE, keys, [self._written, TTL_S, layout.channel, self._id])
        self.min_interval_s = max(LEAST_INTERVAL_S, int(num_instances) / MOST_WRITES_PER_S)
        self._written_s = time.monotonic()

    async def leave(self) -> None:
        layout = self._layout
        keys = [layout.metadata + self._id, layout.status + self._id, layout.peers(self._digest), layout.instances]
        await self._run_script(_REMOVE_OWN, keys, [self._written, layout.channel, self._id])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _run_script(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        """Sends a script once, and then its hash."""
        return await self._run(self._client.register_script(script)(keys, arguments))

    async def _run(self, exchange: Awaitable[Any]) -> Any:
        try:
            with self._exchange():
                return await exchange
        except (RedisError, OSError) as error:
            raise LinkLost(reason_of(error)) from error
