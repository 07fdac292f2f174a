# SPDX-License-Identifier: Apache-2.0
"""Redis as a cluster metadata store: what an instance writes, and the layout that readers find.

    llumnix:instance_metadata:<id>    InstanceMetadata, serialised
    llumnix:instance_status:<id>      InstanceStatus, serialised
    llumnix:peers:<digest>            sorted set: ids of instances of one compatibility digest, by when they were there
    llumnix:changes                   channel: the id, published after each write

Keys live for `TTL_S`; an instance that ends removes its own. A reader that hears an id reads its keys; one that wants
to know of a few others draws them from the set. The keys lie in several slots, so the server is no Redis Cluster.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.exceptions import RedisError

from llumlet.redis_client import checked_name, connect, follow_master, reason_of
from llumlet.report_links import Abortable, LinkLost
from llumlet.types import InstanceMetadata, InstanceStatus

METADATA_PREFIX: Final = "llumnix:instance_metadata:"
STATUS_PREFIX: Final = "llumnix:instance_status:"
CHANNEL: Final = "llumnix:changes"
PEERS_PREFIX: Final = "llumnix:peers:"

TTL_S: Final = 10
METADATA_EVERY_S: Final = 3.0
"""How often the metadata is written anew, so that it lasts as long as the status."""

_WRITE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Writes a status and tells readers. A script: the client's transactions take twice the time of the engine's host."""

_DESCRIBE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[2], now, ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Writes metadata, and the id among peers. The clock is the server's, so that nobody's takes others out of the set."""

_REMOVE_OWN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
"""
"""Removes the keys of this life only: the next life of the same id may have begun."""


class RedisLink(Abortable):
    """A `Link` to a Redis, which is shared: each write costs each reader one, so that `min_interval_s` is that of the
    layout's first writers. Raises ValueError for a URL that is none."""

    min_interval_s = 0.04

    def __init__(self, url: str) -> None:
        super().__init__()
        self.name = checked_name(url)
        self._url = url
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
        keys = [STATUS_PREFIX + self._id]
        await self._run_script(_WRITE, keys, [status.SerializeToString(), TTL_S, CHANNEL, self._id])

    async def describe(self, metadata: InstanceMetadata) -> None:
        self._id, self._digest = metadata.instance_id, metadata.compatibility_digest
        self._written = metadata.SerializeToString()
        keys = [METADATA_PREFIX + self._id, peers_key(self._digest)]
        await self._run_script(_DESCRIBE, keys, [self._written, TTL_S, CHANNEL, self._id])
        self._written_s = time.monotonic()

    async def leave(self) -> None:
        keys = [METADATA_PREFIX + self._id, STATUS_PREFIX + self._id, peers_key(self._digest)]
        await self._run_script(_REMOVE_OWN, keys, [self._written, CHANNEL, self._id])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _run_script(self, script: str, keys: list[str], arguments: list[Any]) -> None:
        """A server is sent a script once; then its hash is enough."""
        await self._run(self._client.register_script(script)(keys, arguments))

    async def _run(self, exchange: Awaitable[Any]) -> None:
        try:
            with self._exchange():
                await exchange
        except (RedisError, OSError) as error:
            raise LinkLost(reason_of(error)) from error


def peers_key(digest: str) -> str:
    return PEERS_PREFIX + digest
