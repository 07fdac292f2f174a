# SPDX-License-Identifier: Apache-2.0
"""Requests to engines: their connections, headers and ends.

Requests and reads have no timers of their own. Each open call notes when it last made progress, and one `Watch` checks
all of them; if it gives one up, the reader gets StreamLost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import aiohttp
from multidict import CIMultiDict

from llumlet.contract.attempt_header import ATTEMPT_HEADER, attempt_after
from llumsched import descriptors
from llumsched.causes import Cause
from llumsched.gateway.backends import Backend
from llumsched.gateway.body import Content
from llumsched.gateway.connection import Connection, ConnectionState
from llumsched.gateway.errors import OutOfDescriptors, StreamLost
from llumsched.gateway.forwarded import AUTHORIZATION, RANK_HEADER

_log = logging.getLogger(__name__)
_TELL_S = 10.0
"""Time between two equal lines of the log."""
_NOT_RETURNED = (
    *("Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Trailer", "Upgrade", "X-Request-Id"),
)
_MOST_IDLE_S = 4.0
"""Longest idle time of a reused connection; uvicorn closes them after five seconds."""
_CLOSED_UNREAD_S = 1.0
"""Time within which an idle connection that closes had closed before the request came, which is then sent once more."""


@dataclass(frozen=True, slots=True)
class Access:
    """The key for engines."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The engines' own key, as headers of all requests; empty if there is none."""
    checks_clients: bool = False
    """True if clients' keys are the gateway's, and are not passed on."""

    @property
    def passes_clients(self) -> bool:
        return not self.headers and not self.checks_clients


CLIENTS_OWN: Final = Access()


def new_session(connect_timeout_s: float, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """A session for the gateway's own requests, which limits only the time to connect. `tls`: for https endpoints."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls or True, limit=0, ttl_dns_cache=60, keepalive_timeout=_MOST_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def request_head(
    backend: Backend,
    path: str,
    client: Iterable[tuple[bytes, bytes]],
    request_id: str,
    num_bytes: int,
    *,
    method: str = "POST",
    num_deaths: int = 0,
    dp_rank: int | None = None,
    access: Access = CLIENTS_OWN,
) -> bytes:
    """The head of a request to an engine. `path`: with its query. `client`: headers that `forwarded` has let through;
    aiohttp has removed line ends. `num_deaths`: instances that died with the request. `dp_rank`: the engine to use
    behind the API server."""
    lines = [
        b"%b %b HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\nX-Request-Id: %b"
        % (
            method.encode(),
            (backend.endpoint.base + path).encode(),
            str(backend.address).encode(),
            num_bytes,
            request_id.encode(),
        )
    ]
    if num_deaths:
        lines.append(f"{ATTEMPT_HEADER}: {attempt_after(num_deaths)}".encode())
    if dp_rank is not None:
        lines.append(f"{RANK_HEADER}: {dp_rank}".encode())
    lines += [f"{name}: {value}".encode() for name, value in access.headers.items()]
    withheld = b"" if access.passes_clients else AUTHORIZATION.encode()
    lines += [b"%b: %b" % (name, value) for name, value in client if name != withheld]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def response_headers(engine: CIMultiDict[str], request_id: str) -> CIMultiDict[str]:
    headers = engine.copy()
    for name in _NOT_RETURNED:
        if name in headers:
            del headers[name]
    headers["X-Request-Id"] = request_id
    return headers


class Call:
    """A request at an engine: `async with call as answer`, from its dispatch to its end.

    The block begins with the answer's head. Leaving it early ends the request at the engine. Raises StreamLost for all
    failures, also within the block, and OutOfDescriptors.
    """

    __slots__ = ("_connection", "_is_once", "_request", "_upstream", "backend", "is_stream", "is_writing", "lost",
                 "moved_s", "task", "timed_out", "wants_stream")  # fmt: skip

    def __init__(self, upstream: Upstream, backend: Backend, request: Content, *, is_once: bool = False) -> None:
        """`is_once`: the request must not be sent twice, so it uses a connection that cannot be stale."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.backend = backend
        self._upstream = upstream
        self._request = request
        self._is_once = is_once
        self._connection: Connection | None = None
        self.moved_s = time.monotonic()
        self.wants_stream = False
        """True if the client wants a stream; other answers are silent until they are whole."""
        self.is_stream = False
        """True once the first byte of a stream has come."""
        self.is_writing = False
        """True while the client is being written to."""
        self.lost = ""
        """The reason for giving it up."""
        self.timed_out = False

    def moved(self) -> None:
        """Notes output of the engine core."""
        self.backend.is_stalled = False
        self.moved_s = self.backend.last_token_s = time.monotonic()

    def heard(self) -> None:
        """Notes bytes that do not prove work of the engine core."""
        self.moved_s = time.monotonic()

    def give_up(self, reason: str, *, timed_out: bool = False) -> None:
        """Raises StreamLost where the answer is awaited."""
        if not self.lost:
            self.lost, self.timed_out = reason, timed_out
            self.task.cancel()

    async def __aenter__(self) -> Connection:
        self._upstream.calls.add(self)
        try:
            connection = self._connection = await self._upstream.connect(self.backend, anew=self._is_once)
            was_used, sent_s = connection.idle_since_s > 0, time.monotonic()
            connection.send(self._request)
            try:
                await connection.head()
            except StreamLost:
                if not was_used or connection.has_answered or time.monotonic() - sent_s > _CLOSED_UNREAD_S:
                    raise
                connection = self._connection = await self._upstream.connect(self.backend, anew=True)
                connection.send(self._request)
                await connection.head()
            self.moved_s = time.monotonic()  # an API server sends a stream's head on its own
            return connection
        except BaseException as error:
            self._end()
            self._explain(error)
            raise

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self._end()
        if error is not None:
            self._explain(error)

    def _end(self) -> None:
        self._upstream.calls.discard(self)
        if self._connection is not None and self._connection.settle():
            self._upstream.keep(self.backend, self._connection)
        self._connection = None

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError) and self.lost and not self.task.uncancel():
            raise StreamLost(f"{self.backend} {self.lost}", timed_out=self.timed_out, cause=Cause.SILENCE) from None


