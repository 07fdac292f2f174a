# SPDX-License-Identifier: Apache-2.0
"""Asks a Redis that instances write to for peers.

Instances that can exchange requests share a set, from which some are drawn, so that nobody reads a large cluster whole.
Without a set, as before an instance has written, all keys are scanned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from redis.exceptions import RedisError

from llumlet.contract.cms.directory import LOOK_S
from llumlet.contract.cms.peers import MAX_PEERS, peer_of, takes_requests, usage
from llumlet.contract.cms.redis_layout import Layout
from llumlet.contract.cms.report_links import LinkLost
from llumlet.contract.types import InstanceMetadata, InstanceState, InstanceStatus, PeersResponse
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of

MAX_INSTANCES: Final = 10_000


class RedisDirectory:
    """A `Directory`. Raises ValueError for an invalid URL."""

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
    """The answer of a store that knows these states."""
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
