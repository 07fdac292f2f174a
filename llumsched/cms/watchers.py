# SPDX-License-Identifier: Apache-2.0
"""The backlog of one watcher of an embedded CMS: the newest state of each instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Self

from llumlet.contract.types import InstanceState, ViewChange
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.cms.intake import MAX_INSTANCES

BEAT_S: Final = 1.0
"""Time without news after which a watcher gets `complete` again."""
_MAX_PENDING: Final = 2 * MAX_INSTANCES


class ViewWatcher:
    """An `Observer` inside `async with`. Holds at most an entry per id that is known or has left."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._pending: dict[str, None] = {}
        """Ids in the order of their first unsent change."""
        self._complete_due = True
        self._news = asyncio.Event()
        self._stop: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        self._stop = self._view.observe(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()

    def appeared(self, instance: Instance) -> None:
        self._note(instance)

    def changed(self, instance: Instance) -> None:
        self._note(instance)

    def left(self, instance: Instance) -> None:
        self._note(instance)

    async def next(self) -> ViewChange:
        """The next change. Raises OverflowError for a watcher that is hopelessly behind."""
        if not self._pending and not self._complete_due:
            self._news.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._news.wait()
            except TimeoutError:
                return ViewChange(complete=True)
        if len(self._pending) > _MAX_PENDING:
            raise OverflowError(f"more than {_MAX_PENDING} changes have not been read")
        if not self._pending:
            self._complete_due = False
            return ViewChange(complete=True)
        instance_id = next(iter(self._pending))
        del self._pending[instance_id]
        instance = self._view.get(instance_id)
        if instance is None:
            return ViewChange(left=instance_id, fell_silent=instance_id in self._view.lost)
        return ViewChange(instance=_state(instance))

    def _note(self, instance: Instance) -> None:
        # More would be for nothing: `next` ends the watch.
        if len(self._pending) <= _MAX_PENDING:
            self._pending[instance.id] = None
        self._news.set()


def _state(instance: Instance) -> InstanceState:
    return InstanceState(
        metadata=instance.metadata, status=instance.status, age_s=max(0.0, instance.age_s(time.monotonic()))
    )