class Upstream:
    """The connections to all engines, one per running request."""

    def __init__(
        self, connect_timeout_s: float, access: Access = CLIENTS_OWN, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._access = access
        self._tls = tls
        self._idle: dict[Backend, list[Connection]] = {}
        self.calls: set[Call] = set()
        self._told_s = -math.inf

    def call(
        self,
        backend: Backend,
        path: str,
        body: Content,
        client: Iterable[tuple[bytes, bytes]],
        request_id: str,
        *,
        method: str = "POST",
        num_deaths: int = 0,
        dp_rank: int | None = None,
        is_once: bool = False,
    ) -> Call:
        head = request_head(
            backend,
            path,
            client,
            request_id,
            sum(map(len, body)),
            method=method,
            num_deaths=num_deaths,
            dp_rank=dp_rank,
            access=self._access,
        )
        return Call(self, backend, (head, *body), is_once=is_once)

    async def connect(self, backend: Backend, *, anew: bool = False) -> Connection:
        idle = None if anew else self._idle.get(backend)
        while idle:
            connection = idle.pop()
            if connection.state is ConnectionState.IDLE and time.monotonic() - connection.idle_since_s < _MOST_IDLE_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    Connection, *backend.address, ssl=self._tls if backend.endpoint.is_tls else None
                )
        except OSError as error:  # TimeoutError is one
            if descriptors.none_left(error):
                self._tell_of_descriptors(error)
                raise OutOfDescriptors("The gateway has too many connections.", retry_after_s=1) from None
            reason = f"{backend} cannot be reached: {error.strerror or str(error) or 'no answer'}"
            raise StreamLost(reason, cause=Cause.UNREACHABLE, was_sent=False) from error
        return connection

    def _tell_of_descriptors(self, error: OSError) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s > _TELL_S:
            self._told_s = now_s
            _log.error("no connection to an engine: %s; see RLIMIT_NOFILE and --max-requests", error.strerror)

    def keep(self, backend: Backend, connection: Connection) -> None:
        self._idle.setdefault(backend, []).append(connection)

    def sweep(self) -> None:
        """Closes connections that were idle for long."""
        limit_s = time.monotonic() - _MOST_IDLE_S
        for backend, idle in list(self._idle.items()):
            kept = [one for one in idle if one.state is ConnectionState.IDLE and one.idle_since_s > limit_s]
            for connection in set(idle).difference(kept):
                connection.close()
            if kept:
                idle[:] = kept
            else:
                del self._idle[backend]

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
