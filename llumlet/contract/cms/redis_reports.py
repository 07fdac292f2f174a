# SPDX-License-Identifier: Apache-2.0
"""Redis as a cluster metadata store: what instances write there, and how one finds others.

    llumnix:instance_metadata:<id>    InstanceMetadata, serialised
    llumnix:instance_status:<id>      InstanceStatus, serialised
    llumnix:peers:<digest>            sorted set: ids of instances of one compatibility digest, by last report
    llumnix:instances                 sorted set: ids of all instances, likewise
    llumnix:changes                   channel: the id, published after each write
    llumnix:rescheduler               the lease of the rescheduler that leads, and `llumnix:rescheduler_term`

A URL with `?cluster=NAME` has `llumnix:NAME:` in the place of `llumnix:`, so that several clusters share a database.
Redis does not scope channels by database: that of any database but 0 ends in `:<database>`. Llumlets of the
release before publish without that ending, and are heard as well; ids that a database does not have are passed over.

A status and metadata live for `TTL_S`; an instance that ends removes its own. Readers subscribe to the channel and read
the keys of each id. The keys lie in several slots, so the server is no Redis Cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from redis.exceptions import RedisError

from llumlet.contract.cms.links import LOOK_S, Abortable, LinkLost
from llumlet.contract.cms.peers import MAX_PEERS, peer_of, takes_requests, usage
from llumlet.contract.types import InstanceMetadata, InstanceState, InstanceStatus, PeersResponse
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of
from llumlet.process.redis_url import RedisUrl

LEAST_INTERVAL_S: Final = 0.04
MOST_WRITES_PER_S: Final = 4000.0
"""Statuses of all instances together: a fifth of a core of each reader."""
TTL_S: Final = 10
MAX_INSTANCES: Final = 10_000
METADATA_EVERY_S: Final = 3.0
"""Time after which metadata is written anew, so that it lasts as long as the status."""

_WRITE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Writes a status and tells readers. A transaction of the client would take twice the CPU of the engine's host."""

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
"""Writes metadata, and the id among peers and among all; returns how many there are. The clock is the server's: no
writer's clock takes others out."""

_REMOVE_OWN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('ZREM', KEYS[4], ARGV[3])
  redis.call('PUBLISH', ARGV[2], ARGV[3])
end
"""
"""Removes the keys of this life only: the next life of the same id may have begun."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the keys and the channel of one cluster."""

    prefix: str
    channel: str

    @classmethod
    def of(cls, url: str) -> Self:
        """The layout that a URL asks for. Raises ValueError for a faulty URL."""
        where = RedisUrl.parse(url)
        prefix = f"llumnix:{where.cluster}:" if where.cluster else "llumnix:"
        return cls(prefix, f"{prefix}changes:{where.database}" if where.database else f"{prefix}changes")

    @property
    def heard_channels(self) -> frozenset[str]:
        """The channel, and the one on which llumlets of the former release publish."""
        return frozenset((self.channel, f"{self.prefix}changes"))

    @property
    def metadata(self) -> str:
        """The prefix of an instance's id in the key of its metadata."""
        return f"{self.prefix}instance_metadata:"

    @property
    def status(self) -> str:
        """The prefix of an instance's id in the key of its status."""
        return f"{self.prefix}instance_status:"

    @property
    def instances(self) -> str:
        return f"{self.prefix}instances"

    @property
    def lease(self) -> str:
        return f"{self.prefix}rescheduler"

    @property
    def term(self) -> str:
        return f"{self.prefix}rescheduler_term"

    def peers(self, digest: str) -> str:
        return f"{self.prefix}peers:{digest}"


class RedisLink(Abortable):
    """A `Link` to a Redis, which is shared: each write costs each reader some 50 µs. `min_interval_s` grows with the
    cluster, so that all instances together write `MOST_WRITES_PER_S` times a second. Raises ValueError for a faulty
    URL."""

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
        """Sends a script once to a server, then only its hash."""
        return await self._run(self._client.register_script(script)(keys, arguments))

    async def _run(self, exchange: Awaitable[Any]) -> Any:
        try:
            with self._exchange():
                return await exchange
        except (RedisError, OSError) as error:
            raise LinkLost(reason_of(error)) from error


class RedisDirectory:
    """A `Directory` over a Redis. Instances that can exchange requests are in a set, of which some are drawn: a large
    cluster is never read whole. Without such a set, as for an instance that still starts, all keys are scanned. Raises
    ValueError for a faulty URL."""

    def __init__(self, url: str) -> None:
        checked_name(url)
        self._url, self._layout = url, Layout.of(url)
        self._client: Any = None

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        if self._client is None:
            self._client = connect(self._url)
        try:
            async with asyncio.timeout(LOOK_S):
                await follow_master(self._client)
                return await self._read(own_ids, digest)
        except TimeoutError:
            raise LinkLost(f"no answer within {LOOK_S:g} s") from None
        except (RedisError, OSError) as error:
            raise LinkLost(reason_of(error)) from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _read(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        own = await self._client.mget([self._layout.metadata + one for one in own_ids]) if own_ids else []
        digest = next((InstanceMetadata.FromString(one).compatibility_digest for one in own if one), digest)
        ids: list[str] = []
        if digest:
            drawn = await self._client.zrandmember(self._layout.peers(digest), MAX_PEERS + len(own_ids))
            ids = [one.decode() for one in drawn or () if one.decode() not in own_ids]
        if not ids:
            ids = [one async for one in self._all_ids()]
        return _peers_among(await self._states(ids), own_ids, digest)

    async def _all_ids(self) -> AsyncIterator[str]:
        number = 0
        prefix = self._layout.metadata
        async for key in self._client.scan_iter(match=prefix + "*", count=500):
            yield key.removeprefix(prefix.encode()).decode()
            number += 1
            if number == MAX_INSTANCES:
                return

    async def _states(self, ids: list[str]) -> list[InstanceState]:
        if not ids:
            return []
        prefixes = self._layout.metadata, self._layout.status
        values = await self._client.mget([prefix + one for one in ids for prefix in prefixes])
        return [
            InstanceState(metadata=InstanceMetadata.FromString(metadata), status=InstanceStatus.FromString(status))
            for metadata, status in zip(values[::2], values[1::2], strict=True)
            if metadata and status
        ]


def _peers_among(states: list[InstanceState], own_ids: Sequence[str], digest: str) -> PeersResponse:
    """The answer that a CMS would give if it knew these states."""
    digest = next((one.metadata.compatibility_digest for one in states if one.metadata.instance_id in own_ids), digest)
    others = [
        state
        for state in states
        if takes_requests(state.status)
        and state.metadata.instance_id not in own_ids
        and (not digest or state.metadata.compatibility_digest == digest)
    ]
    others.sort(key=lambda state: usage(state.status))
    peers = [peer_of(state.metadata, state.status) for state in others[:MAX_PEERS]]
    return PeersResponse(peers=peers, compatibility_digest=digest)
