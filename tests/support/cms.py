# SPDX-License-Identifier: Apache-2.0
"""Real cluster metadata stores for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from llumsched.cms.embedded import EmbeddedStore
from tests.support.redis_server import RedisServer


@contextlib.asynccontextmanager
async def embedded_store() -> AsyncIterator[EmbeddedStore]:
    """One that listens at a free port of loopback."""
    store = EmbeddedStore()
    await store.start()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def cms_of(kind: str) -> AsyncIterator[str]:
    """Where instances report to and others look: the embedded one, or "redis"."""
    if kind == "redis":
        async with RedisServer("secret") as server:
            yield server.url
    else:
        async with embedded_store() as store:
            yield str(store.address)
