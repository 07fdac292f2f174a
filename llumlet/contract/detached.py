# SPDX-License-Identifier: Apache-2.0
"""Calls that outlive their callers.

A move must not stop because its caller has left, and a Commit must not be cut because the source's deadline passed. So
the agent's part of a call is a task of its own, for which the RPC handler only waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from llumlet.contract.errors import LlumletError
from llumlet.process.tasks import cancel

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DetachedCalls:
    """The agent's calls in progress, those without a caller included."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call, name=f"llumlet {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settled(self, task: asyncio.Task[Any]) -> None:
        """Wait until `task` is done, however it ends. Being cancelled here leaves it running."""
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                self.abandon(task)

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Leaves `task` without a caller: its failure is only logged."""
        logger.info("the caller of %s left; the call goes on", task.get_name())
        task.add_done_callback(_log_failure)

    async def stop(self, grace_s: float) -> None:
        """Give the calls `grace_s` seconds to end, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await cancel(*self._tasks)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    match task.exception():
        case None:
            pass
        case LlumletError() as refusal:
            logger.info("%s, whose caller had left, was refused: %s", task.get_name(), refusal)
        case error:
            logger.error("%s, whose caller had left, failed", task.get_name(), exc_info=error)
