# SPDX-License-Identifier: Apache-2.0
"""Redis as a cluster metadata store: what an instance writes, and the layout that readers find.

    llumnix:instance_metadata:<id>    InstanceMetadata, serialised
    llumnix:instance_status:<id>      InstanceStatus, serialised
    llumnix:changes                   channel: the id, published after each write

Both keys live for `TTL_S`; an instance that ends removes them. A reader that hears an id reads its keys.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from redis import asyncio as redis
from redis.exceptions import RedisError

from llumlet.report_links import Abortable, LinkLost
from llumlet.types import InstanceMetadata, InstanceStatus

METADATA_PREFIX: Final = "llumnix:instance_metadata:"
STATUS_PREFIX: Final = "llumnix:instance_status:"
CHANNEL: Final = "llumnix:changes"

TTL_S: Final = 10
METADATA_EVERY_S: Final = 3.0
"""How often the metadata is written anew, so that it lasts as long as the status."""
SOCKET_TIMEOUT_S: Final = 2.0

_WRITE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Who is told finds what was written. A script: the client's transactions take twice the time of the engine's host."""

_REMOVE_OWN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
"""
"""Not the keys of the next life of the same id, which may have begun."""


class RedisLink(Abortable):
    """`min_interval_s` is that of the layout's first writers: a Redis is shared, and each write costs each reader one.

    Raises ValueError for a URL that names no server."""

    min_interval_s = 0.04

    def __init__(self, url: str) -> None:
        super().__init__()
        self.name = redis_name(url)
        self._url = url
        self._client: Any = None
        self._id = ""
        self._written = b""
        self._written_s = 0.0

    async def open(self, metadata: InstanceMetadata, ended: Callable[[], None]) -> None:
        self._client = connect(self._url)
        await self.describe(metadata)

    async def push(self, status: InstanceStatus, metadata: Callable[[], InstanceMetadata]) -> None:
        if time.monotonic() - self._written_s > METADATA_EVERY_S:
            await self.describe(metadata())
        await self._run(self._write(STATUS_PREFIX, status.SerializeToString()))

    async def describe(self, metadata: InstanceMetadata) -> None:
        await self._run(self._write_metadata(metadata))

    async def leave(self) -> None:
        keys = (METADATA_PREFIX + self._id, STATUS_PREFIX + self._id)
        await self._run(self._client.eval(_REMOVE_OWN, 2, *keys, self._written, CHANNEL, self._id))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _write_metadata(self, metadata: InstanceMetadata) -> None:
        self._id = metadata.instance_id
        self._written = metadata.SerializeToString()
        await self._write(METADATA_PREFIX, self._written)
        self._written_s = time.monotonic()

    async def _write(self, prefix: str, value: bytes) -> None:
        await self._client.eval(_WRITE, 1, prefix + self._id, value, TTL_S, CHANNEL, self._id)

    async def _run(self, exchange: Awaitable[Any]) -> None:
        try:
            with self._exchange():
                await exchange
        except (RedisError, OSError) as error:
            raise LinkLost(str(error) or type(error).__name__) from error


def redis_name(url: str) -> str:
    """`redis://HOST:PORT`, without user and password. Raises ValueError for a URL that names no server."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError as error:
        raise ValueError(f"the redis:// URL is not one: {error}") from error
    if not host:
        raise ValueError("the redis:// URL names no host")
    return f"{parts.scheme}://[{host}]:{port}" if ":" in host else f"{parts.scheme}://{host}:{port}"


def connect(url: str) -> Any:
    """A client that gives up after `SOCKET_TIMEOUT_S` and repeats nothing by itself."""
    return redis.Redis.from_url(
        url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S, retry=None
    )
