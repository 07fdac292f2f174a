# SPDX-License-Identifier: Apache-2.0
"""The attempts at a request, on any path, at as many instances as it takes.

    place -> send --answer------------------------------> client
      ^        |--lost before the client has anything: another instance, the same bytes
      |________|--refused by an instance that refuses too much: a second opinion

`continuing` and `passing` hand a stream on, and handle the loss of one in the middle.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from llumsched.gateway import effects, ends, errors, sse
from llumsched.gateway.backends import Backend
from llumsched.gateway.body import Content, Prompt
from llumsched.gateway.connection import Connection
from llumsched.gateway.continuable import CannotContinue
from llumsched.gateway.ends import End
from llumsched.gateway.errors import EngineRefused, GatewayError, StreamLost
from llumsched.gateway.gateway_metrics import CLIENT_GONE
from llumsched.gateway.objectives import NONE
from llumsched.gateway.paths import Style, Work
from llumsched.gateway.placement import Placed
from llumsched.gateway.services import TOLD, Received, Services
from llumsched.gateway.tried import Tried
from llumsched.gateway.upstream import Call, response_headers
from llumsched.request import Request

MOST_HELD_BYTES: Final = 1 << 20
"""Longest answer in one piece, in bytes, that is held until it is whole. A longer one is handed on as it comes."""
_MOST_TAIL_BYTES: Final = 4096
_EVENTS: Final = "text/event-stream; charset=utf-8"


class ClientGone(Exception):
    pass


class _Doubted(Exception):
    """Raised when an instance refused the request and another one should be asked too."""


def _is_event_stream(answer: Connection) -> bool:
    """True if events can be read. Engines do not compress, but a proxy may."""
    return answer.headers.get("Content-Type", "").startswith("text/event-stream") and (
        "Content-Encoding" not in answer.headers
    )


class Attempts(ABC):
    """The attempts at one request. `run` is called once."""

    def __init__(
        self,
        services: Services,
        received: Received,
        style: Style = Style.OPENAI,
        work: Work = Work.TOKENS,
        *,
        pardoned: frozenset[int] = frozenset(),
    ) -> None:
        """`pardoned`: see `Tried`."""
        self._services = services
        self._style = style
        self._work = work
        self._is_engines_work = is_engines_work = work is not Work.TEXT
        self._config = services.config
        self._request = received.request
        self._body = received.body
        self._record = received.record
        self._counted = received.prompt
        self._own_id = received.own_id
        self._started_s = received.started_s
        self._target = received.target
        self._headers = received.headers
        self._content: Content = (received.body.content,)
        self._tried = Tried(services, received.own_id, is_engines_work=is_engines_work, pardoned=pardoned)
        self._case = self._tried.case
        self._pause_s = 0.0
        """Seconds to wait before the next attempt."""
        self._out: web.StreamResponse | None = None
        """The response of the stream, once the client has its head."""
        self._has_begun = False
        """True once the client has an event of the stream, which then cannot start again on another instance."""
        self._head: CIMultiDict[str] | None = None
        """The headers of the engine's stream."""
        self._call: Call | None = None
        """The engine's answer, while it comes."""
        self._told_s = received.started_s
        """When the client was last sent something, or when its request came."""
        self._is_over = False
        """True once the stream's last bytes are being written or another answer is: no more comments."""
        self._is_spliced = False
        """True if an answer in one piece is handed on as it comes."""
        self._lost: StreamLost | None = None
        """The last loss, preferably one in which the engine said something, while the client has nothing."""
        self._effects = effects.of(self._request.path, self._body.head)
        """The effect that the request may have had at an engine; "" if it may be sent again."""
        self._is_delivered = False
        """True once the client was sent the last event of its stream."""

    # What differs

    @abstractmethod
    async def _stream(self, answer: Connection, call: Call, placed: Placed) -> web.StreamResponse:
        """Hands an event stream on. Raises StreamLost, ClientGone."""

    @abstractmethod
    async def _interrupted(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        """The end of a stream that was lost after its beginning; None if it can continue elsewhere."""

    def _last_words(self, error: GatewayError) -> bytes:
        """The last bytes of a stream that has begun: an error, and the end mark."""
        return errors.last_event(error, self._style)

    @property
    def _most_held(self) -> int:
        """Longest answer in one piece, in bytes, that is held until it is whole."""
        return MOST_HELD_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return self._record.num_input_tokens

    @property
    def _prompt(self) -> Prompt:
        """The prompt for an engine."""
        return self._counted

    async def _prepare(self, placed: Placed) -> None:
        """Called before the request is sent."""
        return

    def _renamed(self, content: bytes, backend: Backend) -> bytes:
        """The answer in one piece, with the ids that the client knows."""
        return content

    def _answered(self, body: bytes, backend: Backend) -> None:
        """Called with an answer in one piece."""
        self._record.used(sse.usage_of(body))

    def _count_output(self) -> None:
        """Called when the stream, or an engine's part of it, is over."""
        return

    def _is_doubtful(self, status: int, backend: Backend) -> bool:
        """True if another instance should be asked after this refusal."""
        return not self._effects and self._tried.is_doubtful(status, backend)

    def _retried(self) -> None:
        self._record.num_retries += 1

    def _failed_for_good(self) -> None:
        """Called when a stream fails after it has begun."""
        return

    # What does not

    async def run(self) -> web.StreamResponse:
        if self._body.is_streamed and self._work is Work.TOKENS:
            self._services.streamed.add(self)
        try:
            return await self._run()
        finally:
            self._is_over = True
            self._tried.end()
            self._services.trials.forget(self._case)
            self._services.streamed.discard(self)

    async def _run(self) -> web.StreamResponse:
        while True:
            try:
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                    self._pause_s = 0.0
                if self._case.deaths:
                    await self._services.trials.turn(self._case)
                placed = await self._place()
            except GatewayError as error:
                return await self._end_as_said(error)
            self._services.running[self] = placed
            if self._case.deaths:
                self._services.trials.begin(self._case, placed.backend)
            completed = False
            began_s = time.monotonic()
            try:
                response = await self._attempt(placed)
                completed = response.status == 200
                return response
            except ClientGone:
                completed = self._client_left()
                return self._out or web.Response(status=CLIENT_GONE)
            except asyncio.CancelledError:
                completed = self._client_left()
                raise
            except _Doubted:
                self._tried.excluded.add(placed.backend)
                self._record.num_retries += 1
            except StreamLost as lost:
                if self._has_begun or self._lost is None or lost.words or not self._lost.words:
                    self._lost = lost
                await self._tried.lost(lost, placed.backend, time.monotonic() - began_s)
                ended = await self._after(lost, placed.backend)
                if ended is not None:
                    return ended
            except CannotContinue as reason:
                self._failed_for_good()
                return await self._end_with(not_continued("The stream was lost", reason))
            except errors.OutOfDescriptors as error:
                return await self._fail(error)
            finally:
                self._call = None
                self._services.running.pop(self, None)
                self._services.trials.end(self._case)
                self._release(placed, completed=completed)

    def _release(self, placed: Placed, *, completed: bool) -> None:
        self._services.placement.release(placed, completed=completed)

    async def _place(self) -> Placed:
        started_s = time.monotonic()
        suffix = f"-r{self._tried.num_placed}" if self._tried.num_placed else ""
        try:
            # What has begun is not to wait for a better place.
            objectives = NONE if self._has_begun else self._record.objectives
            waited_s = started_s - self._started_s
            placed = await self._choose(self._body.request(self._own_id + suffix, self._prompt, objectives, waited_s))
        finally:
            self._record.schedule_s += time.monotonic() - started_s
        self._record.instance = str(placed.backend)
        self._record.queue_s += placed.waited_s
        if not self._has_begun:
            self._record.placed_s = time.monotonic() - self._started_s
            self._record.predicted = placed.predicted
        self._record.is_fallback = placed.is_fallback
        self._tried.num_placed += 1
        return placed

    async def _choose(self, asked: Request) -> Placed:
        on_trial = self._services.trials.instances if self._case.deaths else ()
        return await self._services.placement.place(asked, self._tried.excluded, on_trial, self._record.key)

    async def _attempt(self, placed: Placed) -> web.StreamResponse:
        await self._prepare(placed)
        call = self._services.upstream.call(
            placed.backend,
            self._target,
            self._content,
            self._headers,
            placed.asked.id,
            method=self._request.method,
            num_deaths=len(self._case.deaths),
            dp_rank=placed.dp_rank,
            is_once=bool(self._effects),
        )
        call.wants_stream = self._body.is_streamed
        self._call = call
        async with call as answer:
            if answer.status == 200 and _is_event_stream(answer):
                self._head = answer.headers
                self._services.streamed.add(self)
                return await self._stream(answer, call, placed)
            body = await answer.read_all(self._most_held)
            if not answer.has_ended and answer.status < 500 and self._out is None:
                return await self._splice(body, answer, call, placed)
            body = self._renamed(body, placed.backend)
        headers = response_headers(answer.headers, self._record.id)
        return await self._answer(web.Response(status=answer.status, body=body, headers=headers), body, call)

    async def _answer(self, response: web.Response, body: bytes, call: Call) -> web.StreamResponse:
        """Takes an answer in one piece. Raises StreamLost, _Doubted."""
        backend, status = call.backend, response.status
        if status >= 500 and status != 501:
            if self._tried.refused_by is None:
                self._tried.answer = response
            raise StreamLost(f"{backend} answered {status}", end=ends.of_status(status))
        if 400 <= status < 500 and self._is_doubtful(status, backend):
            self._tried.answer, self._tried.refused_by = response, backend
            raise _Doubted
        if status != 200:
            return await self._reply(response)
        if self._out is not None:
            raise StreamLost(f"{backend} answered in one piece what was to be a stream")
        if self._is_engines_work:
            call.moved()
            end = ends.of_answer(body, self._style) if self._work is Work.TOKENS else None
            if end is not None:
                raise StreamLost(f"{backend} {end.what}", end=end)
        self._tried.taken_by(backend)
        self._answered(body, backend)
        return response

    async def _splice(self, first: bytes, answer: Connection, call: Call, placed: Placed) -> web.StreamResponse:
        """Hands on an answer as it comes. Another instance could not finish it."""
        out = web.StreamResponse(status=answer.status, headers=response_headers(answer.headers, self._record.id))
        out.headers.update(self._request.get(TOLD, {}))
        if length := answer.headers.get("Content-Length"):
            out.content_length = int(length)
        self._tried.taken_by(placed.backend)
        self._out, self._is_spliced = out, True
        part, tail = first, b""
        is_judged = self._work is Work.TOKENS and answer.status == 200
        end: End | None = None
        try:
            await out.prepare(self._request)
            while part:
                call.moved() if self._is_engines_work else call.heard()
                call.is_writing = True
                await out.write(part)
                call.is_writing = False
                tail += part
                end = end or (ends.of_part(tail, self._style, is_last=False) if is_judged else None)
                tail = tail[-_MOST_TAIL_BYTES:]
                part = await answer.read()
            call.is_writing = self._is_delivered = True
            self._answered(tail, placed.backend)
            if is_judged and (end or ends.of_part(tail, self._style, is_last=True)):
                self._record.status = errors.UpstreamFailed.status
                self._services.backends.doubt(placed.backend)
            await out.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return out

    async def _reply(self, response: web.Response) -> web.StreamResponse:
        """Gives the client an engine's refusal, as an event if it waits for events."""
        if self._out is None:
            return response
        assert isinstance(response.body, bytes)
        return await self._end_with(EngineRefused(response.status, response.body))

    async def _write(self, chunk: bytes, call: Call, *, is_event: bool = True) -> None:
        """Hands on a part of a stream. Comments do not count as its beginning."""
        call.is_writing = True
        try:
            if is_event and not self._has_begun:
                self._has_begun = True
                self._record.ttft_s = time.monotonic() - self._started_s
            out = await self._open() if self._out is None else self._out
            if chunk:
                await out.write(chunk)
                self._told_s = call.moved_s
        except ConnectionError as error:
            raise ClientGone from error
        finally:
            call.is_writing = False

    async def _open(self) -> web.StreamResponse:
        """Begins the stream's response, as the engine has begun it or before it has."""
        if self._head is not None:
            headers = response_headers(self._head, self._record.id)
        else:
            headers = CIMultiDict({"Content-Type": _EVENTS, "X-Request-Id": self._record.id})
        headers.update(self._request.get(TOLD, {}))
        self._out = web.StreamResponse(headers=headers)
        await self._out.prepare(self._request)
        return self._out

    async def keep_alive(self, since_s: float, now_s: float) -> None:
        """Writes a comment to a client whose stream was silent since `since_s`. Chunks are whole events, so the comment
        stands between two. Does nothing while written bytes wait to be sent."""
        call, transport = self._call, self._request.transport
        if self._told_s > since_s or self._is_over or self._is_spliced or transport is None:
            return
        if (call is None or not call.is_writing) and not transport.get_write_buffer_size():
            self._told_s = now_s
            with suppress(ConnectionError):
                out = await self._open() if self._out is None else self._out
                await out.write(sse.KEEP_ALIVE)

    async def _end(self, last: bytes = b"") -> web.StreamResponse:
        self._is_over = True
        out = self._out or await self._open()
        self._count_output()
        with suppress(ConnectionError):
            if last:
                await out.write(last)
            await out.write_eof()
        return out

    def _client_left(self) -> bool:
        """True if a client that left had everything: some do not wait for the end of the answer."""
        self._count_output()
        self._record.status = self._record.status or (200 if self._is_delivered else CLIENT_GONE)
        return self._is_delivered

    async def _end_with(self, error: GatewayError) -> web.StreamResponse:
        self._record.status = error.status
        return await self._end(self._last_words(error))

    async def _after(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        """The answer that ends the exchange; None tries another instance."""
        self._count_output()
        if self._is_spliced:
            return self._cut()
        if reporters := self._tried.reporters:
            what = "aborted this request" if lost.end is End.ABORT else "failed with this request"
            names = f"{reporters[0]} and {reporters[1]}"
            return await self._end_as_said(errors.UpstreamFailed(f"{names} {what}: it ends here."))
        if self._has_begun:
            ended = await self._interrupted(lost, backend)
            if ended is not None:
                return ended
        if self._case.is_guilty:
            names = " and ".join(map(str, self._case.deaths))
            return await self._fail(errors.UpstreamFailed(f"{names} died while they had this request: it ends here."))
        kind = errors.UpstreamTimedOut if lost.timed_out else errors.UpstreamFailed
        if self._effects and lost.was_sent:
            again = f"The request was lost ({lost}) and is not sent again: {self._effects}."
            return await self._end_as_said(kind(again))
        pause_s = self._tried.pause_before_next(lost, has_begun=self._out is not None)
        if pause_s is None:
            return await self._end_as_said(kind(f"No instance answered; the last: {lost}."))
        self._pause_s = pause_s
        self._retried()
        return None

    def _cut(self) -> web.StreamResponse:
        """Closes the client's connection so that it sees a truncated answer."""
        assert self._out is not None
        self._record.status = errors.UpstreamFailed.status
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._out

    async def _end_as_said(self, otherwise: GatewayError) -> web.StreamResponse:
        """Ends with the engine's own words, if there are any. Raises GatewayError if the client has nothing yet."""
        if self._lost is not None and self._lost.words:
            self._record.status = errors.UpstreamFailed.status
            return await self._end(self._lost.words)
        if not self._has_begun and self._tried.answer is not None:
            return await self._reply(self._tried.answer)
        return await self._fail(otherwise)

    async def _fail(self, error: GatewayError) -> web.StreamResponse:
        if self._out is None:
            raise error
        if self._has_begun:
            self._failed_for_good()
        return await self._end_with(error)


def not_continued(what: str, reason: Exception) -> GatewayError:
    return errors.UpstreamFailed(f"{what} and could not be continued: {reason}.")
