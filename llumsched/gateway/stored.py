# SPDX-License-Identifier: Apache-2.0
"""Which instance has a response that a client may ask for again: `/v1/responses` stores it where it was made.

Remembered are the last ones that passed through this process. Of others (another worker's, another gateway's) the
instances are asked, all of them at once, for few clients at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Final

import aiohttp
from yarl import URL

from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.paths import is_name
from llumsched.gateway.upstream import Access

_MOST_REMEMBERED: Final = 10_000
_MOST_SEARCHES: Final = 4
_ASK_TIMEOUT_S: Final = 3.0


class StoredResponses:
    def __init__(self, backends: Backends, session: aiohttp.ClientSession, access: Access) -> None:
        self._access = access
        self._backends = backends
        self._session = session
        self._homes: OrderedDict[str, Backend] = OrderedDict()
        self._searches = asyncio.Semaphore(_MOST_SEARCHES)

    def remember(self, response_id: object, backend: Backend) -> None:
        if isinstance(response_id, str) and is_name(response_id):
            self._homes[response_id] = backend
            self._homes.move_to_end(response_id)
            if len(self._homes) > _MOST_REMEMBERED:
                self._homes.popitem(last=False)

    async def home(self, response_id: str, authorization: str) -> Backend | None:
        """The instance that has it, or None. `authorization`: the client's header, for those that want a key."""
        if not is_name(response_id):
            return None
        known = self._homes.get(response_id)
        if known is not None and known in self._backends:
            return known
        async with self._searches:
            asked = [self._has(backend, response_id, authorization) for backend in self._backends]
            found = next((backend for backend in await asyncio.gather(*asked) if backend is not None), None)
        if found is not None:
            self.remember(response_id, found)
        return found

    async def _has(self, backend: Backend, response_id: str, authorization: str) -> Backend | None:
        headers = self._access.headers
        if authorization and self._access.passes_clients:
            headers = {"Authorization": authorization}
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        url = URL(backend.endpoint.url(f"/v1/responses/{response_id}"))
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(url, headers=headers, timeout=timeout) as answer:
                return backend if answer.status == 200 else None
        return None
