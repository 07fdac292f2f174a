# SPDX-License-Identifier: Apache-2.0
"""A streaming client of the OpenAI API that notes when each token arrived.

    async with Client(server.base_url) as client:
        stream = await client.complete([1, 2, 3], max_tokens=100)
        await stream.wait_for(50)             # 50 tokens have arrived
        result = await stream.result()        # the stream has ended

Times are `time.monotonic()` seconds of this process, taken when the line was read and before it is
decoded. The server sends one event a token (several tokens in one event get the same time). Token
ids come from vLLM's `return_token_ids`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.support.harness import SERVED_NAME


class StreamFailed(RuntimeError):
    """The server answered with an error, or the stream ended without its end mark."""


@dataclasses.dataclass(slots=True)
class Stream:
    """One request and what has arrived of it. The three lists `token_ids`, `times` and `events`
    grow together.
    """

    request_id: str
    """The id the client chose; the engine's is `<kind>-<this>-0-<eight characters>`."""
    kind: str
    engine_id: str = ""
    """The engine's id, once somebody has asked an engine for it; it stays the same over moves."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    events: list[int] = dataclasses.field(default_factory=list)
    """Number of the event that brought each token."""
    choices: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """The token ids by choice; more than one choice with `n` above 1."""
    text: str = ""
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] | None = None
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)
    started_at: float = 0.0
    ended_at: float | None = None
    _changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.ended_at is not None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens; `gaps[i]` ends with token `i + 1`."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    def is_engine_id(self, engine_id: str) -> bool:
        """Whether the engine's request id `engine_id` is this stream's."""
        return engine_id.startswith(f"{self.kind}-{self.request_id}")

    async def wait_for(self, num_tokens: int, timeout_s: float = 120.0) -> None:
        """Until `num_tokens` output tokens have arrived. Raises StreamFailed if the stream ends or
        pauses for too long before.
        """
        deadline = time.monotonic() + timeout_s
        while len(self.token_ids) < num_tokens:
            if self.done:
                self._raise()
                got = len(self.token_ids)
                raise StreamFailed(f"the stream ended after {got} of {num_tokens} tokens")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise StreamFailed(f"{num_tokens} tokens did not come within {timeout_s:.0f} s, only {self._so_far()}")

    async def result(self, timeout_s: float = 300.0) -> Self:
        """Until the stream has ended. Raises StreamFailed."""
        assert self._task is not None
        await asyncio.wait([self._task], timeout=timeout_s)
        if not self.done:
            raise StreamFailed(f"no end within {timeout_s:.0f} s, after {self._so_far()}")
        self._raise()
        return self

    async def disconnect(self) -> None:
        """Close the connection, as a client that leaves does."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def _so_far(self) -> str:
        silence = time.monotonic() - (self.times[-1] if self.times else self.started_at)
        return f"{len(self.token_ids)} tokens, the last {silence:.1f} s ago"

    def _raise(self) -> None:
        assert self._task is not None
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    async def _run(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with response:
                await self._read(response)
        finally:
            self.ended_at = time.monotonic()
            self._changed.set()

    async def _run_whole(self, session: aiohttp.ClientSession, path: str, **arguments: Any) -> None:
        """A request without `stream`: everything arrives in one event."""
        try:
            async with session.post(path, **arguments) as response:
                if response.status != 200:
                    raise StreamFailed(f"the server answered {response.status}: {(await response.text())[:500]}")
                self._take(await response.json(), time.monotonic(), 0)
        finally:
            self.ended_at = time.monotonic()
            self._changed.set()

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        event = 0
        async for line in response.content:
            now = time.monotonic()
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return
            self._take(json.loads(line[6:]), now, event)
            event += 1
            self._changed.set()
        raise StreamFailed(f"the connection ended after {len(self.token_ids)} tokens without an end mark")

    def _take(self, chunk: dict[str, Any], now: float, event: int) -> None:
        if "error" in chunk:
            raise StreamFailed(f"the server sent an error after {len(self.token_ids)} tokens: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        # The chat endpoint puts the prompt beside the choices, the other into the first one.
        self.prompt_token_ids += chunk.get("prompt_token_ids") or []
        self.prompt_logprobs += chunk.get("prompt_logprobs") or []
        for choice in chunk["choices"]:
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.choices.setdefault(choice.get("index", 0), []).extend(ids)
            self.times += [now] * len(ids)
            self.events += [event] * len(ids)
            message = choice.get("delta") or choice.get("message") or {}
            self.text += choice["text"] if "text" in choice else message.get("content") or ""
            self.prompt_token_ids += choice.get("prompt_token_ids") or []
            self.prompt_logprobs += choice.get("prompt_logprobs") or []
            if choice.get("logprobs"):
                self.logprobs.append(choice["logprobs"])
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            stop = choice.get("stop_reason")
            self.stop_reason = stop if stop is not None else self.stop_reason


class Client:
    """Requests to one API server. An async context manager; leaving it closes the streams that are
    still open.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None
        self._streams: list[Stream] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self.base_url,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            if not stream.done:
                await stream.disconnect()
            elif stream._task is not None and not stream._task.cancelled():
                # Mark the exception as seen: whoever wanted it asked for the result.
                stream._task.exception()
        assert self._session is not None
        await self._session.close()

    async def complete(self, prompt: str | list[int] | None, max_tokens: int, **parameters: Any) -> Stream:
        """Start a completion: greedy unless `parameters` (fields of the request) say otherwise.
        Raises StreamFailed.
        """
        return await self._start("cmpl", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **parameters})

    async def chat(self, messages: list[dict[str, Any]], max_tokens: int, **parameters: Any) -> Stream:
        """The same through the chat endpoint."""
        body = {"messages": messages, "max_tokens": max_tokens, **parameters}
        return await self._start("chatcmpl", "/v1/chat/completions", body)

    async def status(self, path: str) -> int:
        """The HTTP status of a GET."""
        assert self._session is not None
        async with self._session.get(path) as response:
            return response.status

    async def metrics(self) -> str:
        """The server's Prometheus metrics as text."""
        assert self._session is not None
        async with self._session.get("/metrics") as response:
            return await response.text()

    async def _start(self, kind: str, path: str, body: dict[str, Any]) -> Stream:
        assert self._session is not None
        body = {
            "model": SERVED_NAME,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **body,
        }
        request_id = body.get("request_id") or uuid.uuid4().hex
        stream = Stream(request_id=request_id, kind=kind, started_at=time.monotonic())
        headers = {"X-Request-Id": stream.request_id}
        if not body["stream"]:
            del body["stream_options"]
            stream._task = asyncio.create_task(stream._run_whole(self._session, path, json=body, headers=headers))
            self._streams.append(stream)
            return stream
        response = await self._session.post(path, json=body, headers=headers)
        if response.status != 200:
            text = await response.text()
            raise StreamFailed(f"the server answered {response.status}: {text[:500]}")
        stream._task = asyncio.create_task(stream._run(response))
        self._streams.append(stream)
        return stream
