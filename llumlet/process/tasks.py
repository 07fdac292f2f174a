# SPDX-License-Identifier: Apache-2.0
"""Tasks that survive exceptions, background tasks, the end of tasks, and calls from other threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn

logger = logging.getLogger(__name__)
_AGAIN_S: Final = 0.2
_RESTART_S: Final = 1.0


async def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> NoReturn:
    """Calls `run` repeatedly until it is cancelled, so that an unforeseen exception does not end it."""
    while True:
        try:
            await run()
            logger.error("%s has ended; it is begun again", name)
        except Exception:
            logger.exception("%s has failed; it is begun again", name)
        await asyncio.sleep(_RESTART_S)


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Call `function` soon on `loop`, or never if that is closed, as another thread may do at any moment. Any thread;
    never blocks."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks`, and wait until they have ended, which may take them a while; what they raised is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels `tasks` repeatedly until they end: a client library may mistake a cancellation for an error of its
    connection."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


class Tasks:
    """Background coroutines, which are held here as asyncio might collect unreferenced tasks."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
