# SPDX-License-Identifier: Apache-2.0
"""Requests to engines: connections, headers, and the watch over answers that do not come.

There is no timer per request or per read. Each open answer notes when it last moved, and one `Watch` looks at all of
them once a second; the answer that it gives up wakes its reader with StreamLost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from llumsched.gateway.backends import Backend
from llumsched.gateway.errors import StreamLost

_NOT_FORWARDED = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id"),
)
"""Of one connection, or about the body's coding, which aiohttp has undone."""
_NOT_RETURNED = (
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "trailer",
    "upgrade",
    "x-request-id",
)


def new_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """Connections are kept, as many as there are requests; no limit of time but for connecting."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=1 << 18,
    )


def request_headers(client: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    headers = CIMultiDict(client)
    for name in _NOT_FORWARDED:
        headers.popall(name, None)
    headers["X-Request-Id"] = request_id
    return headers


def response_headers(engine: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    headers = CIMultiDict(engine)
    for name in _NOT_RETURNED:
        headers.popall(name, None)
    headers["X-Request-Id"] = request_id
    return headers


class Attempt:
    """One request at one engine, from its dispatch to its end."""

    __slots__ = ("backend", "is_stream", "is_writing", "lost", "moved_s", "task", "timed_out")

    def __init__(self, backend: Backend) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.backend = backend
        self.moved_s = time.monotonic()
        self.is_stream = False
        """Its first byte has come."""
        self.is_writing = False
        """It is the client that is waited for."""
        self.lost = ""
        """Why it was given up."""
        self.timed_out = False

    def moved(self) -> None:
        self.moved_s = self.backend.last_byte_s = time.monotonic()

    def give_up(self, reason: str, *, timed_out: bool = False) -> None:
        """Raises StreamLost where the answer is waited for."""
        if not self.lost:
            self.lost, self.timed_out = reason, timed_out
            self.task.cancel()


class Upstream:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.attempts: set[Attempt] = set()

    @asynccontextmanager
    async def post(
        self, attempt: Attempt, path: str, body: bytes, headers: CIMultiDict[str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, once its headers have come. Leaving early ends the request at the engine.

        Raises StreamLost for everything that may happen to a connection, also from within the block.
        """
        backend = attempt.backend
        self.attempts.add(attempt)
        backend.num_requests += 1
        answer = None
        try:
            url: URL = backend.url(path)
            answer = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            attempt.moved()
            yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            backend.failed()
            raise StreamLost(f"{backend} cannot be reached: {error}") from error
        except aiohttp.ClientError as error:
            raise StreamLost(f"{backend} broke off: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            if attempt.lost and not attempt.task.uncancel():
                backend.failed()
                raise StreamLost(f"{backend} {attempt.lost}", timed_out=attempt.timed_out) from None
            raise
        finally:
            backend.num_requests -= 1
            self.attempts.discard(attempt)
            if answer is not None:
                answer.close()
