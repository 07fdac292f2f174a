# SPDX-License-Identifier: Apache-2.0
"""Several things awaited at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from llumlet.process.tasks import cancel


async def race(*works: Coroutine[Any, Any, object]) -> None:
    """Awaits the first that returns or raises, and does the same. The others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(*tasks)


async def together(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Awaits all, or the first that raises; the others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
