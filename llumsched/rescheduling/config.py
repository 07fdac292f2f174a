# SPDX-License-Identifier: Apache-2.0
"""What the rescheduler is told. Parsed once by `arguments.config`; the defaults are written here and nowhere else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from llumlet.protocol.selection import Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.rescheduling.moves import AS_NEEDED, Selection

POLICIES: Final = ("decode_load", "neutral_load", "prefill_failover", "decode_failover", "neutral_failover")
SHORTEST_AS_NEEDED: Final = Selection(Unit.TOKEN, Order.SR, AS_NEEDED)


class Scope(enum.StrEnum):
    CLUSTER = "cluster"
    UNIT = "unit"
    """Among the instances of one unit; thresholds do not apply."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """How load is measured on instances of one infer type, and from where on it is too much."""

    metric: str = "kv_cache_usage_ratio_projected"
    threshold: float = 0.0
    """Sources are at or above it, destinations below. 0: everybody may be either."""


@dataclass(frozen=True, slots=True)
class Config:
    """All times in seconds unless the name says otherwise."""

    policies: tuple[str, ...] = POLICIES
    interval_ms: float = 500.0
    """At most this long between two passes; 0: no passes at all."""
    debounce_ms: float = 20.0
    """After a change of load, and at least this long between two passes."""

    decode: LoadTarget = LoadTarget()
    neutral: LoadTarget = LoadTarget()
    prefill: LoadTarget = LoadTarget()
    """Shown in the records; no policy balances it."""
    balance_threshold: float = 0.0
    """Least difference of load between the ends of a move, in the unit of the metric."""
    scope: Scope = Scope.CLUSTER
    selection: Selection = SHORTEST_AS_NEEDED

    horizon_s: float = 2.0
    """For how long a better balance counts when it is weighed against the cost of a move."""
    link_bytes_per_s: float = 1e9
    """Until moves have shown what the links carry."""
    max_moves_per_pass: int = 32
    request_cooldown_s: float = 10.0
    """A request that was moved to balance load stays where it is for this long."""
    pair_cooldown_s: float = 10.0
    """Nothing goes back for this long; forwards, for one interval."""
    avoid_s: float = 10.0
    """How long a destination that refused or failed is left alone; twice as long each time it does so again."""

    failover_domain: FailoverDomain = FailoverDomain.INSTANCE
    staleness_s: float = 60.0
    connection_pool_size: int = 10
    """Moves that one source is asked for at a time."""
    grpc_timeout_s: float = 5.0
    """Without a sign of life from the source during a call."""

    def target(self, infer_type: str) -> LoadTarget:
        return {"decode": self.decode, "prefill": self.prefill}.get(infer_type, self.neutral)
