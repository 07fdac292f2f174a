# SPDX-License-Identifier: Apache-2.0
"""One request from its first byte to its last, over as many instances as it takes.

    receive -> place -> send --answer------------------------------> client
                 ^        |--lost before the first event: another instance, the same bytes
                 |        |--lost after: another instance, and only what is left (`continuation`)
                 |________|--refused by an instance that refuses too much: a second opinion

What the client gets of a stream are whole events, so that an engine may vanish at any byte of its answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llumsched.causes import Cause
from llumsched.gateway import continuation, errors, sse
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.api_keys import TENANT, Exceeded
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.body import Body
from llumsched.gateway.config import Config
from llumsched.gateway.connection import Connection
from llumsched.gateway.continuation import CannotContinue, Transcript
from llumsched.gateway.errors import GatewayError, StreamLost
from llumsched.gateway.metrics import Metrics, Record
from llumsched.gateway.placement import Asked, Placed, Placement
from llumsched.gateway.prompts import Counted
from llumsched.gateway.request_id import RequestIds
from llumsched.gateway.retries import RetryBudget, backoff_s
from llumsched.gateway.suspects import Case, Trials
from llumsched.gateway.tokens import TokenCounter
from llumsched.gateway.upstream import Call, Upstream, response_headers

INFERENCE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
NO_CONTINUATION_HEADER: Final = "X-Llumnix-Continuation"
"""With the value `off`: a stream that loses its engine ends with an error."""
_CLIENT_GONE: Final = 499
_LEAST_BYTES: Final = 1024
"""Of a body, that `client_timeout_s` is for."""
_UNCOUNTED: Final = Counted(0)
_OF_THE_INSTANCE: Final = frozenset((401, 403, 404, 429))
"""Refusals that say more of an instance (its key, its adapters, its queue) than of the request."""
_MOST_PLACED: Final = 16
"""Instances tried, also those that cannot be reached."""
_KEPT_FOR_LOSSES: Final = 0.5
"""Of the retry budget; second opinions are made of the rest."""


class _ClientGone(Exception):
    pass


class _Doubted(Exception):
    """An instance has refused the request, and another one is to be asked as well."""


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
    ) -> None:
        self.config = config
        self.backends = backends
        self.placement = placement
        self.upstream = upstream
        self.metrics = metrics
        self._access_log = access_log
        self._tokens = tokens
        self._ids = RequestIds()
        self.num_in_flight = 0
        self.budget = RetryBudget(config.retry_budget, lambda: self.num_in_flight, time.monotonic)
        self.trials: Trials[Backend] = Trials(lambda: len(backends) - len(backends.avoided()))
        self.running: dict[Exchange, Placed] = {}
        self.idle = asyncio.Event()
        """Nothing is in flight."""
        self.idle.set()

    async def run(self, request: web.BaseRequest) -> web.StreamResponse:
        started_s = time.monotonic()
        record = Record("", request.path)
        self.num_in_flight += 1
        self.idle.clear()
        own_id = ""
        try:
            if self.num_in_flight > self.config.max_requests:
                record.id, own_id = self._ids.take(request.headers.get("X-Request-Id"))
                raise errors.Overloaded("Too many requests are in flight.", retry_after_s=1)
            body, problem = await self._receive(request)
            wish = body.head.request_id if body else None
            record.id, own_id = self._ids.take(request.headers.get("X-Request-Id"), wish)
            if body is None:
                assert problem is not None
                raise problem
            record.model = body.model
            tenant = request.get(TENANT)
            record.key = tenant.name if tenant else ""
            counted = _UNCOUNTED
            if not self.config.is_local or (tenant and tenant.allowance.tokens_in_flight):
                counted = await self._tokens.count(body)
            record.num_input_tokens = counted.num_tokens
            record.preprocess_s = time.monotonic() - started_s
            self.budget.requested()
            with tenant.tokens(counted.num_tokens) if tenant else nullcontext():
                response = await Exchange(self, request, body, record, own_id, started_s, counted).run()
            record.status = record.status or response.status
            return response
        except GatewayError as error:
            record.status = error.status
            if isinstance(error, Exceeded):
                self.metrics.refused.labels(error.tenant, error.limit).inc()
            return failure(error, record.id)
        except asyncio.CancelledError:
            record.status = record.status or _CLIENT_GONE
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

    async def _receive(self, request: web.BaseRequest) -> tuple[Body | None, GatewayError | None]:
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                assert request.transport is not None
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return await self._tokens.read(await _read(request, self.config.client_timeout_s)), None
        except GatewayError as error:
            return None, error


async def _read(request: web.BaseRequest, timeout_s: float) -> bytes | bytearray:
    """The body. Raises RequestTooLarge, and RequestTimedOut if the next KiB of it takes longer than `timeout_s`."""
    loop = asyncio.get_running_loop()
    body = bytearray()
    num_due = _LEAST_BYTES
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while part := await request.content.readany():
                body += part
                if len(body) > request.client_max_size:
                    raise errors.RequestTooLarge(f"The body has more than {request.client_max_size} bytes.")
                if len(body) >= num_due:
                    num_due = len(body) + _LEAST_BYTES
                    limit.reschedule(loop.time() + timeout_s)
    except TimeoutError:
        raise errors.RequestTimedOut(f"Less than a KiB more of the body came in {timeout_s:g} s.") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise errors.InvalidRequest(f"The body cannot be read: {error}") from None
    return body


def _is_event_stream(answer: Connection) -> bool:
    """One that can be read: engines do not compress, but something between may."""
    return answer.headers.get("Content-Type", "").startswith("text/event-stream") and (
        "Content-Encoding" not in answer.headers
    )


def failure(error: GatewayError, request_id: str) -> web.Response:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return web.Response(status=error.status, body=errors.body(error), headers=headers)


def _not_continued(what: str, reason: Exception) -> GatewayError:
    return errors.UpstreamFailed(f"{what} and could not be continued: {reason}.")


class Exchange:
    """One of them."""

    def __init__(
        self,
        around: Exchanges,
        request: web.BaseRequest,
        body: Body,
        record: Record,
        own_id: str,
        started_s: float,
        counted: Counted,
    ) -> None:
        self._around = around
        self._config = around.config
        self._request = request
        self._body = body
        self._record = record
        self._own_id = own_id
        self._started_s = started_s
        self._counted = counted
        self._excluded: set[Backend] = set()
        self._num_placed = 0
        self._num_unreached = 0
        """Of these, at instances to which nothing could be sent."""
        self._refused: web.Response | None = None
        """An engine's own words, should there be no other."""
        self._refused_by: Backend | None = None
        """The instance on whose refusal a second opinion is asked for."""
        self._pause_s = 0.0
        """Before the next attempt."""
        self._case: Case[Backend] = Case()
        self._out: web.StreamResponse | None = None
        """Once the client has got the beginning of a stream."""
        self._events: sse.EventStream | None = None
        self._is_delivered = False
        """The client was sent the last event of its stream."""
        wants_ids = self._is_continuable
        self._transcript = Transcript("chat" in request.path, keeps_ids=body.head.return_token_ids not in (None, False))
        self._path = request.path
        self._content = body.with_token_ids() if wants_ids else body.content
        self._wants_ids = wants_ids
        self._max_model_len: int | None = None
        """Of the engine that was lost."""
        self._change: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None

    @property
    def _is_continuable(self) -> bool:
        """As far as can be told without reading all of the body: `continuation.refusal` has the last word."""
        head = self._body.head
        return (
            self._config.continuation
            and self._body.is_streamed
            and head.n in (None, 1)
            and not (head.echo or head.tools)
            and isinstance(head.return_token_ids, bool | None)  # or the engine reads into it what it will
            and head.include_reasoning is not False
            and self._request.headers.get(NO_CONTINUATION_HEADER, "").lower() != "off"
        )

    async def run(self) -> web.StreamResponse:
        try:
            return await self._run()
        finally:
            self._around.trials.end(self._case)

    async def _run(self) -> web.StreamResponse:
        while True:
            try:
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                    self._pause_s = 0.0
                if self._case.deaths:
                    await self._around.trials.turn(self._case)
                placed = await self._place()
            except GatewayError as error:
                if self._out is not None:
                    return await self._end_with(error)
                if self._refused is not None:
                    return self._refused
                raise
            self._around.running[self] = placed
            if self._case.deaths:
                self._around.trials.begin(self._case, placed.backend)
            completed = False
            try:
                response = await self._attempt(placed)
                completed = response.status == 200
                return response
            except _ClientGone:
                completed = self._client_left()
                return self._out or web.Response(status=_CLIENT_GONE)
            except asyncio.CancelledError:
                completed = self._client_left()
                raise
            except _Doubted:
                self._excluded.add(placed.backend)
                self._record.num_retries += 1
            except StreamLost as lost:
                await self._blame(lost, placed.backend)
                ended = await self._after(lost, placed.backend)
                if ended is not None:
                    return ended
            except CannotContinue as reason:
                self._count_continuation("failed")
                return await self._end_with(_not_continued("The stream was lost", reason))
            except errors.OutOfDescriptors as error:
                return await self._fail(error)
            finally:
                self._around.running.pop(self, None)
                self._around.trials.end(self._case)
                self._around.placement.release(placed, completed=completed)

    @property
    def _counted_so_far(self) -> Counted:
        """What an engine gets as its prompt."""
        if self._out is None or not self._transcript.token_ids:
            return self._counted
        tokens = (*(self._transcript.prompt_ids or ()), *self._transcript.token_ids)
        return Counted(len(tokens), tokens)

    async def _place(self) -> Placed:
        started_s = time.monotonic()
        suffix = f"-r{self._num_placed}" if self._num_placed else ""
        try:
            counted = self._counted_so_far
            ids = counted.token_ids if self._config.forward_tokens else None
            asked = Asked(self._own_id + suffix, self._body.model, counted.num_tokens, ids)
            on_trial = self._around.trials.instances if self._case.deaths else ()
            placed = await self._around.placement.place(asked, self._excluded, on_trial)
        finally:
            self._record.schedule_s += time.monotonic() - started_s
        self._record.instance = str(placed.backend)
        self._record.queue_s += placed.waited_s
        self._record.is_fallback = placed.is_fallback
        self._num_placed += 1
        return placed

    @property
    def _num_attempts(self) -> int:
        """What counts: when a rack is gone, an instance that is left may be the fifth that is tried."""
        return self._num_placed - self._num_unreached

    async def _attempt(self, placed: Placed) -> web.StreamResponse:
        if self._out is not None and self._transcript.token_ids:
            await self._take_back_incomplete(placed)
        call = self._around.upstream.call(
            placed.backend,
            self._path,
            self._content,
            self._request.raw_headers,
            placed.asked.id,
            num_deaths=len(self._case.deaths),
        )
        async with call as answer:
            if answer.status == 200 and _is_event_stream(answer):
                return await self._stream(answer, call, placed)
            body = await answer.read_all()
        response = web.Response(
            status=answer.status, body=body, headers=response_headers(answer.headers, self._record.id)
        )
        if self._out is not None or (answer.status >= 500 and answer.status != 501):
            if self._refused_by is None:
                self._refused = response
            raise StreamLost(f"{placed.backend} answered {answer.status}")
        if answer.status == 200:
            call.moved()
            self._taken_by(placed.backend)
            num_input, self._record.num_output_tokens = sse.usage_of(body)
            self._record.num_input_tokens = num_input or self._record.num_input_tokens
        elif 400 <= answer.status < 500 and self._is_doubtful(answer.status, placed.backend):
            self._refused, self._refused_by = response, placed.backend
            raise _Doubted
        return response

    def _taken_by(self, backend: Backend) -> None:
        outliers = self._around.backends.outliers
        outliers.succeeded(backend)
        if self._refused_by is not None:
            assert self._refused is not None
            outliers.failed(
                self._refused_by, Cause.REFUSALS, f"it answered {self._refused.status} to what {backend} took"
            )
            self._refused_by = None

    def _is_doubtful(self, status: int, backend: Backend) -> bool:
        """Whether it may be the instance's own fault, and another can be asked."""
        outliers = self._around.backends.outliers
        is_doubted = outliers.is_doubted(backend)
        if self._refused_by is not None:
            outliers.confirmed(self._refused_by)
            outliers.confirmed(backend)
            return False
        if status not in _OF_THE_INSTANCE and not is_doubted:
            return False
        return (
            self._num_attempts <= self._config.retry_max_count
            and len(self._around.backends) > 1
            and self._around.budget.take(kept=_KEPT_FOR_LOSSES) is not None
        )

    async def _take_back_incomplete(self, placed: Placed) -> None:
        """Tokens that end within a character, from the transcript. The engine that is to go on knows which do."""
        transcript = self._transcript
        while transcript.token_ids and await self._ends_within_character(placed):
            transcript.take_back()
        if transcript.is_withheld:
            transcript.forget_tokens()
            self._plan_continuation()
        elif transcript.again:
            self._plan_continuation()

    async def _ends_within_character(self, placed: Placed) -> bool:
        content = self._transcript.last_tokens(self._body.model)
        headers = self._request.raw_headers
        call = self._around.upstream.call(placed.backend, continuation.DETOKENIZE, content, headers, placed.asked.id)
        async with call as answer:
            status, text = answer.status, await answer.read_all()
        with suppress(msgspec.DecodeError):
            if status == 200:
                return continuation.ends_within_character(text)
        raise StreamLost(f"{placed.backend} did not detokenize: it answered {status}")

    async def _stream(self, answer: Connection, call: Call, placed: Placed) -> web.StreamResponse:
        events = sse.EventStream(wants_ids=self._wants_ids, keeps_ids=self._transcript.keeps_ids)
        self._events = events
        self._record.is_streamed = True
        observe_gap = self._around.metrics.of_model(self._record.model, is_served=True).itl.observe
        observe_step = self._around.backends.pace.step
        read = answer.read
        last_s = 0.0
        while data := await read():
            call.moved()
            if last_s:
                gap_s = call.moved_s - last_s
                observe_gap(gap_s * 1e3)
                observe_step(placed.backend, gap_s, call.moved_s)
            else:
                call.is_stream = True
                self._taken_by(placed.backend)
                self._around.placement.begun(placed)
            last_s = call.moved_s
            if self._case.at is not None:
                self._around.trials.got_part(self._case)
            chunk = events.feed(data)
            if self._change is not None:
                chunk = sse.rewrite(chunk, self._change)
            if chunk:
                await self._write(chunk, answer, call)
            self._is_delivered = events.is_done
            if events.failure:
                if sse.is_clients_fault(events.failure):
                    return await self._pass_failure(events.failure, answer, call)
                raise StreamLost(f"{call.backend} reported an error")
        if not events.is_done:
            raise StreamLost(f"{call.backend} ended the stream early")
        call.is_writing = True
        return await self._end()

    async def _pass_failure(self, failure: bytes, answer: Connection, call: Call) -> web.StreamResponse:
        self._record.status = errors.InvalidRequest.status
        await self._write(failure if failure.endswith(sse.DONE) else failure + sse.DONE, answer, call)
        call.is_writing = True
        return await self._end()

    async def _write(self, chunk: bytes, answer: Connection, call: Call) -> None:
        call.is_writing = True
        try:
            if self._out is None:
                self._record.ttft_s = time.monotonic() - self._started_s
                headers = response_headers(answer.headers, self._record.id)
                self._out = web.StreamResponse(headers=headers)
                await self._out.prepare(self._request)
            await self._out.write(chunk)
        except ConnectionError as error:
            raise _ClientGone from error
        finally:
            call.is_writing = False

    @property
    def num_tokens(self) -> int:
        """Of prompt and output, so far; parts of the answer stand for tokens that are not told."""
        events = self._events
        num_output = len(self._transcript.token_ids)
        if events is not None:
            num_output += len(events.token_ids) or events.num_texts
        return self._record.num_input_tokens + num_output

    async def _end(self, last: bytes = b"") -> web.StreamResponse:
        assert self._out is not None
        self._count_output()
        with suppress(ConnectionError):
            if last:
                await self._out.write(last)
            await self._out.write_eof()
        return self._out

    def _client_left(self) -> bool:
        """Whether it had everything: some do not wait for the end of the connection's answer."""
        self._count_output()
        self._record.status = self._record.status or (200 if self._is_delivered else _CLIENT_GONE)
        return self._is_delivered

    def _count_output(self) -> None:
        if self._events is not None:
            self._transcript.take(self._events)
            self._events = None
        transcript = self._transcript
        num_input, num_output = transcript.usage
        self._record.num_input_tokens = num_input or len(transcript.prompt_ids or ()) or self._record.num_input_tokens
        self._record.num_output_tokens = num_output or len(transcript.token_ids) or transcript.num_texts

    async def _end_with(self, error: GatewayError) -> web.StreamResponse:
        """An error in a stream that has begun: the client sees it, and that it is the end."""
        self._record.status = error.status
        return await self._end(b"data: " + errors.body(error) + b"\n\n" + sse.DONE)

    async def _blame(self, lost: StreamLost, backend: Backend) -> None:
        """Whoever is at fault: the instance, this request, or one that was beside it."""
        backends = self._around.backends
        backends.outliers.failed(backend, lost.cause, str(lost))
        self._num_unreached += not lost.was_sent
        hangs = backend.is_down or backend.is_stalled
        if lost.was_sent and (hangs or await backends.has_died(backend)):
            self._around.trials.lost(self._case, backend)

    async def _after(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        """The answer with which the exchange ends after all; None: try another instance."""
        self._excluded.add(backend)
        failed = self._events.failure if self._events is not None else b""
        if self._events is not None:
            self._transcript.take(self._events)
            self._events = None
        try:
            if self._out is not None:
                if self._transcript.is_finished:
                    return await self._end(continuation.ending(self._body, self._transcript))
                self._max_model_len = backend.max_model_len(self._body.model)
                self._plan_continuation()
        except (CannotContinue, errors.InvalidRequest) as reason:
            self._count_continuation("refused")
            if failed:
                self._record.status = 502
                return await self._end(failed if failed.endswith(sse.DONE) else failed + sse.DONE)
            return await self._end_with(_not_continued(f"The stream was lost ({lost})", reason))
        if self._case.is_guilty:
            names = " and ".join(map(str, self._case.deaths))
            return await self._fail(errors.UpstreamFailed(f"{names} died while they had this request: it ends here."))
        if not self._may_be_sent_again(lost):
            return await self._give_up(lost)
        if self._out is None:
            self._record.num_retries += 1
        else:
            self._record.num_continuations += 1
            self._count_continuation("continued")
        return None

    def _may_be_sent_again(self, lost: StreamLost) -> bool:
        """Whether the limits and the retry budget allow it, and after which pause. What no engine can have had costs
        none."""
        if self._num_attempts > self._config.retry_max_count or self._num_placed >= _MOST_PLACED:
            return False
        wait_s: float | None = 0.0
        if lost.was_sent:
            is_answered = self._out is None and self._refused is not None
            wait_s = self._around.budget.take(0.0 if is_answered else self._config.retry_patience_s)
        if wait_s is None:
            self._around.metrics.unbudgeted.inc()
            return False
        self._pause_s = wait_s + backoff_s(self._num_attempts)
        return True

    def _plan_continuation(self) -> None:
        if not self._wants_ids:
            reason = continuation.refusal(self._body.document())
            raise CannotContinue(reason or "the client did not want that")
        planned = continuation.plan(self._body, self._request.path, self._transcript, self._max_model_len)
        self._path, self._content, self._change = planned.path, planned.content, planned.change

    def _count_continuation(self, outcome: str) -> None:
        self._around.metrics.of_model(self._record.model).lost(outcome)

    async def _give_up(self, lost: StreamLost) -> web.StreamResponse:
        kind = errors.UpstreamTimedOut if lost.timed_out else errors.UpstreamFailed
        if self._out is None and self._refused is not None:
            return self._refused
        return await self._fail(kind(f"No instance answered; the last: {lost}."))

    async def _fail(self, error: GatewayError) -> web.StreamResponse:
        if self._out is None:
            raise error
        self._count_continuation("failed")
        return await self._end_with(error)
