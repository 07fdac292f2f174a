# SPDX-License-Identifier: Apache-2.0
"""CORS headers for browsers' pages of other origins: static, from `--allowed-origins`.

The gateway answers preflights itself (OPTIONS, before a request that a page makes), without asking for a key. Engines
do not get the `Origin`, and so add no headers of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from aiohttp import web

from llumsched.gateway import paths
from llumsched.gateway.paths import Kind
from llumsched.gateway.services import TOLD

ANY: Final = "*"
_METHOD: Final = "Access-Control-Request-Method"
_HEADERS: Final = "Access-Control-Request-Headers"
_NOT_PASSED: Final = frozenset((Kind.REFUSED, Kind.CANNOT_PASS))
_REMEMBERED_S: Final = 600
"""Time for which a browser need not ask again."""

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Cors:
    """Handles other origins before `answer`. `origins`: whose pages may read answers; empty: none."""

    def __init__(self, answer: Answer, origins: Collection[str]) -> None:
        self._answer = answer
        self._origins = frozenset(origins)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins:
            return await self._answer(request)
        told = self._told(origin)
        if request.method == "OPTIONS" and _METHOD in request.headers and (found := _passed(request.path)):
            return _preflight(request, told, found.path.methods)
        request[TOLD] = told
        response = await self._answer(request)
        if not response.prepared:
            response.headers.update(told)
        return response

    def _told(self, origin: str) -> dict[str, str]:
        """Headers of every answer to this origin."""
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY}
        allowed = {"Access-Control-Allow-Origin": origin} if origin in self._origins else {}
        return {"Vary": "Origin"} | allowed


def _preflight(request: web.BaseRequest, told: Mapping[str, str], methods: Collection[str]) -> web.Response:
    if "Access-Control-Allow-Origin" not in told:
        return web.Response(status=400, text="Disallowed CORS origin", headers=told)
    asked = {"Access-Control-Allow-Headers": request.headers[_HEADERS]} if _HEADERS in request.headers else {}
    allowed = {"Access-Control-Allow-Methods": ", ".join(methods), "Access-Control-Max-Age": str(_REMEMBERED_S)}
    return web.Response(text="OK", headers={**told, **allowed, **asked})


def _passed(path: str) -> paths.Found | None:
    found = paths.find(path)
    return found if found is not None and found.path.kind not in _NOT_PASSED else None
