# SPDX-License-Identifier: Apache-2.0
"""`/live`: whether this process serves, for what would restart it.

vLLM's `/health` tells of the engine, and in a drain of readiness. Whoever restarts what is unhealthy by it ends an API
server that outlives its engine, or that drains, with all its streams.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

_PATH: Final = "/live"
_BODY: Final = b"OK"
_HEADERS: Final = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_BODY))]

Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]


class AnswerLive:
    """ASGI middleware, given to vLLM with its own `--middleware`: outside of the one that asks for API keys."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and _path(scope) == _PATH:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else _BODY})
        else:
            await self._app(scope, receive, send)


def _path(scope: Message) -> str:
    """The request's path, without what `--root-path` put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
