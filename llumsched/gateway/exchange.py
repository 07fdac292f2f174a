# SPDX-License-Identifier: Apache-2.0
"""Requests from their first byte to their last: received here, answered by `continuing` or `passing`."""

from __future__ import annotations

import asyncio
import math
import random
import time
from codecs import BOM_UTF8
from contextlib import ExitStack
from typing import Any, Final

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from llumsched.gateway import errors, objectives
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.api_keys import TENANT, UNLIMITED_SHARE, Exceeded, Limit, PriorityRefused, Tenant
from llumsched.gateway.attempts import Attempts
from llumsched.gateway.body import PRIORITY_HEADERS, Body, Head, Prompt
from llumsched.gateway.chats.form import Form
from llumsched.gateway.config import Config
from llumsched.gateway.continuing import Continuing
from llumsched.gateway.errors import GatewayError
from llumsched.gateway.forwarded import with_client
from llumsched.gateway.gateway_metrics import CLIENT_GONE, Record
from llumsched.gateway.objectives import Objectives
from llumsched.gateway.passing import Passing
from llumsched.gateway.paths import Found, Kind, Style, Work
from llumsched.gateway.request_id import RequestIds
from llumsched.gateway.services import Bodies, Received, Services
from llumsched.gateway.stored import Stored, new_id

_LEAST_BYTES: Final = 1024
"""Bytes of a body that must arrive within `client_timeout_s`."""
_LAST_LOOK_S: Final = 0.02
"""Pause before a client is given up, to read what it sent while this process stood still."""
_RETRY_SPREAD_S: Final = 3
"""Random seconds added to Retry-After, so that clients refused together do not return together."""
_KEPT_ALIVE_AT_ONCE: Final = 100


