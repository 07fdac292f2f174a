# SPDX-License-Identifier: Apache-2.0
"""Requests from their first byte to their last: received here, answered by `continuing` or `passing`."""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llumsched.gateway import errors, estimate
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.api_keys import TENANT, Exceeded, Limit, PriorityRefused
from llumsched.gateway.attempts import CLIENT_GONE, Attempts
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.body import Body, Head
from llumsched.gateway.config import Config
from llumsched.gateway.continuing import Continuing
from llumsched.gateway.errors import GatewayError
from llumsched.gateway.forwarded import RawHeaders, with_client
from llumsched.gateway.metrics import Metrics, Record
from llumsched.gateway.passing import Passing
from llumsched.gateway.paths import Found, Kind, Style, Work
from llumsched.gateway.placement import Placed, Placement
from llumsched.gateway.prompts import of_bytes
from llumsched.gateway.request_id import RequestIds
from llumsched.gateway.retries import RetryBudget
from llumsched.gateway.stored import StoredResponses
from llumsched.gateway.suspects import Trials
from llumsched.gateway.tokens import TokenCounter
from llumsched.gateway.upstream import Upstream

_LEAST_BYTES: Final = 1024
"""Of a body, that `client_timeout_s` is for."""
_ESTIMATED_BYTES: Final = 1 << 16
"""Of a longer body that no tokenizer reads only the length counts."""
_RETRY_SPREAD_S: Final = 3
"""Who is refused at the same moment is not to come back at the same one."""
_KEPT_ALIVE_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Received:
    """A request that is to be sent to an engine."""

    request: web.BaseRequest
    body: Body
    record: Record
    own_id: str
    """Under which engine and scheduler know it."""
    started_s: float
    num_tokens: int
    """Of its prompt; 0 if nobody asks for that."""
    headers: RawHeaders
    """For the engine."""

    @property
    def target(self) -> str:
        """Path and query. No path that is passed needs escapes."""
        query = self.request.rel_url.raw_query_string
        return f"{self.request.path}?{query}" if query else self.request.path


