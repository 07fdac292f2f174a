# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware, which stands in front of vLLM's API by way of its own `--middleware` (`hooks.MIDDLEWARE`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Middleware:
    """A link of the chain; `_app` is the rest of it."""

    def __init__(self, app: App) -> None:
        self._app = app


async def respond(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """The whole answer to an HTTP request."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
