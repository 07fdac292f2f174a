# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware, which stands in front of vLLM's API by way of its own `--middleware` (`hooks.MIDDLEWARE`); that of a
drain is in `server_drain`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from llumlet.contract.attempt_header import ATTEMPT_HEADER, deaths_before
from llumlet.protocol.urgency import is_urgent

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ATTEMPT: Final = ATTEMPT_HEADER.lower().encode()
_REQUEST_ID: Final = b"x-request-id"
_LIVE: Final = "/live"
_OK: Final = b"OK"
_HEADERS: Final = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_OK))]
num_deaths: ContextVar[int] = ContextVar("num_deaths", default=0)
"""Instances that died, or hung, with the request that is being served."""


@dataclass(slots=True)
class Served:
    """An HTTP request, whose task calls vLLM's engine client: once, or several times where it has parts or turns."""

    name: str
    """Its `X-Request-Id`: the name by which a gateway and its scheduler know it."""
    priority: int | None = None
    """Priority of its first engine request."""

    def priority_of(self, asked: int) -> int:
        """The priority of an engine request that is made for it. A later one is not urgent if the first is not: vLLM
        gives the turns after a tool call a priority of one less."""
        if self.priority is None:
            self.priority = asked
        return asked if is_urgent(self.priority) else max(asked, 0)


served: ContextVar[Served | None] = ContextVar("served", default=None)


class Middleware:
    """A link of the chain; `_app` is the rest of it."""

    def __init__(self, app: App) -> None:
        self._app = app


class ReadAttempt(Middleware):
    """Sets `served` and `num_deaths` to what a gateway says of a request: no process of those instances is left to say
    how many died.

    They are kept for the task that serves the request, in which vLLM's engine client is called. A client that says it
    itself has its own request taken for a suspect: nobody else's.
    """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value = next((value for name, value in scope["headers"] if name == _ATTEMPT), b"")
            num_deaths.set(deaths_before(value.decode("latin-1")))
            name = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
            served.set(Served(name.decode("latin-1")))
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
