# SPDX-License-Identifier: Apache-2.0
"""What a gateway says of a request: how many instances died, or hung, while they had it.

It is the gateway that knows, as no process of those instances is left. The header that says it is read by an ASGI
middleware and kept for the task that serves the request, in which vLLM's engine client is called. A client that says it
itself has its own request taken for a suspect: nobody else's.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from llumlet.attempts import ATTEMPT_HEADER, deaths_before
from vllm_llumnix.frontend.asgi import Message, Middleware, Receive, Send

_HEADER: Final = ATTEMPT_HEADER.lower().encode()

num_deaths: ContextVar[int] = ContextVar("num_deaths", default=0)
"""Instances that died with the request that is being served."""


class ReadAttempt(Middleware):
    """Sets `num_deaths`."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value = next((value for name, value in scope["headers"] if name == _HEADER), b"")
            num_deaths.set(deaths_before(value.decode("latin-1")))
        await self._app(scope, receive, send)
