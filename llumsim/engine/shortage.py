# SPDX-License-Identifier: Apache-2.0
"""Blocks that a step of the modelled engine lacks: production's decision whether to wait for a move, on its clock."""

from __future__ import annotations

from collections.abc import Callable

from llumlet.protocol.move.shortage import Shortages
from llumsim import PS


class Shortage:
    def __init__(self) -> None:
        self.asks = False
        """Somebody reads statuses, and may have a request moved."""
        self.gives_blocks: Callable[[], bool] = lambda: False
        """Whether a move will give blocks back."""
        self.num_blocks = 0
        """Blocks that the step under way lacked."""
        self.has_held = False
        """Somebody was left out of the step for it."""
        self._shortages = Shortages()

    @property
    def num_averted(self) -> int:
        return self._shortages.num_averted

    def begin(self) -> None:
        """A step is to be made."""
        self.num_blocks, self.has_held = 0, False

    def waits(self, num_blocks: int, num_preemptions: int, now_ps: int) -> bool:
        """Whether a request that lacks so many blocks is left out of the step, or somebody is preempted."""
        self.num_blocks += num_blocks
        moving = self.gives_blocks()
        waits = self._shortages.waits(now_ps / PS, num_preemptions, moving=moving, asks=self.asks)
        self.has_held |= waits
        return waits

    def scheduled(self, num_preemptions: int) -> None:
        """A step has been made."""
        if not self.num_blocks:
            self._shortages.over(num_preemptions)
