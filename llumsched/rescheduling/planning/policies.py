# SPDX-License-Identifier: Apache-2.0
"""Policies of rescheduling, read from YAML: the `rescheduling` section of a policy's file.

    rescheduling:
      infer_type: neutral          # or prefill, decode; any: instances of all types, each type among itself
      failed: [schedulabilityFilter, stalenessFilter: {seconds: 10}]     # which instances count as failed
      sources: [failoverFilter: {domain: instance}]                      # filters of instances that may give
      destinations: [failoverFilter: {domain: instance}]                 # … and take
      selector:
        metricBalanceSelector: {metric: kv_cache_usage_ratio_projected, threshold: 0.7}

Metrics, filters and definitions are those of dispatch. Flags override what the files of built-in policies say. A file
of one's own says everything itself; flags set only its constants, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llumlet.protocol.infer_type import InferType
from llumlet.protocol.move.selection import Order, Unit
from llumsched.extensions import load_values
from llumsched.policy import filters as f
from llumsched.policy.metrics import Metric
from llumsched.policy.parts import Maker, callable_fault, number
from llumsched.policy.pipeline import Filters
from llumsched.policy.reader import PolicyError, Reader, is_own_file, parse_yaml, read_policy
from llumsched.rescheduling.planning.balance import MetricBalancePairs
from llumsched.rescheduling.planning.failover import RoundRobinPairs
from llumsched.rescheduling.planning.moves import Selection, selection_fault
from llumsched.rescheduling.planning.pairs import PairSelector, pair_selector_fault
from llumsched.rescheduling.rescheduling_config import OF_ONE_TYPE, LoadTarget, ReschedulingConfig, Scope

ENTRY_POINTS: Final = "llumnix.pair_selectors"


@dataclass(frozen=True, slots=True)
class ReschedulingPolicy:
    name: str
    failed: Filters
    """Filters whose refusals count as failures, for the group filters that follow."""
    sources: Filters
    destinations: Filters
    selector: PairSelector
    constants: Mapping[str, float] = field(default_factory=dict)
    """Values of its own constants."""


def load_policies(config: ReschedulingConfig) -> tuple[ReschedulingPolicy, ...]:
    """The configured policies. Raises PolicyError with all faults."""
    policies, faults = [], []
    for name in config.policies:
        try:
            policies.append(load_rescheduling_policy(name, config))
        except PolicyError as error:
            faults += error.faults
    if faults:
        raise PolicyError(faults)
    return tuple(policies)


def load_rescheduling_policy(name: str, config: ReschedulingConfig) -> ReschedulingPolicy:
    """A built-in policy by name, or a file by its path, which ends in `.yaml`. Raises PolicyError."""
    written, infer_type = OF_ONE_TYPE.get(name, (name, None))
    document = parse_yaml(read_policy(written, "rescheduling"), name)
    if infer_type is not None:
        document |= {"name": name, "rescheduling": document["rescheduling"] | {"infer_type": infer_type}}
    section = _ReschedulingSection(name, document, config)
    policy = section.policy()
    if policy is None or section.reader.faults:
        raise PolicyError(section.reader.faults)
    return policy


def _metric_balance(
    metric: Metric,
    threshold: Any = 0.0,
    difference: Any = 0.0,
    scope: Any = Scope.CLUSTER,
    rule: Any = "TOKEN",
    order: Any = "SR",
    value: Any = 0,
) -> MetricBalancePairs:
    selection = Selection(Unit(rule), Order(order), number(value))
    if fault := selection_fault(selection):
        raise ValueError(f"value {fault}")
    return MetricBalancePairs(metric, number(threshold), number(difference), Scope(scope), selection)


def _queue_balance(metric: Metric) -> MetricBalancePairs:
    """Moves the first waiting request, one at a time: it queues again at the destination, and several would often have
    to move on."""
    return MetricBalancePairs(metric, selection=Selection(Unit.NUM_REQ, Order.FCW, 1.0))


def _last_come_balance(metric: Metric) -> MetricBalancePairs:
    """Moves the last request of the batch, which its engine would preempt."""
    return MetricBalancePairs(metric, selection=Selection(Unit.NUM_REQ, Order.LCR, 1.0))


def _pack(metric: Metric, limit: Any, *, empties: bool) -> PairSelector:
    from llumsched.rescheduling.planning.packing import PackingPairs  # only where a policy packs

    return PackingPairs(metric, number(limit), empties)


_SELECTORS: Final[Mapping[str, Maker]] = {
    MetricBalancePairs.name: _metric_balance,
    "queueBalanceSelector": _queue_balance,
    "lastComeBalanceSelector": _last_come_balance,
    RoundRobinPairs.name: RoundRobinPairs,
    "binPackingMitigationSelector": functools.partial(_pack, empties=False),
    "binPackingConsolidationSelector": functools.partial(_pack, empties=True),
}
_ANY: Final = "any"


def _is_load(metric: Metric) -> bool:
    return metric.full and metric.less_is_better


class _ReschedulingSection:
    """The section of a document, with overrides."""

    def __init__(self, source: str, document: Any, config: ReschedulingConfig) -> None:
        """`config`: overrides of the file's values; for a user's file, of its constants only."""
        is_own = is_own_file(source)
        self.reader = Reader(source, document, _is_load, "is no load of a status", config.constants(of_own_file=is_own))
        self._config = None if is_own else config
        try:
            self._selectors: dict[str, Maker] = load_values(ENTRY_POINTS, _SELECTORS, callable_fault)
        except ValueError as error:
            raise PolicyError([str(error)]) from error

    def policy(self) -> ReschedulingPolicy | None:
        """The policy; None or invalid if there are faults."""
        reader, where = self.reader, "rescheduling"
        section = reader.document.get(where)
        if not isinstance(section, dict):
            reader.fault("", "has no section 'rescheduling'")
            return None
        reader.only(where, section, {"infer_type", "failed", "sources", "destinations", "selector"})
        wanted = section.get("infer_type", InferType.NEUTRAL)
        if wanted not in (*InferType, _ANY):
            reader.fault(where, f"infer_type {wanted!r} is none of {', '.join((*InferType, _ANY))}")
            return None
        failed, sources, destinations = (
            reader.listed_filters(f"{where}.{part}", section.get(part, []), self._changed)
            for part in ("failed", "sources", "destinations")
        )
        selector = self._selector(where, wanted, section.get("selector"))
        if selector is None:
            return None
        of_type = [] if wanted == _ANY else [f.InferTypeFilter(InferType(wanted))]
        gives, takes = (Filters.of([*of_type, *filters]) for filters in (sources, destinations))
        return ReschedulingPolicy(reader.name, Filters.of(failed), gives, takes, selector, reader.constants)

    def _changed(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        if self._config is None:
            return settings
        said = {"seconds": self._config.staleness_s, "domain": self._config.failover_domain}
        return settings | {key: value for key, value in said.items() if key in settings}

    def _selector(self, where: str, infer_type: str, entry: Any) -> PairSelector | None:
        reader = self.reader
        name, settings = reader.entry(where, entry)
        is_of_load = name == MetricBalancePairs.name and settings.get("metric") == LoadTarget().metric
        if self._config is not None and is_of_load:
            settings = _balance_of_config(infer_type, self._config)
        if not reader.resolved(where, settings):
            return None
        made: PairSelector | None = reader.make(where, "selector", name, self._selectors, settings, pair_selector_fault)
        return made


def _balance_of_config(infer_type: str, config: ReschedulingConfig) -> dict[str, Any]:
    target, selection = config.target(infer_type), config.selection
    return {
        "metric": target.metric,
        "threshold": target.threshold,
        "difference": config.balance_threshold,
        "scope": config.scope,
        "rule": selection.unit,
        "order": selection.order,
        "value": selection.value,
    }
