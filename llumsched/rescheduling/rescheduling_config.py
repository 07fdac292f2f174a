# SPDX-License-Identifier: Apache-2.0
"""The settings of the rescheduler. `arguments` checks them for contradictions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.kinds import Kind
from llumlet.process.settings import Group, field_of
from llumlet.protocol.infer_type import InferType
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.policy.constants import FLAG, POLICY_CONSTANTS, Constants
from llumsched.policy.metrics import BUILT_IN_CONSTANTS, metric_fault
from llumsched.rescheduling.planning.moves import AS_NEEDED, Selection

USUAL: Final = (
    "decode_load",
    "neutral_waiting",
    "neutral_load",
    "prefill_failover",
    "decode_failover",
    "neutral_failover",
)
"""The default policies."""
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
"""Settings that override policies' constants of the same names."""
SHORTEST_AS_NEEDED: Final = Selection(Unit.TOKEN, Order.SR, AS_NEEDED)


class Scope(enum.StrEnum):
    CLUSTER = "cluster"
    UNIT = "unit"
    """Balances among the instances of one unit; thresholds do not apply."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The metric of the load on instances of one infer type, and the load that is too much."""

    metric: str = "kv_cache_usage_ratio_projected"
    threshold: float = 0.0
    """Sources have at least this load, destinations less; 0 sets no limit."""


_DESCRIPTION: Final = """Moves running requests from hot instances to cold ones and away from failed ones.
Example: balance only decode instances, from 70 % of the KV cache on:
  --rescheduling-policies=decode_load --rescheduling-decode-load-threshold=0.7
Example: move everything away from a node with a failed instance:
  --rescheduling-policies=prefill_failover,decode_failover,neutral_failover
  --failover-domain=node --instance-staleness-seconds=100"""

DOMAIN: Final = kinds.one_of(FailoverDomain)
STALENESS: Final = kinds.seconds(above=0)
MILLISECONDS: Final = kinds.number("MS", above=0)
SHARE: Final = kinds.number("SHARE", above=0)
HEADROOM: Final = kinds.number("SHARE", at_least=0, at_most=1)
HEADROOM_HELP: Final = (
    "share of an instance's KV cache to keep free beside urgent requests, in dispatch and rescheduling "
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
            f"metric of the load of {infer_type} instances",
            flag=f"--rescheduling-{infer_type}-load-metric",
        ),
        threshold=rescheduling.part(
            kinds.number("LOAD"),
            f"load of {infer_type} instances from which on requests leave, and below which they may arrive; 0 sets no "
            "limit",
            flag=f"--rescheduling-{infer_type}-load-threshold",
        ),
    )


