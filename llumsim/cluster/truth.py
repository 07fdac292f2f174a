# SPDX-License-Identifier: Apache-2.0
"""The scheduler's decisions and its view, compared with the truth that only a simulation knows.

`Hindsight` decides every dispatch again with statuses of that very moment. `Foresight` compares, at intervals, the
scheduler's view with the instances. Neither changes the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.account import Account
from llumsched.cluster.table import Table
from llumsched.cluster.view import View
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.foresight.moved_on import Forward
from llumsched.policy.document import Policy
from llumsched.policy.metrics import METRICS
from llumsched.request import Request
from llumsim import PS
from llumsim.clock import VirtualLoop

_PREFILLS: Final = METRICS["all_prefills_tokens_num"]
_MEMORY: Final = METRICS["kv_cache_usage_ratio_projected"]


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of a decision: how much worse the chosen instance was than the one chosen with hindsight. A negative
    value favours the chosen one by a measure that the policy ranks lower."""

    is_misled: bool
    """True if hindsight chooses another instance."""
    prefill_tokens: float
    """Prompt tokens still to be computed before the new request's."""
    memory: float
    """Share of the KV cache in use, including the demand of waiting requests."""


class Hindsight:
    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        account_staleness_s: float,
        statuses: Callable[[], Iterable[InstanceStatus]],
    ) -> None:
        """`statuses` makes a status of every instance, now."""
        self.regrets: list[Regret] = []
        self._statuses = statuses
        self._view = View(clock, wall_clock=clock)
        self._account = Account(clock, account_staleness_s)
        self._dispatcher = Dispatcher(self._view, policy, self._account, clock, random.Random(0))

    def appeared(self, metadata: InstanceMetadata) -> None:
        self._view.put_metadata(metadata)

    def left(self, instance_id: str) -> None:
        self._view.remove(instance_id)

    def placed(self, request: Request, tried: frozenset[str], instance_id: str) -> None:
        """Judge the scheduler's decision to send `request` to this instance; `tried` have failed it before."""
        for status in self._statuses():
            self._view.put_status(status)
        (decision,) = self._dispatcher.decide(request, tried=tried).values()
        table = self._dispatcher.table
        chosen = table.index[instance_id]
        best = chosen if decision.row is None else decision.row
        self.regrets.append(
            Regret(
                best != chosen,
                _PREFILLS.at(table, chosen) - _PREFILLS.at(table, best),
                _MEMORY.at(table, chosen) - _MEMORY.at(table, best),
            )
        )
        self._account.dispatched(request.id, instance_id, InferType.NEUTRAL, request.prompt_num_tokens)

    def released(self, request_id: str, instance_ids: Collection[str]) -> None:
        """Take back a request that did not get there."""
        self._account.released(request_id, instance_ids)


_KV, _BATCH = "num_used_gpu_tokens", "scheduler_running_to_decode_requests_num"


@dataclass(frozen=True, slots=True)
class Miss:
    """The error of the view of an instance: reported value minus true value."""

    reported_kv: float
    """Share of the KV cache."""
    moved_kv: float
    reported_batch: float
    """Requests that run and have tokens to decode."""
    moved_batch: float
    age_s: float
    """Age of the status."""
    num_gone: int
    """Requests ended since the status."""


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
