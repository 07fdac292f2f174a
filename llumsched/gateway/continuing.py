# SPDX-License-Identifier: Apache-2.0
"""Completions and chats: a stream that loses its engine continues on another one, from the tokens that its client has.

Clients get whole events, so that an engine may vanish at any byte of its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from aiohttp import web

from llumsched.gateway import continuation, errors, sse
from llumsched.gateway.attempts import Attempts, not_continued
from llumsched.gateway.backends import Backend
from llumsched.gateway.body import Prompt
from llumsched.gateway.connection import Connection
from llumsched.gateway.continuable import CannotContinue, Outline
from llumsched.gateway.continuation import Transcript
from llumsched.gateway.ends import End
from llumsched.gateway.errors import StreamLost
from llumsched.gateway.events import has_event
from llumsched.gateway.placement import Placed
from llumsched.gateway.services import Received, Services
from llumsched.gateway.upstream import Call

NO_CONTINUATION_HEADER: Final = "X-Llumnix-Continuation"
"""Header whose value `off` ends a stream with an error when its engine is lost."""


class Continuing(Attempts):
    def __init__(self, services: Services, received: Received) -> None:
        super().__init__(services, received)
        head = self._body.head
        self._first_target = self._target
        self._events: sse.EventStream | None = None
        self._wants_ids = self._is_continuable
        self._transcript = Transcript(
            "chat" in self._request.path, keeps_ids=head.return_token_ids not in (None, False)
        )
        if self._wants_ids:
            self._content = self._body.with_token_ids()
        self._outline: Outline | None = None
        self._max_model_len: int | None = None
        """Length limit of the lost engine, in tokens."""
        self._change: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None

    @property
    def _is_continuable(self) -> bool:
        """True if the head of the body permits a continuation; `continuable.outline` decides."""
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

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer. Parts of the answer count as tokens if no ids are known."""
        events = self._events
        num_output = len(self._transcript.token_ids)
        if events is not None:
            num_output += len(events.token_ids) or events.num_texts
        return self._record.num_input_tokens + num_output

    @property
    def _prompt(self) -> Prompt:
        if self._out is None or not self._transcript.token_ids:
            return super()._prompt
        return self._counted._replace(num_tokens=self._transcript.num_prompt + len(self._transcript.token_ids))

    async def _prepare(self, placed: Placed) -> None:
        """Takes back tokens that end within a character. The engine that continues knows which do."""
        transcript = self._transcript
        if self._out is None or not transcript.token_ids:
            return
        while transcript.token_ids and await self._ends_within_character(placed):
            transcript.take_back()
        if transcript.is_withheld:
            transcript.forget_tokens()
            await self._plan()
        elif transcript.again:
            await self._plan()

    async def _ends_within_character(self, placed: Placed) -> bool:
        content = (self._transcript.last_tokens(self._body.model),)
        call = self._services.upstream.call(
            placed.backend, continuation.DETOKENIZE, content, self._headers, placed.asked.id
        )
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
        observe_gap = self._services.metrics.of_model(self._record.model, is_served=True).itl.observe
        observe_step = self._services.backends.pace.step
        read = answer.read
        last_s = 0.0
        while data := await read():
            chunk = events.feed(data)
            data = b""  # the first part holds the prompt's ids, and the next may come late
            if events.end is not None:
                return await self._ended(events, chunk, call)
            if not events.has_event or (chunk[:1] == b":" and not has_event(chunk)):
                call.heard()
                if chunk:
                    await self._write(chunk, call, is_event=False)
                continue
            call.moved()
            if last_s:
                gap_s = call.moved_s - last_s
                observe_gap(gap_s * 1e3)
                observe_step(placed.backend, gap_s, call.moved_s)
            else:
                call.is_stream = True
                self._tried.taken_by(placed.backend)
                self._services.placement.begun(placed)
            last_s = call.moved_s
            if self._case.at is not None:
                self._services.trials.got_part(self._case)
            if self._change is not None:
                chunk = sse.rewrite(chunk, self._change)
            if chunk:
                await self._write(chunk, call)
            self._is_delivered = events.is_done
        if not events.is_done:
            raise StreamLost(f"{call.backend} ended the stream early")
        call.is_writing = True
        return await self._end()

    async def _ended(self, events: sse.EventStream, chunk: bytes, call: Call) -> web.StreamResponse:
        """Handles an engine's own end, after `chunk`. Raises StreamLost, unless the request is at fault."""
        assert events.end is not None
        words = events.failure if events.failure.endswith(sse.DONE) else events.failure + sse.DONE
        if events.end is not End.REFUSED and not self._has_begun and not await self._may_continue():
            self._events = None  # the client has nothing of it, and nothing is lost
        elif chunk:
            await self._write(sse.rewrite(chunk, self._change) if self._change is not None else chunk, call)
        if events.end is not End.REFUSED:
            words = b"" if events.end is End.ABORT else words
            raise StreamLost(f"{call.backend} {events.end.what}", end=events.end, words=words)
        self._record.status = errors.InvalidRequest.status
        call.is_writing = True
        return await self._end(words)

    def _count_output(self) -> None:
        if self._events is not None:
            self._transcript.take(self._events)
            self._events = None
        transcript = self._transcript
        self._record.num_input_tokens = transcript.num_prompt or self._record.num_input_tokens
        self._record.num_output_tokens = len(transcript.token_ids) or transcript.num_texts
        self._record.used(transcript.usage)

    async def _interrupted(self, lost: StreamLost, backend: Backend) -> web.StreamResponse | None:
        try:
            if self._transcript.is_finished:
                return await self._end(continuation.ending(await self._outlined(), self._transcript))
            self._max_model_len = backend.max_model_len(self._body.model)
            await self._plan()
        except CannotContinue as reason:
            self._count_continuation("refused")
            return await self._end_as_said(not_continued(f"The stream was lost ({lost})", reason))
        return None

    async def _may_continue(self) -> bool:
        with suppress(CannotContinue):
            return self._wants_ids and not (await self._outlined()).refusal
        return False

    async def _outlined(self) -> Outline:
        """The outline of the request, made once. Raises CannotContinue."""
        if self._outline is None:
            self._outline = await self._services.tokens.outline(self._body)
        return self._outline

    async def _plan(self) -> None:
        outline = await self._outlined()
        if not self._wants_ids:
            raise CannotContinue(outline.refusal or "the client disabled it")
        planned = continuation.plan(self._body, outline, self._first_target, self._transcript, self._max_model_len)
        self._target, self._content, self._change = planned.path, planned.content, planned.change

    def _retried(self) -> None:
        if not self._has_begun:
            super()._retried()
        else:
            self._record.num_continuations += 1
            self._count_continuation("continued")

    def _failed_for_good(self) -> None:
        self._count_continuation("failed")

    def _count_continuation(self, outcome: str) -> None:
        self._services.metrics.of_model(self._record.model).lost(outcome)
