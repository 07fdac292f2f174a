# SPDX-License-Identifier: Apache-2.0
"""Everything that can be set of the rescheduler. What contradicts itself: `arguments`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.kinds import Kind
from llumlet.process.settings import Group, field_of
from llumlet.protocol.infer_type import InferType
from llumlet.protocol.selection import Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.policy.constants import FLAG, POLICY_CONSTANTS, Constants
from llumsched.policy.metrics import BUILT_IN_CONSTANTS, metric_fault
from llumsched.rescheduling.moves import AS_NEEDED, Selection

USUAL: Final = (
    "decode_load",
    "neutral_waiting",
    "neutral_load",
    "prefill_failover",
    "decode_failover",
    "neutral_failover",
)
"""Policies that run unless others are named."""
OF_ONE_TYPE: Final[Mapping[str, tuple[str, InferType]]] = {
    "decode_load": ("load", InferType.DECODE),
    "neutral_load": ("load", InferType.NEUTRAL),
    **{f"{infer_type}_failover": ("failover", infer_type) for infer_type in InferType},
}
"""Llumnix's names for a policy on the instances of one infer type."""
POLICIES: Final = (
    *USUAL,
    "load",
    "failover",
    "neutral_preemption",
    "neutral_ttft",
    "neutral_tpot",
    "binpacking_mitigation",
    "binpacking_consolidation",
)
OBJECTIVES: Final = (
    "ttft_slo",
    "tpot_slo",
    "ttft_slo_dispatch_threshold",
    "tpot_slo_dispatch_threshold",
    "tpot_migrate_out_ceil_threshold",
    "tpot_migrate_out_floor_threshold",
)
"""Settings that are constants of policies, by these names."""
SHORTEST_AS_NEEDED: Final = Selection(Unit.TOKEN, Order.SR, AS_NEEDED)


class Scope(enum.StrEnum):
    CLUSTER = "cluster"
    UNIT = "unit"
    """Balances among the instances of one unit; thresholds do not apply."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """How load is measured on instances of one infer type, and from where on it is too much."""

    metric: str = "kv_cache_usage_ratio_projected"
    threshold: float = 0.0
    """Load that sources are at or above, and destinations below. 0: everybody may be either."""


_DESCRIPTION: Final = """Moves running requests from hot instances to cold ones and away from sick ones.
Example: only decode instances, sources from 70 % of the KV cache on:
  --rescheduling-policies=decode_load --rescheduling-decode-load-threshold=0.7
