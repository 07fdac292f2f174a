# SPDX-License-Identifier: Apache-2.0
"""Every path but completions and chats: the answer is handed on as it comes.

An answer in one piece is tried elsewhere until it is whole. An event stream is handed on in whole events; if its engine
is lost after the first of them, it ends with an error in the form of its API.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from llumsched.gateway import ends, errors, events, sse
from llumsched.gateway.attempts import Attempts
from llumsched.gateway.backends import Backend
from llumsched.gateway.connection import Connection
from llumsched.gateway.ends import End, Ended
from llumsched.gateway.errors import GatewayError, NoInstance, StreamLost
from llumsched.gateway.paths import Kind, Path, Style
from llumsched.gateway.placement import Placed
from llumsched.gateway.services import Received, Services
from llumsched.gateway.upstream import Call
from llumsched.request import Request

_LAST: Final = re.compile(
    rb"(?:^|[\r\n])(?:data:\s*\[DONE\]|event:\s*(?:error|message_stop|response\.(?:completed|failed|incomplete))\b)"
)
"""Events after which a stream may end, in all APIs."""
_SEQUENCE_NUMBER: Final = re.compile(rb'"sequence_number":\s*([0-9]+)')


_MOST_RENAMED_BYTES: Final = 4 << 20
"""Longest answer in one piece in which ids are replaced, within 10 ms on the event loop; a longer one keeps the
engine's."""
_PARDONED: Final = frozenset((403, 404))
"""Refusals because the path is missing or disabled: instances may differ in version and flags."""


class Passing(Attempts):
    def __init__(self, services: Services, received: Received, path: Path) -> None:
        super().__init__(services, received, path.style, path.work, pardoned=_PARDONED)
        self._path = path
        self._stored = received.stored
        self._owner = received.stored.home if received.stored else None
        self._own_response = received.own_response
        self._last = b""
        """The last events of a stream that the client got."""
        self._end_by_engine: End | None = None
        """An engine's own error that ended the stream."""
        self._usage = sse.Usage()
        self._is_released = False

    async def _choose(self, asked: Request) -> Placed:
        if self._owner is not None and self._owner not in self._tried.excluded:
            return Placed(asked, self._owner)
        if self._path.kind is Kind.STICKY:
            raise NoInstance(f"{self._owner}, which has this response, does not answer.", retry_after_s=1)
        return await super()._choose(asked)

    def _is_doubtful(self, status: int, backend: Backend) -> bool:
        return backend is not self._owner and super()._is_doubtful(status, backend)

    def _release(self, placed: Placed, *, completed: bool) -> None:
        """Releases the place as not completed: on a path without work for the engine, its status does not show the
        request."""
        if not self._is_released:
            super()._release(placed, completed=False)
        self._is_released = False

    def _renamed(self, content: bytes, backend: Backend) -> bytes:
        """Replaces the engine's ids of responses by those that clients know."""
        if self._stored is not None:
            content = content.replace(self._stored.own.encode(), self._stored.shown.encode())
        if self._own_response and self._own_response.encode() in content:
            shown = self._services.stored.shown(self._own_response, backend, self._record.key)
            content = content.replace(self._own_response.encode(), shown.encode())
        return content

    @property
    def _most_held(self) -> int:
        if self._path.style is Style.RESPONSES:
            return _MOST_RENAMED_BYTES
        return 0 if self._path.is_played else super()._most_held

    async def _stream(self, answer: Connection, call: Call, placed: Placed) -> web.StreamResponse:
        self._record.is_streamed = True
        cutter = sse.EventCutter()
        while data := await answer.read():
            chunk = cutter.feed(data)
            if chunk and (not self._last or chunk.startswith(b":")) and not events.has_event(chunk):
                call.heard()
                await self._write(chunk, call, is_event=False)
                continue
            if not chunk and not self._last:
                continue
            # A stored response was made long ago: how it ended is what the client asks for.
            if self._is_engines_work and (ended := ends.in_events(chunk, self._style)):
                await self._ended(ended, chunk, call)
            if not self._last:
                self._begun(chunk, call, placed)
            self._moved(call)
            if chunk:
                self._last = chunk
                if b"_tokens" in chunk:
                    self._usage = sse.usage_of(chunk)
                await self._write(self._renamed(chunk, placed.backend), call)
        if not answer.is_delimited and not _LAST.search(self._last):
            raise StreamLost(f"{placed.backend} ended the stream early")
        rest = cutter.rest
        if not self._last:
            await self._write(self._renamed(rest, placed.backend), call)
            rest = b""
        if self._end_by_engine is End.REFUSED:
            self._record.status = errors.InvalidRequest.status
        elif self._end_by_engine is not None:
            self._record.status = errors.UpstreamFailed.status
            if self._is_engines_work:
                self._services.backends.doubt(placed.backend)
        self._is_delivered = True
        call.is_writing = True
        return await self._end(self._renamed(rest, placed.backend))

    async def _ended(self, ended: Ended, chunk: bytes, call: Call) -> None:
        """Handles an engine's own end. Raises StreamLost for an abort, and for errors that the client need not see."""
        if ended.end is End.REFUSED or (self._last and ended.end is not End.ABORT):
            self._end_by_engine = ended.end
            return
        if self._last and ended.at:
            await self._write(self._renamed(chunk[: ended.at], call.backend), call)
        words = b"" if ended.end is End.ABORT else self._renamed(chunk, call.backend)
        raise StreamLost(f"{call.backend} {ended.end.what}", end=ended.end, words=words)

    def _begun(self, first: bytes, call: Call, placed: Placed) -> None:
        self._tried.taken_by(placed.backend)
        self._services.placement.begun(placed)
        if self._config.full_mode:
            # The engine computes it, and its status counts it, by whatever name.
            self._release(placed, completed=False)
            self._is_released = True
        call.is_stream = self._is_engines_work and not self._path.may_rest

    def _moved(self, call: Call) -> None:
        """Notes that another part has come."""
        before_s, is_first = call.moved_s, not self._last
        if not self._is_engines_work:
            call.heard()
            return
        call.moved()
        if self._case.at is not None:
            self._services.trials.got_part(self._case)
        if not is_first:
            gap_s = call.moved_s - before_s
            self._services.metrics.of_model(self._record.model, is_served=True).itl.observe(gap_s * 1e3)
            if call.is_stream:
                self._services.backends.pace.step(call.backend, gap_s, call.moved_s)

    def _count_output(self) -> None:
        self._record.used(self._usage)

    async def _interrupted(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        self._failed_for_good()
        kind = errors.UpstreamTimedOut if lost.timed_out else errors.UpstreamFailed
        error = kind(f"The stream was lost ({lost}) and cannot be continued: {self._request.path} is passed as it is.")
        return await self._end_with(error)

    def _last_words(self, error: GatewayError) -> bytes:
        numbers = _SEQUENCE_NUMBER.findall(self._last)
        return errors.last_event(error, self._style, int(numbers[-1]) + 1 if numbers else 0)

    def _failed_for_good(self) -> None:
        self._services.metrics.of_model(self._record.model).lost("refused")
