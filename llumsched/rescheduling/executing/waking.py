# SPDX-License-Identifier: Apache-2.0
"""Wakes the rescheduler before its interval ends: when an instance appears, leaves or fails, its load changes much, it
is about to preempt, or a move ends."""

from __future__ import annotations

import asyncio
from typing import Final

from llumlet.contract.types import InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.rescheduling.executing.history import History

MUCH: Final = 0.05
"""Change of an instance's KV cache use, as a share, that wakes the rescheduler again."""


class Waking:
    """Wakes the rescheduler. Observes the view with one comparison per change."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._known: dict[str, InstanceStatus] = {}
        """Status with which each instance last woke the rescheduler."""
        self._lacking: set[str] = set()
        """Instances that lack blocks; each wakes once per shortage."""
        self._event = asyncio.Event()
        self._why = ""

    def wake(self, why: str) -> None:
        if not self._event.is_set():
            self._why = why
            self._event.set()

    async def wait(self, seconds: float) -> str:
        """Waits for an event or `seconds`; returns the cause."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return "interval"
        self._event.clear()
        return self._why

    def appeared(self, instance: Instance) -> None:
        self._history.instance_left(instance.id)
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        status = instance.status
        if status is None:
            return
        known, lacked = self._known.get(instance.id), instance.id in self._lacking
        if status.num_lacking_blocks:
            self._lacking.add(instance.id)
        else:
            self._lacking.discard(instance.id)
        if known is None or _differs(known, status):
            self._known[instance.id] = status
            self.wake("load")
        elif status.num_lacking_blocks and not lacked:
            self.wake("shortage")

    def left(self, instance: Instance) -> None:
        self._known.pop(instance.id, None)
        self._lacking.discard(instance.id)
        self._history.instance_left(instance.id)
        self.wake("load")


def _differs(old: InstanceStatus, new: InstanceStatus) -> bool:
    if old.schedulable != new.schedulable or old.health != new.health:
        return True
    return abs(_tokens(new) - _tokens(old)) > MUCH * new.num_total_gpu_tokens


def _tokens(status: InstanceStatus) -> int:
    return status.num_used_gpu_tokens + status.num_unallocated_tokens_all_waiting_requests