@dataclass(frozen=True, slots=True)
class ReschedulingConfig:
    """The settings of a rescheduler. All times in seconds unless the name says otherwise."""

    policies: tuple[str, ...] = rescheduling.setting(
        USUAL,
        kinds.several(kinds.one_of(POLICIES, or_file=".yaml"), "NAMES"),
        "rescheduling policies to run, by name or as paths of .yaml files",
        common=True,
    )
    interval_ms: float = rescheduling.setting(
        500.0,
        kinds.number(at_least=0),
        "longest time between two passes, in milliseconds (load changes and finished moves start one earlier); 0 "
        "disables rescheduling",
    )
    debounce_ms: float = rescheduling.setting(
        20.0,
        kinds.number(at_least=0),
        "time from a load change to its pass, and shortest time between two passes, in milliseconds",
    )

    decode: LoadTarget = _target("decode")
    neutral: LoadTarget = _target("neutral")
    balance_threshold: float = rescheduling.setting(
        0.0,
        kinds.number(at_least=0),
        "smallest difference of load between source and destination, in the unit of the metric; 0 sets no limit",
        flag="--rescheduling-load-balance-threshold",
    )
    scope: Scope = rescheduling.setting(
        Scope.CLUSTER,
        kinds.one_of(Scope),
        "balance load within the whole cluster or within each unit; thresholds apply to the cluster",
        flag="--rescheduling-load-balance-scope",
    )
    selection: Selection = field_of(
        SHORTEST_AS_NEEDED,
        unit=rescheduling.part(
            kinds.one_of(Unit),
            "unit of --rescheduling-req-select-value: requests, tokens, or share of the KV cache",
            flag="--rescheduling-req-select-rule",
        ),
        order=rescheduling.part(
            kinds.one_of(Order),
            "order in which requests are chosen (`llumnix migrate --help` explains the names)",
            flag="--rescheduling-req-select-order",
        ),
        value=rescheduling.part(
            kinds.number(),
            "amount that a move takes, in the unit of --rescheduling-req-select-rule; 0 balances the pair",
            flag="--rescheduling-req-select-value",
        ),
    )
    priority_headroom: float | None = rescheduling.setting(None, HEADROOM, HEADROOM_HELP, flag="--priority-headroom")

    ttft_slo: float | None = _objectives.setting(
        None,
        MILLISECONDS,
        "objective for the time to first token, in milliseconds: waiting requests leave instances that would miss it "
        "(default: the policy's, 6000)",
    )
    tpot_slo: float | None = _objectives.setting(
        None,
        MILLISECONDS,
        "objective for the time between two tokens, in milliseconds: running requests leave instances that miss it "
        "(default: the policy's, 50)",
    )
    ttft_slo_dispatch_threshold: float | None = _objectives.setting(
        None,
        SHARE,
        "share of --ttft-slo up to which an instance may receive waiting requests (default: the policy's, 0.85)",
    )
    tpot_slo_dispatch_threshold: float | None = _objectives.setting(
        None,
        SHARE,
        "share of --tpot-slo up to which an instance may receive running requests (default: the policy's, 0.85)",
    )
    tpot_migrate_out_ceil_threshold: float | None = _objectives.setting(
        None,
        SHARE,
        "share of --tpot-slo from which on running requests leave an instance (default: the policy's, 0.95)",
    )
    tpot_migrate_out_floor_threshold: float | None = _objectives.setting(
        None,
        SHARE,
        "share of --tpot-slo below which an instance is emptied into fuller ones (default: the policy's, 0.6)",
    )

    horizon_s: float = rescheduling.setting(
        10.0,
        kinds.seconds(above=0),
        "time for which a better balance counts when it is weighed against the cost of a move, in seconds; more time "
        "means more moves",
    )
    link_bytes_per_s: float = rescheduling.setting(
        1e9,
        kinds.number(above=0),
        "assumed speed of the links, in bytes per second, until moves have measured it",
        flag="--rescheduling-link-bytes-per-second",
    )
    max_moves_per_pass: int = rescheduling.setting(
        32, kinds.integer(at_least=1), "largest number of pairs of instances that one pass may choose"
    )
    request_cooldown_s: float = rescheduling.setting(
        10.0, kinds.seconds(), "time for which a request stays where it is after a move for balance, in seconds"
    )
    pair_cooldown_s: float = rescheduling.setting(
        10.0,
        kinds.seconds(),
        "time after a move before a request may move back between the same two instances, in seconds; the same "
        "direction waits one interval",
    )
    avoid_s: float = rescheduling.setting(
        10.0,
        kinds.seconds(),
        "time for which a destination that refused or failed is avoided, in seconds; doubles with each failure in a "
        "row",
    )
    connection_pool_size: int = rescheduling.setting(
        10,
        kinds.integer(at_least=1),
        "largest number of moves that one source is asked for at a time",
        flag="--llumlet-grpc-connection-pool-size",
    )
    grpc_timeout_s: float = rescheduling.setting(
        5.0,
        kinds.seconds(above=0),
        "longest silence of a source during a call, in seconds; then the call fails",
        flag="--llumlet-grpc-timeout-seconds",
    )

    forward_status: bool = rescheduling.setting(
        False,
        kinds.SWITCH,
        "plan on an estimate of the present state, made from the last status and the step times of each instance",
        flag="--forward-status",
    )

    failover_domain: FailoverDomain = _failover.setting(
        FailoverDomain.INSTANCE,
        DOMAIN,
        "instances that are assumed to fail together",
        flag="--failover-domain",
        common=True,
    )
    staleness_s: float = _failover.setting(
        10.0,
        STALENESS,
        "treat an instance as failed when its last status is older than this many seconds; from 10 s up, that is also "
        "when it counts as gone",
        flag="--instance-staleness-seconds",
        common=True,
    )

    policy_constants: Constants = rescheduling.setting(
        (), POLICY_CONSTANTS, "values for constants of the policies, built in or from files (repeatable)", flag=FLAG
    )

    @property
    def objectives(self) -> dict[str, float]:
        """Given objectives, by the names of policies' constants."""
        return {name: value for name in OBJECTIVES if (value := getattr(self, name)) is not None}

    @property
    def built_in_constants(self) -> dict[str, float]:
        """Given built-in constants, by name."""
        return {name: value for name in BUILT_IN_CONSTANTS if (value := getattr(self, name)) is not None}

    def constants(self, *, of_own_file: bool) -> dict[str, float]:
        """Overrides for the constants of a policy. The flags of objectives do not apply to a user's file."""
        said = self.built_in_constants | dict(self.policy_constants)
        return said if of_own_file else self.objectives | said

    def target(self, infer_type: str) -> LoadTarget:
        return self.decode if infer_type == InferType.DECODE else self.neutral
