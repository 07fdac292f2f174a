# SPDX-License-Identifier: Apache-2.0
"""Who may ask what: API keys and their limits, before anything else is done with a request.

Without `--api-key-file` everybody may. Open to all are only the paths that say how the gateway is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from llumsched.gateway import request_id
from llumsched.gateway.api_keys import TENANT, ApiKeys, Exceeded, Limit
from llumsched.gateway.errors import Unauthorized
from llumsched.gateway.exchange import failure
from llumsched.gateway.forwarded import keys_shown
from llumsched.gateway.metrics import Metrics
from llumsched.gateway.paths import Style, find

_OPEN: Final = frozenset({"/health", "/healthz", "/ping", "/ready", "/metrics"})
_RELOAD_S: Final = 1.0
_UNKNOWN: Final = ""

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Admission:
    """Checks requests before `answer`: each needs a known key, and a POST some of its allowance."""

    def __init__(self, keys: ApiKeys, answer: Answer, metrics: Metrics) -> None:
        self._keys = keys
        self._answer = answer
        self._refused = metrics.refused

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in _OPEN:
            return await self._answer(request)
        found = find(request.path)
        style = found.path.style if found else Style.OPENAI
        tenant = self._keys.whose(keys_shown(request.headers))
        if tenant is None:
            self._refused.labels(_UNKNOWN, Limit.KEY).inc()
            return failure(Unauthorized("Unauthorized"), _id_of(request), style)
        request[TENANT] = tenant
        if request.method != "POST":
            return await self._answer(request)
        try:
            with tenant.request():
                return await self._answer(request)
        except Exceeded as error:
            self._refused.labels(error.tenant, error.limit).inc()
            return failure(error, _id_of(request), style)

    async def keep_keys(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_S)
            self._keys.reload()


def _id_of(request: web.BaseRequest) -> str:
    return request_id.chosen(request.headers.get("X-Request-Id"))
