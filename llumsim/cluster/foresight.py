# SPDX-License-Identifier: Apache-2.0
"""How far the scheduler's view is from the truth, as it was reported and as it is moved on.

Now and then, whatever is decided meanwhile, each row of the table is compared with a status that is made for the
occasion. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llumlet.contract.types import InstanceStatus
from llumsched.cluster.table import Table
from llumsched.foresight.moved_on import Forward
from llumsim import PS
from llumsim.clock import VirtualLoop

_KV, _BATCH = "num_used_gpu_tokens", "scheduler_running_to_decode_requests_num"


@dataclass(frozen=True, slots=True)
class Miss:
    """One instance at one moment: what was said less what was true."""

    reported_kv: float
    """Share of the KV cache."""
    moved_kv: float
    reported_batch: float
    """Requests that run and have tokens to decode."""
    moved_batch: float
    age_s: float
    """Of the status."""
    num_gone: int
    """Requests that have ended since."""


class Foresight:
    def __init__(
        self, loop: VirtualLoop, every_s: float, table: Table, statuses: Callable[[], Iterable[InstanceStatus]]
    ) -> None:
        """`statuses`: of all instances, now."""
        self.misses: list[Miss] = []
        self._loop = loop
        self._every_ps = round(every_s * PS)
        self._table = table
        self._statuses = statuses
        loop.at(loop.now_ps + self._every_ps, self._look)

    def _look(self, now_ps: int) -> None:
        now_s, table = self._loop.time(), self._table
        forward = Forward(table, now_s)
        for true in self._statuses():
            row = table.index.get(true.instance_id)
            status = None if row is None else table.instances[row].status
            if row is None or status is None:
                continue
            kv, batch = true.num_used_gpu_tokens, true.scheduler_running_to_decode_requests_num
            self.misses.append(
                Miss(
                    (float(table[_KV][row]) - kv) / true.num_total_gpu_tokens,
                    (float(forward[_KV][row]) - kv) / true.num_total_gpu_tokens,
                    float(table[_BATCH][row]) - batch,
                    float(forward[_BATCH][row]) - batch,
                    now_s - table.instances[row].as_of_s,
                    true.num_gone - status.num_gone,
                )
            )
        self._loop.at(now_ps + self._every_ps, self._look)