class Exchanges:
    """All requests in flight."""

    def __init__(self, services: Services, access_log: AccessLogger) -> None:
        self._services = services
        self._config = services.config
        self._access_log = access_log
        self._ids = RequestIds()
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()

    async def run(self, request: web.BaseRequest, found: Found) -> web.StreamResponse:
        started_s = time.monotonic()
        record = Record("", request.path, api=found.path.form)
        self._services.num_in_flight += 1
        self.idle.clear()
        own_id, wish = "", request.headers.get("X-Request-Id")
        reading = _Reading(self._services.bodies, self._config)
        try:
            try:
                body = await self._receive(request, found, reading)
            except GatewayError:
                record.id, own_id = self._ids.take(wish)
                raise
            record.id, own_id = self._ids.take(wish, body.head.request_id)
            record.model, record.wants_stream = body.model, body.is_streamed
            tenant = request.get(TENANT)
            if tenant:
                record.key = tenant.name
                tenant.check_priority(body.head.priority or 0)
            record.objectives = self._objectives(request, body, tenant)
            prompt = Prompt()
            if not self._config.is_local or (tenant and tenant.allowance.tokens_in_flight):
                prompt = await self._count(body, found)
            record.num_input_tokens = prompt.num_tokens
            record.preprocess_s = time.monotonic() - started_s
            self._services.budget.requested()
            stored, own_response = await self._stored(body, found, record.key), ""
            if stored is not None and found.path.kind is not Kind.STICKY:
                body = body.with_fields(previous_response_id=stored.own)
            if found.path.keeps_answers:
                own_response = new_id()
                body = body.with_fields(request_id=own_response)
            with ExitStack() as held:
                if tenant is not None:
                    self._hold(held, tenant, body, prompt, found)
                headers = with_client(request)
                received = Received(request, body, record, own_id, started_s, prompt, headers, stored, own_response)
                try:
                    response = await self._attempts(received, found).run()
                finally:
                    rests = own_response and record.instance and body.head.background is True
                    if rests and tenant is not None and tenant.limits_flight:
                        held.enter_context(tenant.kept(1))
                        self._services.background.keep(held.pop_all(), record.instance, own_response)
            record.status = record.status or response.status
            return response
        except GatewayError as error:
            record.status = error.status
            if isinstance(error, Exceeded):
                self._services.metrics.refused.labels(error.tenant, error.limit).inc()
            elif isinstance(error, PriorityRefused):
                self._services.metrics.refused.labels(record.key, Limit.PRIORITY).inc()
            return failure(error, record.id, found.path.style)
        except asyncio.CancelledError:
            record.status = record.status or CLIENT_GONE
            raise
        finally:
            self._services.num_in_flight -= 1
            if not self._services.num_in_flight:
                self.idle.set()
            self._ids.give_back(own_id)
            reading.end()
            record.e2e_s = time.monotonic() - started_s
            record.status = record.status or 500
            self._services.metrics.ended(record)
            self._access_log.ended(record)

    async def keep_alive(self) -> None:
        """Looks at all streams periodically, for ever."""
        limit_s = self._config.sse_keepalive_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 8))
            now_s = time.monotonic()
            for number, attempts in enumerate(list(self._services.streamed)):
                await attempts.keep_alive(now_s - limit_s, now_s)
                if number % _KEPT_ALIVE_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _receive(self, request: web.BaseRequest, found: Found, reading: _Reading) -> Body:
        if self._services.num_in_flight > self._config.max_requests:
            raise errors.Overloaded("Too many requests are in flight.", retry_after_s=1)
        _check_size(request, request.content_length or 0)
        if request.headers.get("Expect", "").lower() == "100-continue":
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = await reading.read(request)
        if content.startswith(BOM_UTF8):  # engines take it; the rest of the way would not
            del content[: len(BOM_UTF8)]
        if found.path.kind is Kind.STICKY:
            return Body(content, Head())
        if found.path.is_form:
            body = Body.read_form(content, request.headers.get("Content-Type", ""))
        else:
            body = await self._services.tokens.read(content)
        if body.head.transfers and not self._config.trust_transfer_params:
            raise errors.Forbidden(f"`{body.head.transfers}` is not passed on: it makes engines read others' caches.")
        said = next(((name, request.headers[name]) for name in PRIORITY_HEADERS if name in request.headers), None)
        return body.prioritized(said, in_body=not found.path.is_form)

    def _objectives(self, request: web.BaseRequest, body: Body, tenant: Tenant | None) -> Objectives:
        """The objectives of a request: its own, else its key's, else its model's. Raises InvalidRequest."""
        found = objectives.of_headers(request.headers)
        if tenant is not None:
            found = found.or_else(tenant.objectives)
        return found.or_else(self._config.objectives(body.model))

    async def _count(self, body: Body, found: Found) -> Prompt:
        path = found.path
        if path.is_form or path.work is Work.TEXT:
            return Prompt()
        wanted = self._services.placement.block_size(body.model)
        prompt = await self._services.tokens.count(body, wanted, path.form)
        if 0 < wanted <= prompt.num_tokens and not prompt.blocks and path.form is not Form.OTHER:
            self._services.unnamed(path.form, body.model)
        return prompt

    def _hold(self, held: ExitStack, tenant: Tenant, body: Body, prompt: Prompt, found: Found) -> None:
        """Counts a request for its key until `held` is closed. Raises Exceeded."""
        num_sequences, num_output = body.head.num_sequences, body.head.most_output
        held.enter_context(tenant.sequences(num_sequences - 1))
        most = tenant.allowance.tokens_in_flight
        if not most or found.path.work is Work.TEXT:
            return
        if found.path.work is Work.BATCH:
            num_output = 0
        elif num_output is None:
            left = self._services.backends.max_model_len(body.model) - prompt.num_tokens
            num_output = max(0, min(left, most // UNLIMITED_SHARE))
        num_prompt = prompt.num_tokens * max(1, num_sequences // body.head.num_prompts)
        held.enter_context(tenant.tokens(num_prompt, num_sequences * num_output))

    def _attempts(self, received: Received, found: Found) -> Attempts:
        """The kind of attempts for the path."""
        if found.path.kind is Kind.CONTINUED:
            return Continuing(self._services, received)
        return Passing(self._services, received, found.path)

    async def _stored(self, body: Body, found: Found, key: str) -> Stored | None:
        """The response that a request names or continues. Raises UnknownResponse, NoInstance."""
        shown: Any = None
        if found.path.kind is Kind.STICKY:
            shown = found.name
        elif found.path.style is Style.RESPONSES:
            shown = body.head.previous_response_id
        if not shown:
            return None
        stored = await self._services.stored.find(shown, key) if isinstance(shown, str) else None
        if stored is None and self._services.backends.refreshed_s == -math.inf:
            raise errors.NoInstance("No instance was asked yet.", retry_after_s=1)
        if stored is None:
            raise errors.UnknownResponse("No instance has that response.")
        return stored


class _Reading:
    """The reading of one body, which counts towards `Bodies` until `end`."""

    def __init__(self, bodies: Bodies, config: Config) -> None:
        self._bodies = bodies
        self._config = config
        self._num_bytes = 0

    def end(self) -> None:
        self._bodies.give_back(self._num_bytes)

    async def read(self, request: web.BaseRequest) -> bytearray:
        """Reads the body. Raises RequestTooLarge, Overloaded, and RequestTimedOut if all of it, or the next KiB, takes
        too long."""
        loop, patience_s, limit_s = (
            asyncio.get_running_loop(),
            self._config.client_timeout_s,
            self._config.body_timeout_s,
        )
        body = bytearray()
        end_s = loop.time() + limit_s
        num_due, due_s = _LEAST_BYTES, loop.time() + patience_s
        try:
            while part := await _next_part(request.content, min(due_s, end_s)):
                self._num_bytes += len(part)
                self._bodies.take(len(part))
                body += part
                _check_size(request, len(body))
                if len(body) >= num_due:
                    num_due, due_s = len(body) + _LEAST_BYTES, loop.time() + patience_s
                if loop.time() > end_s:
                    raise TimeoutError
        except TimeoutError:
            if loop.time() >= end_s:
                raise errors.RequestTimedOut(f"The body did not come in {limit_s:g} s.") from None
            raise errors.RequestTimedOut(f"Less than a KiB more of the body came in {patience_s:g} s.") from None
        except (web.RequestPayloadError, HttpProcessingError):  # which quote what came
            raise errors.InvalidRequest("The body cannot be read: it is not framed as its head says.") from None
        return body


async def _next_part(content: StreamReader, due_s: float) -> bytes:
    """The next part of a body; empty at its end. Raises TimeoutError."""
    try:
        async with asyncio.timeout_at(due_s):
            return await content.readany()
    except TimeoutError:
        await asyncio.sleep(_LAST_LOOK_S)
        if part := content.read_nowait():
            return part
        raise


def _check_size(request: web.BaseRequest, num_bytes: int) -> None:
    if num_bytes > request.client_max_size:
        raise errors.RequestTooLarge(f"The body has more than {request.client_max_size} bytes.")


def failure(error: GatewayError, request_id: str, style: Style = Style.OPENAI) -> web.Response:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **error.headers}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)) + random.randrange(_RETRY_SPREAD_S))
    return web.Response(status=error.status, body=errors.body(error, style), headers=headers)
