# SPDX-License-Identifier: Apache-2.0
"""One look into a cluster metadata store, for instances that want to know of each other now and then."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from grpc import aio

from llumlet.client import failure_of
from llumlet.credentials import NONE, Credentials
from llumlet.proto.llumlet_pb2_grpc import CmsStub
from llumlet.report_links import REDIS_SCHEMES, LinkLost
from llumlet.types import Address, InstanceMetadata, InstanceState, InstanceStatus, WatchRequest

LOOK_S: Final = 3.0
MAX_INSTANCES: Final = 10_000


async def look_up(store: str, credentials: Credentials = NONE, deadline_s: float = LOOK_S) -> list[InstanceState]:
    """All instances that `store` knows now: HOST:PORT, or a redis:// URL. Raises LinkLost, and ValueError for what
    names no store."""
    try:
        async with asyncio.timeout(deadline_s):
            if store.startswith(REDIS_SCHEMES):
                return await _read_redis(store)
            return await _ask_cms(Address.parse(store), credentials)
    except TimeoutError:
        raise LinkLost(f"no answer within {deadline_s:g} s") from None


async def _ask_cms(address: Address, credentials: Credentials) -> list[InstanceState]:
    found: dict[str, InstanceState] = {}
    async with credentials.channel(address) as channel:
        call = CmsStub(channel).Watch(WatchRequest(), metadata=credentials.call_metadata)
        try:
            async for change in call:
                if change.complete or len(found) == MAX_INSTANCES:
                    break
                if change.left:
                    found.pop(change.left, None)
                else:
                    found[change.instance.metadata.instance_id] = change.instance
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, str(address)).detail) from error
        finally:
            call.cancel()
    return list(found.values())


async def _read_redis(url: str) -> list[InstanceState]:
    # Only who uses Redis needs its client.
    from redis.exceptions import RedisError

    from llumlet.redis_link import METADATA_PREFIX, STATUS_PREFIX, connect

    client = connect(url)
    try:
        keys = [key async for key in client.scan_iter(match=METADATA_PREFIX + "*", count=500)][:MAX_INSTANCES]
        if not keys:
            return []
        statuses = [STATUS_PREFIX.encode() + key.removeprefix(METADATA_PREFIX.encode()) for key in keys]
        values: list[Any] = await client.mget([*keys, *statuses])
    except (RedisError, OSError) as error:
        raise LinkLost(str(error) or type(error).__name__) from error
    finally:
        await client.aclose()
    return [
        InstanceState(metadata=InstanceMetadata.FromString(metadata), status=InstanceStatus.FromString(status or b""))
        for metadata, status in zip(values[: len(keys)], values[len(keys) :], strict=True)
        if metadata
    ]
