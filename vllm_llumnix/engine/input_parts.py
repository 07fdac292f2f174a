# SPDX-License-Identifier: Apache-2.0
"""Parts of inputs that origins send by relay, for requests that have come from elsewhere. Llumlet thread only."""

from __future__ import annotations

import asyncio
import logging

from llumlet.protocol import wire
from llumlet.protocol.errors import Refused
from llumlet.tasks import Tasks
from vllm_llumnix.engine.builder import RequestBuilder
from vllm_llumnix.engine.context import EngineContext

logger = logging.getLogger("vllm.llumnix")


class InputParts:
    """They are checked as requests are, one by one, in the order in which they came."""

    def __init__(self, context: EngineContext, builder: RequestBuilder) -> None:
        self._loop = context.loop
        self._relay = context.relay
        self._builder = builder
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
                # Its API server has let vLLM check it: here it can be no other model's.
                logger.warning("llumlet: a part of the input of request %s is refused: %s", part.request_id, error)
                return
            take_part = self._loop.port.sessions.take_part
            await self._loop.call(take_part, part.request_id, part.epoch, part.number, request)
