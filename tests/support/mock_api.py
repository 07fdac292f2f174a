# SPDX-License-Identifier: Apache-2.0
"""An OpenAI API server without an engine, as its own process: for measurements and tests of what stands before engines.

    python -m tests.support.mock_api --port 9001 --model mock --tokens 32 --interval-ms 0

Unlike `llumsim.live.api`, it writes an answer once, says it as often as it is asked for, at any speed, and breaks
off at any byte. A token is a number; the next one is a function of the one before it and of its position, so that an
answer continued from `prompt + delivered` equals an answer in one piece. Its text is that of `bytes_of`: characters of
several bytes, of which some take three tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import uuid
import zlib
from dataclasses import dataclass, field
from typing import Any

import uvloop
from aiohttp import web

from llumsim.live.answers import Answer

_WORDS = ("the", "a", "é", "日本", "🙂", "of", 'qu"ote', "back\\slash", "new\nline", "ß")
VOCABULARY = 1000
"""Words. Each also has three parts, whose numbers are higher by one, two and three times as much; what is higher still
is whole words again."""
_NUM_PARTS = 3
_SPLIT = (3, 4)
"""Of the words, those that are told in parts."""
_INCOMPLETE = "\ufffd"
MODEL_LENGTH = 4096
_ID = b"@request@"
_INFERENCE_PATHS = ("/v1/completions", "/v1/chat/completions")
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}
_MOST_WRITTEN = 1000
_FAILURE = (
    b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\ndata: [DONE]\n\n'
)


def bytes_of(token: int) -> bytes:
    part, number = divmod(token, VOCABULARY)
    word = f" {_WORDS[number % len(_WORDS)]}{number}".encode()
    return (word, word[:2], word[2:3], word[3:])[part if part <= _NUM_PARTS else 0]


class Detokenizer:
    """Tells text in whole characters. An equal of `tokenizers.decoders.DecodeStream`, with which vLLM detokenizes."""

    def __init__(self, prompt: list[int]) -> None:
        before = b"".join(map(bytes_of, prompt))
        self._untold = before if _text(before).endswith(_INCOMPLETE) else b""
        """All of a prompt that ends within a character: the stream then starts without a prefix."""

    def step(self, token: int) -> str:
        self._untold += bytes_of(token)
        text = _text(self._untold)
        if text.endswith(_INCOMPLETE):
            return ""
        self._untold = b""
        return text


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def next_token(tokens: list[int]) -> int:
    """Depends on all that came before by way of the last token and the length."""
    last = tokens[-1] if tokens else 0
    if 0 < last // VOCABULARY < _NUM_PARTS:
        return last + VOCABULARY
    token = (last * 31 + len(tokens) * 7 + 11) % VOCABULARY
    return token + VOCABULARY if token % len(_WORDS) in _SPLIT else token


def prompt_tokens(document: dict[str, Any]) -> list[int]:
    prompt = document.get("prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    text = json.dumps(document.get("messages") or prompt, ensure_ascii=False)
    return [zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


@dataclass
class Mock:
    """The server. Tests change its fields while it runs."""

    models: tuple[str, ...] = ("mock",)
    num_tokens: int = 32
    """If the request does not say."""
    tokens_per_event: int = 1
    interval_s: float = 0.0
    seen: list[dict[str, Any]] | None = None
    """The bodies, headers and paths that came; None keeps none."""
    health: int = 200
    answering: set[str] = field(default_factory=set)
    """Ids of the requests that run."""
    num_dropped: int = 0
    """Requests whose client went away."""
    status: int = 200
    """Answered to every request."""
    cut_at: int | None = None
    """The byte of the next streamed body at which its connection is closed."""
    hang_at: int | None = None
    """The same, but nothing happens any more, on any connection of that port."""
    fail_at: int | None = None
    """The number of the event of the next stream in whose place an error is reported."""
    hung: set[int] = field(default_factory=set)
    """Ports."""
    counters: str = ""
    """Body of /metrics; empty: there is no such path."""
    is_healthy_while_hung: bool = False
    """It is the engine core that hangs, and the API server does what it can without."""
    waiting: list[str] = field(default_factory=list)
    """Ids of the requests that this one got while its core hung."""
    written: dict[tuple[str, bytes], _Written] = field(default_factory=dict)
    """Answers are written once per body: an engine's work is not what is measured."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if _port(request) in self.hung:
            await self._hang(request)
        if request.path == "/v1/models":
            cards = [{"id": name, "object": "model", "max_model_len": MODEL_LENGTH} for name in self.models]
            return web.json_response({"object": "list", "data": cards})
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics" and self.counters:
            return web.Response(text=self.counters)
        if request.path == "/detokenize":
            return web.json_response({"prompt": _text(b"".join(map(bytes_of, (await request.json())["tokens"])))})
        if request.path not in _INFERENCE_PATHS:
            return web.Response(status=404)
        content = await request.read()
        if self.seen is not None:
            self.seen.append({"path": request.path, "headers": request.headers, "content": content})
        if self.status != 200:
            return web.json_response({"error": {"message": "mocked", "code": self.status}}, status=self.status)
        return await self._infer(request, content)

    async def _hang(self, request: web.BaseRequest) -> None:
        if self.is_healthy_while_hung:
            if request.path not in _INFERENCE_PATHS:
                return
            if "X-Request-Id" in request.headers:
                self.waiting.append(request.headers["X-Request-Id"])
            if json.loads(await request.read()).get("stream"):
                await web.StreamResponse(headers=_STREAM_HEADERS).prepare(request)
        await asyncio.sleep(3600)

    async def _infer(self, request: web.BaseRequest, content: bytes) -> web.StreamResponse:
        answer = self.written.get((request.path, content))
        if answer is None:
            if len(self.written) > _MOST_WRITTEN:
                self.written.clear()
            answer = _Written(json.loads(content), "chat" in request.path, self.num_tokens, self.tokens_per_event)
            self.written[request.path, content] = answer
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        self.answering.add(request_id)
        try:
            if answer.is_streamed:
                return await self._stream(request, answer, request_id.encode())
            if self.interval_s:
                await asyncio.sleep(self.interval_s * answer.max_tokens)
            body = answer.in_one_piece.replace(_ID, request_id.encode())
            return web.Response(body=body, content_type="application/json")
        except (ConnectionError, asyncio.CancelledError):
            self.num_dropped += 1
            raise
        finally:
            self.answering.discard(request_id)

    async def _stream(self, request: web.BaseRequest, answer: _Written, request_id: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        num_sent = 0
        cut_at, hang_at, fail_at = self.cut_at, self.hang_at, self.fail_at
        self.cut_at = self.hang_at = self.fail_at = None
        limit = cut_at if cut_at is not None else hang_at
        for number, event in enumerate(answer.events):
            data = event.replace(_ID, request_id)
            if number == fail_at:
                await response.write(_FAILURE)
                break
            if limit is not None and num_sent + len(data) > limit:
                await response.write(data[: limit - num_sent])
                if hang_at is not None:
                    self.hung.add(_port(request))
                    await asyncio.sleep(3600)
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(data)
            num_sent += len(data)
            if self.interval_s:
                await asyncio.sleep(self.interval_s)
        await response.write_eof()
        return response


def _port(request: web.BaseRequest) -> int:
    assert request.transport is not None
    port: int = request.transport.get_extra_info("sockname")[1]
    return port


class _Written:
    """All that is to be said to one request, whose id is still to be filled in."""

    def __init__(self, document: dict[str, Any], is_chat: bool, num_tokens: int, tokens_per_event: int) -> None:
        self.max_tokens = document.get("max_completion_tokens") or document.get("max_tokens") or num_tokens
        self._prompt = prompt_tokens(document)
        self._answer = Answer(
            document, is_chat=is_chat, request_id=_ID.decode(), model=document.get("model"), prompt=self._prompt
        )
        self.is_streamed = self._answer.is_streamed
        self._tokens_per_event = tokens_per_event

    def _tokens(self) -> list[int]:
        tokens = list(self._prompt)
        for _ in range(self.max_tokens):
            tokens.append(next_token(tokens))
        return tokens[len(self._prompt) :]

    @functools.cached_property
    def in_one_piece(self) -> bytes:
        tokens = self._tokens()
        text = "".join(map(Detokenizer(self._prompt).step, tokens))
        return json.dumps(self._answer.whole(tokens, text, "length")).encode()

    @functools.cached_property
    def events(self) -> list[bytes]:
        tokens, detokenizer = self._tokens(), Detokenizer(self._prompt)
        chunks = []
        for start in range(0, len(tokens), self._tokens_per_event):
            new = tokens[start : start + self._tokens_per_event]
            reason = "length" if start + len(new) == len(tokens) else None
            chunks.append(self._answer.chunk(new, "".join(map(detokenizer.step, new)), start, reason))
        return [*self._answer.opening(), *chunks, *self._answer.closing(len(tokens))]


async def _serve(args: argparse.Namespace) -> None:
    mock = Mock(models=tuple(args.model.split(",")), num_tokens=args.tokens, interval_s=args.interval_ms / 1e3)
    server = web.Server(mock.answer, handler_cancellation=True)
    listener = await asyncio.get_running_loop().create_server(server, args.host, args.port, backlog=1024)
    print(f"listening at {listener.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="mock", help="names, separated by commas")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    try:
        uvloop.run(_serve(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
