# SPDX-License-Identifier: Apache-2.0
"""What dispatch would have chosen, had it seen every instance as it was at that moment.

A second dispatcher with the same policy is told of now: a status of each instance, made for the occasion, and what is
on its way to it. Before the first one's choice is on that way as well, it decides, too. It changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.document import Policy
from llumsched.policy.metrics import METRICS
from llumsched.request import Request

_PREFILLS: Final = METRICS["all_prefills_tokens_num"]
_MEMORY: Final = METRICS["kv_cache_usage_ratio_projected"]


@dataclass(frozen=True, slots=True)
class Regret:
    """One decision: by how much the chosen instance was worse than the one that would have been; negative where it was
    better, by a measure that the policy does not go by first."""

    is_misled: bool
    """Another one would have been."""
    prefill_tokens: float
    """Of prompts that are still to be computed, before the new one."""
    memory: float
    """Share of the KV cache that is in use, or will be for what waits."""


class Hindsight:
    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        account_staleness_s: float,
        statuses: Callable[[], Iterable[InstanceStatus]],
    ) -> None:
        """`statuses`: of all instances, now."""
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
        """Judges the decision of another, by which `request` goes to this instance; `tried` have failed it before."""
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
        """Takes back a request that did not get there."""
        self._account.released(request_id, instance_ids)
