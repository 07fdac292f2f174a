# SPDX-License-Identifier: Apache-2.0
"""A short look at the cluster, for commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from llumlet.contract.errors import LlumletUnreachable
from llumlet.process.credentials import NONE, Credentials
from llumsched.cluster.view import View
from llumsched.cms.store import name_of, open_store

LOOK_S: Final = 5.0


class CmsUnreachable(LlumletUnreachable):
    """Raised if the CMS does not answer, or does not know an instance."""


@asynccontextmanager
async def look(url: str, credentials: Credentials = NONE) -> AsyncIterator[View]:
    """A view of all that the CMS knows, kept current inside `async with`. Raises CmsUnreachable, and ValueError for an
    invalid URL."""
    store = open_store(url, credentials)
    await store.start()
    try:
        try:
            async with asyncio.timeout(LOOK_S):
                await store.complete.wait()
        except TimeoutError:
            raise CmsUnreachable(name_of(url), store.problem or f"no answer within {LOOK_S:g} s") from None
        yield store.view
    finally:
        await store.close()
