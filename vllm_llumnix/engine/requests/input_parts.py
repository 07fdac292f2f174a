# SPDX-License-Identifier: Apache-2.0
"""Parts of inputs that origins send by relay, for requests that have come from elsewhere. Llumlet thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from llumlet.process.tasks import Tasks
from llumlet.protocol import wire
from llumlet.protocol.errors import Refused
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.requests.builder import RequestBuilder
from vllm_llumnix.engine.vllm_types import Request

logger = logging.getLogger("vllm.llumnix")


class InputParts:
    """They are checked as requests are, one by one, in the order in which they came. `end_here` ends requests, by id,
    of whose input a part is refused."""

    def __init__(self, context: EngineContext, builder: RequestBuilder, end_here: Callable[[list[str]], None]) -> None:
        self._loop = context.loop
        self._relay = context.relay
        self._builder = builder
        self._end_here = end_here
        self._turn = asyncio.Lock()
        self._tasks = Tasks()

    def take(self, origin: str, part: wire.InputPart) -> None:
        """`origin` has a part for one of its own requests."""
        residence = self._relay.residence_of(part.request_id)
        if residence is not None and (residence.origin, residence.epoch) == (origin, part.epoch):
            self._tasks.spawn(self._give(part))

    async def _give(self, part: wire.InputPart) -> None:
        async with self._turn:
            try:
                request = None
                if part.state is not None:
                    request = await self._builder.build_part(part.state, part.request_id)
            except Refused as error:
                # vLLM has checked it at its API server, for an engine like this one: it would be sent again and again.
                logger.error("llumlet: request %s ends: a part of its input is refused: %s", part.request_id, error)
                self._end_here([part.request_id])
                return
            await self._loop.call(self._give_on_loop, part, request)

    def _give_on_loop(self, part: wire.InputPart, request: Request | None) -> None:
        port = self._loop.port
        port.sessions.take_part(part.request_id, part.epoch, part.number, request)
        if port.has_runnable():
            self._loop.wake_group()
