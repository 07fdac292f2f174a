# SPDX-License-Identifier: Apache-2.0
"""Responses made in the background, which count for their key although their requests have ended."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Final

import aiohttp

from llumlet.process.tasks import cancel
from llumsched.gateway.backends import Backends

_LOOK_S: Final = 2.0
_MOST_FAILURES: Final = 5
"""Unanswered queries in a row after which an instance's response counts as lost."""


class Background:
    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._watching: set[asyncio.Task[None]] = set()

    def keep(self, held: ExitStack, instance: str, response_id: str) -> None:
        """Closes `held` when the instance has finished the response. `response_id` is the instance's own."""
        task = asyncio.create_task(self._watch(held, instance, response_id))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def close(self) -> None:
        await cancel(*self._watching)

    async def _watch(self, held: ExitStack, instance: str, response_id: str) -> None:
        num_failures = 0
        with held:
            while num_failures < _MOST_FAILURES:
                await asyncio.sleep(_LOOK_S)
                try:
                    if not await self._backends.has_unfinished(instance, response_id):
                        return
                    num_failures = 0
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
                    num_failures += 1
