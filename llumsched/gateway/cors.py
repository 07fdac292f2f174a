# SPDX-License-Identifier: Apache-2.0
"""CORS: the gateway allows the same origins as the engines.

A preflight (OPTIONS, without key and body) passes to an engine, whatever the path. The headers that engines send to an
origin are remembered for the gateway's own answers; without them a page could not read why its request was refused.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from llumsched.gateway import paths
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.errors import GatewayError, NoInstance, Overloaded, UpstreamFailed
from llumsched.gateway.exchange import failure
from llumsched.gateway.paths import Kind
from llumsched.gateway.services import TOLD

_ALLOWED: Final = "Access-Control-Allow-Origin"
_METHOD: Final = "Access-Control-Request-Method"
_ASKED_WITH: Final = (
    "Origin",
    _METHOD,
    "Access-Control-Request-Headers",
    "Access-Control-Request-Private-Network",
)
_TOLD: Final = (_ALLOWED, "Access-Control-Allow-Credentials", "Access-Control-Expose-Headers")
"""Headers of every answer; the others are a preflight's."""
_PASSED_BACK: Final = ("access-control-", "vary", "content-type")
_NOT_PASSED: Final = frozenset((Kind.REFUSED, Kind.CANNOT_PASS))
_MODELS: Final = "/v1/models"
_MOST_ORIGINS: Final = 1000
_MOST_CHARACTERS: Final = 256
_MOST_PREFLIGHTS: Final = 64
"""Largest number of preflights at a time, as they need no key."""
_TIMEOUT_S: Final = 3.0
_NUM_TRIES: Final = 2

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Cors:
    """Handles other origins before `answer`."""

    def __init__(self, answer: Answer, backends: Backends, session: aiohttp.ClientSession) -> None:
        self._answer = answer
        self._backends = backends
        self._session = session
        self._num_preflights = 0
        self._told: OrderedDict[str, dict[str, str]] = OrderedDict()
        """The headers that engines send, by origin."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is None:
            return await self._answer(request)
        if request.method == "OPTIONS" and _METHOD in request.headers and _is_passed(request.path):
            return await self._preflight(request, origin)
        request[TOLD] = self._told.get(origin, {})
        response = await self._answer(request)
        if _ALLOWED in response.headers:
            self._remember(origin, response.headers)
        elif not response.prepared:
            if request.path == _MODELS and origin not in self._told:  # what a page may ask for first, without one
                with suppress(GatewayError):
                    await self._ask(_MODELS, {"Origin": origin, _METHOD: "GET"})
            self._tell(origin, response.headers)
        return response

    async def _preflight(self, request: web.BaseRequest, origin: str) -> web.StreamResponse:
        asked = {name: request.headers[name] for name in _ASKED_WITH if name in request.headers}
        try:
            return await self._ask(request.path, asked)
        except GatewayError as error:
            response = failure(error, "")
            self._tell(origin, response.headers)
            return response

    async def _ask(self, path: str, asked: Mapping[str, str]) -> web.Response:
        """An engine's answer to a preflight. Raises NoInstance, Overloaded, UpstreamFailed."""
        if self._num_preflights >= _MOST_PREFLIGHTS:
            raise Overloaded("Too many preflights are in flight.", retry_after_s=1)
        self._num_preflights += 1
        try:
            return await self._ask_any(path, asked)
        finally:
            self._num_preflights -= 1

    async def _ask_any(self, path: str, asked: Mapping[str, str]) -> web.Response:
        known = list(self._backends)
        backends = [backend for backend in known if not self._backends.avoids(backend)] or known
        if not backends:
            raise NoInstance("No instance is known.", retry_after_s=1)
        for backend in random.sample(backends, min(_NUM_TRIES, len(backends))):
            try:
                return await self._ask_one(backend, path, asked)
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
        raise UpstreamFailed("No instance answered the preflight.")

    async def _ask_one(self, backend: Backend, path: str, asked: Mapping[str, str]) -> web.Response:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        url = URL(backend.endpoint.url(path))
        async with self._session.options(url, headers=asked, timeout=timeout, allow_redirects=False) as answer:
            self._remember(asked["Origin"], answer.headers)
            told = answer.headers.items()
            headers = {name: value for name, value in told if name.lower().startswith(_PASSED_BACK)}
            return web.Response(status=answer.status, body=await answer.read(), headers=headers)

    def _remember(self, origin: str, headers: Mapping[str, str]) -> None:
        if len(origin) > _MOST_CHARACTERS:
            return
        self._told[origin] = {name: headers[name] for name in _TOLD if name in headers}
        self._told.move_to_end(origin)
        if len(self._told) > _MOST_ORIGINS:
            self._told.popitem(last=False)

    def _tell(self, origin: str, headers: CIMultiDict[str]) -> None:
        headers.update(self._told.get(origin, {}))
        headers.add("Vary", "Origin")


def _is_passed(path: str) -> bool:
    found = paths.find(path)
    return found is not None and found.path.kind not in _NOT_PASSED
