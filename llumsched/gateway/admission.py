# SPDX-License-Identifier: Apache-2.0
"""API keys and their limits, checked before anything else is done with a request.

Without `--api-key-file` every client is accepted. Paths that tell the gateway's own state need no key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from llumsched.gateway.api_keys import TENANT, ApiKeys, Exceeded, Limit
from llumsched.gateway.errors import Unauthorized
from llumsched.gateway.forwarded import keys_shown
from llumsched.gateway.gateway_metrics import Metrics
from llumsched.gateway.refusals import Refusals

_OPEN: Final = frozenset({"/health", "/healthz", "/ping", "/ready"})
_RELOAD_S: Final = 1.0
_UNKNOWN: Final = ""
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Admission:
    """Checks the key and the allowance of each request before `answer`."""

    def __init__(self, keys: ApiKeys, answer: Answer, metrics: Metrics, refusals: Refusals) -> None:
        self._keys = keys
        self._answer = answer
        self._refused = metrics.refused
        self._refusals = refusals

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in _OPEN:
            return await self._answer(request)
        tenant = self._keys.whose(keys_shown(request.headers))
        if tenant is None:
            self._refused.labels(_UNKNOWN, Limit.KEY).inc()
            return self._refusals.answer(request, Unauthorized("Unauthorized", headers=_CHALLENGE))
        request[TENANT] = tenant
        try:
            with tenant.request():
                return await self._answer(request)
        except Exceeded as error:
            self._refused.labels(error.tenant, error.limit).inc()
            return self._refusals.answer(request, error, error.tenant)

    async def keep_keys(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_S)
            await asyncio.to_thread(self._keys.reload)
