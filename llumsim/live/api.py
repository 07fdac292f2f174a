# SPDX-License-Identifier: Apache-2.0
"""The API of a simulated instance, as far as a gateway needs it: completions, chats, models, health, detokenization.

A token is the word of its number; a prompt in words is that of these numbers, and other words get one of their own. So
a text goes on the same way from token ids and from words, wherever.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import Callable, Sequence

from aiohttp import web

from llumlet.process.addresses import Address
from llumsim.live.answers import Answer
from llumsim.live.world import VOCABULARY, SimulatedRequest

Submit = Callable[[Sequence[int], int, str], SimulatedRequest]
"""Starts a request, by prompt, most tokens, the client's id. Raises ValueError for what does not fit."""


def token_ids_of(prompt: object) -> list[int]:
    """Token ids of a prompt. Raises ValueError for what is neither text nor a list of token ids."""
    if isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < VOCABULARY for token in prompt):
        return prompt or [0]
    if not isinstance(prompt, str):
        raise ValueError("prompt must be text or token ids")
    return [_token_of(word) for word in prompt.split()] or [0]


def _token_of(word: str) -> int:
    is_own = word.isascii() and word.isdigit() and len(word) < 6 and int(word) < VOCABULARY
    return int(word) if is_own else zlib.crc32(word.encode()) % VOCABULARY


class SimulatedApi:
    """An API that listens on a free port of loopback from `start` on."""

    def __init__(
        self, model: str, submit: Submit, abort: Callable[[SimulatedRequest], None], is_open: Callable[[], bool]
    ) -> None:
        self._model = model
        self._submit = submit
        self._abort = abort
        self._runner: web.AppRunner | None = None
        self._is_open = is_open
        """Tells if new requests are taken; else they get status 503, like during a drain."""
        self.status = 0
        """Status of every answer to a request for tokens; 0 answers normally."""

    async def start(self) -> Address:
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_post("/detokenize", self._detokenize)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", self._health)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return Address(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Breaks the connections that are open."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in runner.server.connections if runner.server is not None else ():
                connection.force_close()
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "llumnix"}
        return web.json_response({"object": "list", "data": [model]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": _text((await request.json())["tokens"])})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.status:
            return _error(self.status, "simulated")
        if not self._is_open():
            return _error(503, "the instance is being drained")
        try:
            body = await request.json()
            is_chat = request.path.endswith("/chat/completions")
            text = " ".join(str(message["content"]) for message in body["messages"]) if is_chat else body["prompt"]
            most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
            client_id = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex
            submitted = self._submit(token_ids_of(text), most, client_id)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, f"{type(error).__name__}: {error}")
        answer = Answer(body, is_chat=is_chat, request_id=client_id, model=self._model, prompt=submitted.prompt)
        try:
            if answer.is_streamed:
                return await self._stream(request, submitted, answer)
            reason = await submitted.done()
            if reason == "error":
                _break(request)
            return web.json_response(answer.whole(submitted.output, _text(submitted.output), reason))
        finally:
            # The client has left, or the connection broke.
            if not submitted.finished:
                self._abort(submitted)

    async def _stream(self, request: web.Request, submitted: SimulatedRequest, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in answer.opening():
            await response.write(event)
        num_sent = 0
        async for token in submitted.tokens():
            is_last = submitted.finished and num_sent + 1 == len(submitted.output)
            reason = submitted.finish_reason if is_last else None
            await response.write(answer.chunk([token], _text([token]), num_sent, reason))
            num_sent += 1
        if submitted.finish_reason == "error":
            _break(request)
        for event in answer.closing(num_sent):
            await response.write(event)
        await response.write_eof()
        return response


def _text(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _break(request: web.Request) -> None:
    """Breaks a connection, as if the process had died."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
