# SPDX-License-Identifier: Apache-2.0
"""The end of tasks that call libraries."""

from __future__ import annotations

import asyncio
from typing import Any, Final

_AGAIN_S: Final = 0.2


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` until they are done; what they raised is dropped. Once is not always enough: a client library may
    take the cancellation for an error of its connection, and its caller would go on."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
