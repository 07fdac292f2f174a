# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware, which stands in front of vLLM's API by way of its own `--middleware` (`hooks.MIDDLEWARE`); that of a
drain is in `drain`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from llumlet.attempts import ATTEMPT_HEADER, deaths_before

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ATTEMPT: Final = ATTEMPT_HEADER.lower().encode()
_LIVE: Final = "/live"
_OK: Final = b"OK"
_HEADERS: Final = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_OK))]
num_deaths: ContextVar[int] = ContextVar("num_deaths", default=0)
"""Instances that died, or hung, with the request that is being served."""


class Middleware:
    """A link of the chain; `_app` is the rest of it."""

    def __init__(self, app: App) -> None:
        self._app = app


class ReadAttempt(Middleware):
    """Sets `num_deaths` to what a gateway says of a request: no process of those instances is left to say it.

    It is kept for the task that serves the request, in which vLLM's engine client is called. A client that says it
    itself has its own request taken for a suspect: nobody else's.
    """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value = next((value for name, value in scope["headers"] if name == _ATTEMPT), b"")
            num_deaths.set(deaths_before(value.decode("latin-1")))
        await self._app(scope, receive, send)


class AnswerLive(Middleware):
    """`/live`: whether this process serves, for what would restart it. Outside of what asks for API keys.

    vLLM's `/health` tells of the engine, and in a drain of readiness. Whoever restarts what is unhealthy by it ends an
    API server that outlives its engine, or that drains, with all its streams.
    """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and _path(scope) == _LIVE:
            await respond(send, 200, _HEADERS, b"" if scope["method"] == "HEAD" else _OK)
        else:
            await self._app(scope, receive, send)


def _path(scope: Message) -> str:
    """The request's path, without what `--root-path` put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def respond(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """The whole answer to an HTTP request."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
