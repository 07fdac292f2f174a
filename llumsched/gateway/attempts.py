# SPDX-License-Identifier: Apache-2.0
"""One request at as many instances as it takes, whatever its path is.

    place -> send --answer------------------------------> client
      ^        |--lost before the client has anything: another instance, the same bytes
      |________|--refused by an instance that refuses too much: a second opinion

How a stream is handed on, and what becomes of one that is lost in the middle, is left to `continuing` and `passing`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from aiohttp import web

from llumsched.gateway import errors, sse
from llumsched.gateway.backends import Backend
from llumsched.gateway.body import Content, Prompt
from llumsched.gateway.connection import Connection
from llumsched.gateway.continuable import CannotContinue
from llumsched.gateway.errors import GatewayError, StreamLost
from llumsched.gateway.metrics import CLIENT_GONE
from llumsched.gateway.objectives import NONE
from llumsched.gateway.placement import Placed
from llumsched.gateway.services import Received, Services
from llumsched.gateway.tried import Tried
from llumsched.gateway.upstream import Call, response_headers
from llumsched.request import Request


class ClientGone(Exception):
    pass


class _Doubted(Exception):
    """An instance has refused the request, and another one is to be asked as well."""


def _is_event_stream(answer: Connection) -> bool:
    """Whether events can be read: engines do not compress, but something between may."""
    return answer.headers.get("Content-Type", "").startswith("text/event-stream") and (
        "Content-Encoding" not in answer.headers
    )


class Attempts(ABC):
    """The attempts at one request; to `run` once."""

    def __init__(
        self,
        services: Services,
        received: Received,
        *,
        is_engines_work: bool = True,
        pardoned: frozenset[int] = frozenset(),
    ) -> None:
        """`is_engines_work` and `pardoned` are `Tried`'s."""
        self._services = services
        self._is_engines_work = is_engines_work
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
        self._tried = Tried(services, is_engines_work=is_engines_work, pardoned=pardoned)
        self._case = self._tried.case
        self._pause_s = 0.0
        """Wait before the next attempt."""
        self._out: web.StreamResponse | None = None
        """The stream's response, once the client has got its head."""
        self._has_begun = False
        """Whether the client has got an event of a stream: no other instance can begin it anew."""
        self._streaming: tuple[Connection, Call] | None = None
        """An engine's event stream that is handed on."""
        self._kept_alive_s = 0.0
        self._is_delivered = False
        """Whether the client was sent the last event of its stream."""

    # What differs

    @abstractmethod
    async def _stream(self, answer: Connection, call: Call, placed: Placed) -> web.StreamResponse:
        """Hands an event stream on. Raises StreamLost, ClientGone."""

    @abstractmethod
    async def _interrupted(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        """How a stream ends that was lost when the client had its beginning; None if it can go on elsewhere."""

    @abstractmethod
    def _last_words(self, error: GatewayError) -> bytes:
        """The end of a stream that has begun: the client sees an error, and that it is the end."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return self._record.num_input_tokens

    @property
    def _prompt(self) -> Prompt:
        """What an engine gets as its prompt."""
        return self._counted

    async def _prepare(self, placed: Placed) -> None:
        """Called before the request is sent."""
        return

    def _answered(self, body: bytes, backend: Backend) -> None:
        """Called with an answer in one piece."""
        self._record.used(sse.usage_of(body))

    def _count_output(self) -> None:
        """Called when the stream is over, or this part of it."""
        return

    def _is_doubtful(self, status: int, backend: Backend) -> bool:
        """Whether another instance is to be asked after this one has refused."""
        return self._tried.is_doubtful(status, backend)

    def _retried(self) -> None:
        self._record.num_retries += 1

    def _failed_for_good(self) -> None:
        """Called when a stream that had begun has failed."""
        return

    # What does not

    async def run(self) -> web.StreamResponse:
        try:
            return await self._run()
        finally:
            self._services.trials.end(self._case)

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
                if self._out is not None:
                    return await self._end_with(error)
                if self._tried.answer is not None:
                    return self._tried.answer
                raise
            self._services.running[self] = placed
            if self._case.deaths:
                self._services.trials.begin(self._case, placed.backend)
            completed = False
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
                await self._tried.lost(lost, placed.backend)
                ended = await self._after(lost, placed.backend)
                if ended is not None:
                    return ended
            except CannotContinue as reason:
                self._failed_for_good()
                return await self._end_with(not_continued("The stream was lost", reason))
            except errors.OutOfDescriptors as error:
                return await self._fail(error)
            finally:
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
        )
        async with call as answer:
            if answer.status == 200 and _is_event_stream(answer):
                self._streaming = answer, call
                try:
                    return await self._stream(answer, call, placed)
                finally:
                    self._streaming = None
            body = await answer.read_all()
        headers = response_headers(answer.headers, self._record.id)
        response = web.Response(status=answer.status, body=body, headers=headers)
        if self._out is not None or (answer.status >= 500 and answer.status != 501):
            if self._tried.refused_by is None:
                self._tried.answer = response
            raise StreamLost(f"{placed.backend} answered {answer.status}")
        if answer.status == 200:
            if self._is_engines_work:
                call.moved()
            self._tried.taken_by(placed.backend)
            self._answered(body, placed.backend)
        elif 400 <= answer.status < 500 and self._is_doubtful(answer.status, placed.backend):
            self._tried.answer, self._tried.refused_by = response, placed.backend
            raise _Doubted
        return response

    async def _write(self, chunk: bytes, answer: Connection, call: Call) -> None:
        call.is_writing = True
        try:
            if not self._has_begun:
                self._has_begun = True
                self._record.ttft_s = time.monotonic() - self._started_s
            out = await self._open(answer) if self._out is None else self._out
            if chunk:
                await out.write(chunk)
        except ConnectionError as error:
            raise ClientGone from error
        finally:
            call.is_writing = False

    async def _open(self, answer: Connection) -> web.StreamResponse:
        self._out = web.StreamResponse(headers=response_headers(answer.headers, self._record.id))
        await self._out.prepare(self._request)
        return self._out

    async def keep_alive(self, since_s: float, now_s: float) -> None:
        """Writes a comment to a client whose stream has been silent since then. Chunks are whole events, so that it
        stands between two. It waits for nothing: where something waits to be taken there is no need of it."""
        if self._streaming is None:
            return
        answer, call = self._streaming
        transport = self._request.transport
        if call.is_writing or max(call.moved_s, self._kept_alive_s) > since_s or transport is None:
            return
        if not transport.get_write_buffer_size():
            self._kept_alive_s = now_s
            with suppress(ConnectionError):
                out = await self._open(answer) if self._out is None else self._out
                await out.write(sse.KEEP_ALIVE)

    async def _end(self, last: bytes = b"") -> web.StreamResponse:
        assert self._out is not None
        self._streaming = None
        self._count_output()
        with suppress(ConnectionError):
            if last:
                await self._out.write(last)
            await self._out.write_eof()
        return self._out

    def _client_left(self) -> bool:
        """Whether the client that left had everything: some do not wait for the end of the connection's answer."""
        self._count_output()
        self._record.status = self._record.status or (200 if self._is_delivered else CLIENT_GONE)
        return self._is_delivered

    async def _end_with(self, error: GatewayError) -> web.StreamResponse:
        self._record.status = error.status
        return await self._end(self._last_words(error))

    async def _after(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        """The answer with which the exchange ends after all; None: try another instance."""
        self._count_output()
        if self._has_begun:
            ended = await self._interrupted(lost, backend)
            if ended is not None:
                return ended
        if self._case.is_guilty:
            names = " and ".join(map(str, self._case.deaths))
            return await self._fail(errors.UpstreamFailed(f"{names} died while they had this request: it ends here."))
        pause_s = self._tried.pause_before_next(lost, has_begun=self._out is not None)
        if pause_s is None:
            return await self._give_up(lost)
        self._pause_s = pause_s
        self._retried()
        return None

    async def _give_up(self, lost: StreamLost) -> web.StreamResponse:
        kind = errors.UpstreamTimedOut if lost.timed_out else errors.UpstreamFailed
        if self._out is None and self._tried.answer is not None:
            return self._tried.answer
        return await self._fail(kind(f"No instance answered; the last: {lost}."))

    async def _fail(self, error: GatewayError) -> web.StreamResponse:
        if self._out is None:
            raise error
        if self._has_begun:
            self._failed_for_good()
        return await self._end_with(error)


def not_continued(what: str, reason: Exception) -> GatewayError:
    return errors.UpstreamFailed(f"{what} and could not be continued: {reason}.")