class Exchanges:
    """All requests in flight."""

    def __init__(
        self,
        config: Config,
        backends: Backends,
        placement: Placement,
        upstream: Upstream,
        metrics: Metrics,
        access_log: AccessLogger,
        tokens: TokenCounter,
        stored: StoredResponses,
    ) -> None:
        self.config = config
        self.backends = backends
        self.placement = placement
        self.upstream = upstream
        self.metrics = metrics
        self.stored = stored
        self._access_log = access_log
        self.tokens = tokens
        self._ids = RequestIds()
        self.num_in_flight = 0
        self.budget = RetryBudget(config.retry_budget, lambda: self.num_in_flight, time.monotonic)
        self.trials: Trials[Backend] = Trials(lambda: len(backends) - len(backends.avoided()))
        self.running: dict[Attempts, Placed] = {}
        self.idle = asyncio.Event()
        """Nothing is in flight."""
        self.idle.set()

    async def run(self, request: web.BaseRequest, found: Found) -> web.StreamResponse:
        started_s = time.monotonic()
        record = Record("", request.path)
        self.num_in_flight += 1
        self.idle.clear()
        own_id = ""
        try:
            if self.num_in_flight > self.config.max_requests:
                record.id, own_id = self._ids.take(request.headers.get("X-Request-Id"))
                raise errors.Overloaded("Too many requests are in flight.", retry_after_s=1)
            body, problem = await self._receive(request, found)
            wish = body.head.request_id if body else None
            record.id, own_id = self._ids.take(request.headers.get("X-Request-Id"), wish)
            if body is None:
                assert problem is not None
                raise problem
            record.model = body.model
            tenant = request.get(TENANT)
            if tenant:
                record.key = tenant.name
                tenant.check_priority(body.head.priority)
            num_tokens = 0
            if not self.config.is_local or (tenant and tenant.allowance.tokens_in_flight):
                num_tokens = await self._count(body, found)
            record.num_input_tokens = num_tokens
            record.preprocess_s = time.monotonic() - started_s
            self.budget.requested()
            with tenant.tokens(num_tokens) if tenant else nullcontext():
                received = Received(request, body, record, own_id, started_s, num_tokens, with_client(request))
                response = await (await self._attempts(received, found)).run()
            record.status = record.status or response.status
            return response
        except GatewayError as error:
            record.status = error.status
            if isinstance(error, Exceeded):
                self.metrics.refused.labels(error.tenant, error.limit).inc()
            elif isinstance(error, PriorityRefused):
                self.metrics.refused.labels(record.key, Limit.PRIORITY).inc()
            return failure(error, record.id, found.path.style)
        except asyncio.CancelledError:
            record.status = record.status or CLIENT_GONE
            raise
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.idle.set()
            self._ids.give_back(own_id)
            record.e2e_s = time.monotonic() - started_s
            record.status = record.status or 500
            self.metrics.ended(record)
            self._access_log.ended(record)

    async def keep_alive(self) -> None:
        """Looks at all streams, and goes on for ever."""
        limit_s = self.config.sse_keepalive_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 8))
            now_s = time.monotonic()
            for number, attempts in enumerate(list(self.running)):
                await attempts.keep_alive(now_s - limit_s, now_s)
                if number % _KEPT_ALIVE_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _receive(self, request: web.BaseRequest, found: Found) -> tuple[Body | None, GatewayError | None]:
        try:
            _check_size(request, request.content_length or 0)
            if request.headers.get("Expect", "").lower() == "100-continue":
                assert request.transport is not None
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            content = await _read(request, self.config.client_timeout_s)
            if found.path.kind is Kind.STICKY:
                return Body(content, Head()), None
            if found.path.is_form:
                return Body.read_form(content, request.headers.get("Content-Type", "")), None
            return await self.tokens.read(content), None
        except GatewayError as error:
            return None, error

    async def _count(self, body: Body, found: Found) -> int:
        path = found.path
        if path.is_form or path.work is Work.TEXT:
            return 0
        if path.kind is Kind.CONTINUED:
            return await self.tokens.count(body)
        if len(body.content) > _ESTIMATED_BYTES:
            return of_bytes(len(body.content))
        return estimate.num_tokens(body.document())

    async def _attempts(self, received: Received, found: Found) -> Attempts:
        """Raises UnknownResponse."""
        if found.path.kind is Kind.CONTINUED:
            return Continuing(self, received)
        return Passing(self, received, found.path, await self._owner(received, found))

    async def _owner(self, received: Received, found: Found) -> Backend | None:
        """The instance that has what the request is about. Raises UnknownResponse."""
        is_sticky = found.path.kind is Kind.STICKY
        name = found.name if is_sticky else received.body.head.previous_response_id
        if not name or not isinstance(name, str) or not (is_sticky or found.path.keeps_answers):
            return None
        owner = await self.stored.home(name, received.request.headers.get("Authorization", ""))
        if owner is None and is_sticky:
            raise errors.UnknownResponse(f"No instance has the response `{name}`.")
        return owner


async def _read(request: web.BaseRequest, timeout_s: float) -> bytes | bytearray:
    """The body. Raises RequestTooLarge, and RequestTimedOut if the next KiB of it takes longer than `timeout_s`."""
    loop = asyncio.get_running_loop()
    body = bytearray()
    num_due = _LEAST_BYTES
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while part := await request.content.readany():
                body += part
                _check_size(request, len(body))
                if len(body) >= num_due:
                    num_due = len(body) + _LEAST_BYTES
                    limit.reschedule(loop.time() + timeout_s)
    except TimeoutError:
        raise errors.RequestTimedOut(f"Less than a KiB more of the body came in {timeout_s:g} s.") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise errors.InvalidRequest(f"The body cannot be read: {error}") from None
    return body


def _check_size(request: web.BaseRequest, num_bytes: int) -> None:
    if num_bytes > request.client_max_size:
        raise errors.RequestTooLarge(f"The body has more than {request.client_max_size} bytes.")


def failure(error: GatewayError, request_id: str, style: Style = Style.OPENAI) -> web.Response:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)) + random.randrange(_RETRY_SPREAD_S))
    return web.Response(status=error.status, body=errors.body(error, style, request_id), headers=headers)