Example: everything away from a node with a sick instance:
  --rescheduling-policies=prefill_failover,decode_failover,neutral_failover
  --failover-domain=node --instance-staleness-seconds=100"""

DOMAIN: Final = kinds.one_of(FailoverDomain)
STALENESS: Final = kinds.seconds(above=0)
MILLISECONDS: Final = kinds.number("MS", above=0)
SHARE: Final = kinds.number("SHARE", above=0)
HEADROOM: Final = kinds.number("SHARE", at_least=0, at_most=1)
HEADROOM_HELP: Final = (
    "of the KV cache of an instance, to stay free beside urgent requests, for dispatch and rescheduling alike "
    f"(default {BUILT_IN_CONSTANTS['priority_headroom']:g})"
)

rescheduling = Group("rescheduling", _DESCRIPTION, "--rescheduling-")
_failover = Group("failover")
_objectives = Group("objectives")


def _metric(name: str) -> str:
    if fault := metric_fault(name):
        raise ValueError(fault)
    return name


def _target(infer_type: str) -> LoadTarget:
    return field_of(
        LoadTarget(),
        metric=rescheduling.part(
            Kind(_metric, "METRIC"),
            f"how the load of {infer_type} instances is measured",
            flag=f"--rescheduling-{infer_type}-load-metric",
        ),
        threshold=rescheduling.part(
            kinds.number("LOAD"),
            "sources are at or above it, destinations below; 0: everybody may be either",
            flag=f"--rescheduling-{infer_type}-load-threshold",
        ),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a rescheduler. All times in seconds unless the name says otherwise."""

    policies: tuple[str, ...] = rescheduling.setting(
        USUAL,
        kinds.several(kinds.one_of(POLICIES, or_file=".yaml"), "NAMES"),
        "what it looks at: loads to even out, failures to get away from; or paths of .yaml files",
    )
    interval_ms: float = rescheduling.setting(
        500.0,
        kinds.number(at_least=0),
        "at most so long between two passes; a change of load or the end of a move wakes it earlier; 0: no passes",
    )
    debounce_ms: float = rescheduling.setting(
        20.0, kinds.number(at_least=0), "after a change of load, and at least so long between two passes"
    )

    decode: LoadTarget = _target("decode")
    neutral: LoadTarget = _target("neutral")
    balance_threshold: float = rescheduling.setting(
        0.0,
        kinds.number(at_least=0),
        "least difference of load between source and destination, in the unit of the metric",
        flag="--rescheduling-load-balance-threshold",
    )
    scope: Scope = rescheduling.setting(
        Scope.CLUSTER,
        kinds.one_of(Scope),
        "among which instances; thresholds apply to the cluster",
        flag="--rescheduling-load-balance-scope",
    )
    selection: Selection = field_of(
        SHORTEST_AS_NEEDED,
        unit=rescheduling.part(kinds.one_of(Unit), "what the value counts", flag="--rescheduling-req-select-rule"),
        order=rescheduling.part(kinds.one_of(Order), "which requests first", flag="--rescheduling-req-select-order"),
        value=rescheduling.part(
            kinds.number(),
            "requests, tokens, or share of the KV cache; 0: as much as evens the pair out",
            flag="--rescheduling-req-select-value",
        ),
    )
    priority_headroom: float | None = rescheduling.setting(None, HEADROOM, HEADROOM_HELP, flag="--priority-headroom")

    ttft_slo: float | None = _objectives.setting(
        None, MILLISECONDS, "waiting requests leave where they would wait longer (default: the policy's, 6000)"
    )
    tpot_slo: float | None = _objectives.setting(
        None, MILLISECONDS, "running requests leave where they would be slower (default: the policy's, 50)"
    )
    ttft_slo_dispatch_threshold: float | None = _objectives.setting(
        None, SHARE, "of --ttft-slo, up to which an instance is in time (default: the policy's, 0.85)"
    )
    tpot_slo_dispatch_threshold: float | None = _objectives.setting(
        None, SHARE, "of --tpot-slo, up to which an instance takes running requests (default: the policy's, 0.85)"
    )
    tpot_migrate_out_ceil_threshold: float | None = _objectives.setting(
        None, SHARE, "of --tpot-slo, from which on they do (default: the policy's, 0.95)"
    )
    tpot_migrate_out_floor_threshold: float | None = _objectives.setting(
        None, SHARE, "of --tpot-slo, below which an instance is emptied into fuller ones (default: the policy's, 0.6)"
    )

    horizon_s: float = rescheduling.setting(
        10.0,
        kinds.seconds(above=0),
        "how long a better balance counts when it is weighed against a move's cost; more means more moves",
    )
    link_bytes_per_s: float = rescheduling.setting(
        1e9,
        kinds.number(above=0),
        "what the links carry, until moves have shown it",
        flag="--rescheduling-link-bytes-per-second",
    )
    max_moves_per_pass: int = rescheduling.setting(
        32, kinds.integer(at_least=1), "pairs of instances that one pass may choose"
    )
    request_cooldown_s: float = rescheduling.setting(
        10.0, kinds.seconds(), "how long a request that was moved to balance load stays where it is"
    )
    pair_cooldown_s: float = rescheduling.setting(
        10.0, kinds.seconds(), "how long nothing goes back between two instances; forwards it is one interval"
    )
    avoid_s: float = rescheduling.setting(
        10.0,
        kinds.seconds(),
        "how long a destination that refused or failed is left alone; twice as long each time in a row",
    )
    connection_pool_size: int = rescheduling.setting(
        10,
        kinds.integer(at_least=1),
        "moves that one source is asked for at a time",
        flag="--llumlet-grpc-connection-pool-size",
    )
    grpc_timeout_s: float = rescheduling.setting(
        5.0, kinds.seconds(above=0), "longest silence of a source during a call", flag="--llumlet-grpc-timeout-seconds"
    )

    forward_status: bool = rescheduling.setting(
        False,
        kinds.SWITCH,
        "move statuses on to the time of the pass, by what is known of each instance's steps",
        flag="--forward-status",
    )

    failover_domain: FailoverDomain = _failover.setting(
        FailoverDomain.INSTANCE, DOMAIN, "what fails with an instance", flag="--failover-domain"
    )
    staleness_s: float = _failover.setting(
        10.0,
        STALENESS,
        "an instance whose last status is older is sick; from 10 s on, it is also taken for gone then",
        flag="--instance-staleness-seconds",
    )

    policy_constants: Constants = rescheduling.setting(
        (),
        POLICY_CONSTANTS,
        "values of constants that policies define, built-in ones and files (repeatable)",
        flag=FLAG,
    )

    @property
    def objectives(self) -> dict[str, float]:
        """What is said of objectives, by the names of policies' constants."""
        return {name: value for name in OBJECTIVES if (value := getattr(self, name)) is not None}

    @property
    def built_in_constants(self) -> dict[str, float]:
        """What is said of those by flags of their own."""
        return {name: value for name in BUILT_IN_CONSTANTS if (value := getattr(self, name)) is not None}

    def constants(self, *, of_own_file: bool) -> dict[str, float]:
        """Values for the constants of a policy. A file of one's own is changed by what is said of a constant, and not
        by the flags of objectives."""
        said = self.built_in_constants | dict(self.policy_constants)
        return said if of_own_file else self.objectives | said

    def target(self, infer_type: str) -> LoadTarget:
        return self.decode if infer_type == InferType.DECODE else self.neutral
