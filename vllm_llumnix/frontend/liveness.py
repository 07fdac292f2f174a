# SPDX-License-Identifier: Apache-2.0
"""`/live`: whether this process serves, for what would restart it.

vLLM's `/health` tells of the engine, and in a drain of readiness. Whoever restarts what is unhealthy by it ends an API
server that outlives its engine, or that drains, with all its streams.
"""

from __future__ import annotations

from typing import Final

from vllm_llumnix.frontend.asgi import Message, Middleware, Receive, Send, respond

_PATH: Final = "/live"
_BODY: Final = b"OK"
_HEADERS: Final = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_BODY))]


class AnswerLive(Middleware):
    """Stands outside of the middleware that asks for API keys."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and _path(scope) == _PATH:
            await respond(send, 200, _HEADERS, b"" if scope["method"] == "HEAD" else _BODY)
        else:
            await self._app(scope, receive, send)


def _path(scope: Message) -> str:
    """The request's path, without what `--root-path` put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
