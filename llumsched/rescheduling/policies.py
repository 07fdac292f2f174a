# SPDX-License-Identifier: Apache-2.0
"""Policies of rescheduling, read from YAML: the `rescheduling` section of a policy's file.

    rescheduling:
      infer_type: neutral          # or prefill, decode; any: instances of all types, each type among itself
      failed: [schedulabilityFilter, stalenessFilter: {seconds: 10}]     # who counts as failed
      sources: [failoverFilter: {domain: instance}]                      # filters of those who may give
      destinations: [failoverFilter: {domain: instance}]                 # … and take
      selector:
        metricBalanceSelector: {metric: kv_cache_usage_ratio_projected, threshold: 0.7}

Metrics, filters and definitions are those of dispatch. The built-in policies take what flags say in the place of what
is written in their files; a file of one's own says everything itself, but for constants that are set by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llumlet.protocol.infer_type import InferType
from llumlet.protocol.selection import Order, Unit
from llumsched.extensions import load_values
from llumsched.policy import filters as f
from llumsched.policy.metrics import Metric
from llumsched.policy.parts import Maker, number
from llumsched.policy.pipeline import Filters
from llumsched.policy.reader import PolicyError, Reader, is_own_file, parse_yaml, read_policy
from llumsched.rescheduling.balance import MetricBalancePairs
from llumsched.rescheduling.config import Config, LoadTarget, Scope
from llumsched.rescheduling.failover import RoundRobinPairs
from llumsched.rescheduling.moves import Selection, selection_fault
from llumsched.rescheduling.packing import PackingPairs
from llumsched.rescheduling.pairs import PairSelector, pair_selector_fault

ENTRY_POINTS: Final = "llumnix.pair_selectors"


@dataclass(frozen=True, slots=True)
class ReschedulingPolicy:
    name: str
    failed: Filters
    """Filters whose refusals count as failures, for the filters of groups that follow."""
    sources: Filters
    destinations: Filters
    selector: PairSelector
    constants: Mapping[str, float] = field(default_factory=dict)
    """The constants that it defines, as they are set."""


def load_policies(config: Config) -> tuple[ReschedulingPolicy, ...]:
    """Policies that the configuration names. Raises PolicyError with everything wrong with any of them."""
    policies, faults = [], []
    for name in config.policies:
        try:
            policies.append(load_rescheduling_policy(name, config))
        except PolicyError as error:
            faults += error.faults
    if faults:
        raise PolicyError(faults)
    return tuple(policies)


def load_rescheduling_policy(name: str, config: Config) -> ReschedulingPolicy:
    """A built-in policy by name, or that of a file by its path, which ends in `.yaml`. Raises PolicyError."""
    document = parse_yaml(read_policy(name, "rescheduling"), name)
    reader = _ReschedulingReader(name, document, config)
    policy = reader.policy()
    if policy is None or reader.faults:
        raise PolicyError(reader.faults)
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
    """First come, and one at a time: it queues again where it comes, and several would often have to move on."""
    return MetricBalancePairs(metric, selection=Selection(Unit.NUM_REQ, Order.FCW, 1.0))


def _last_come_balance(metric: Metric) -> MetricBalancePairs:
    """The one that its engine would preempt: the last of the batch."""
    return MetricBalancePairs(metric, selection=Selection(Unit.NUM_REQ, Order.LCR, 1.0))


def _pack(metric: Metric, limit: Any, *, empties: bool) -> PackingPairs:
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


class _ReschedulingReader(Reader):
    def __init__(self, source: str, document: Any, config: Config) -> None:
        """`config`: values in place of the file's; of a file of one's own, only of its constants."""
        is_own = is_own_file(source)
        super().__init__(source, document, config.constants(of_own_file=is_own))
        self._config = None if is_own else config
        try:
            self.pair_selectors: dict[str, Maker] = load_values(
                ENTRY_POINTS, _SELECTORS, lambda _, value: None if callable(value) else "is not callable"
            )
        except ValueError as error:
            raise PolicyError([str(error)]) from error

    def policy(self) -> ReschedulingPolicy | None:
        """The policy; None, or one that is not to be used, if there are faults."""
        section, where = self.document.get("rescheduling"), "rescheduling"
        if not isinstance(section, dict):
            self.fault("", "has no section 'rescheduling'")
            return None
        self.only(where, section, {"infer_type", "failed", "sources", "destinations", "selector"})
        wanted = section.get("infer_type", InferType.NEUTRAL)
        if wanted not in (*InferType, _ANY):
            self.fault(where, f"infer_type {wanted!r} is none of {', '.join((*InferType, _ANY))}")
            return None
        infer_type = InferType.NEUTRAL if wanted == _ANY else InferType(wanted)
        failed, sources, destinations = (
            self._filters(f"{where}.{part}", section.get(part, [])) for part in ("failed", "sources", "destinations")
        )
        selector = self._selector(where, infer_type, section.get("selector"))
        if selector is None:
            return None
        of_type = [] if wanted == _ANY else [f.InferTypeFilter(infer_type)]
        gives, takes = (Filters.of([*of_type, *filters]) for filters in (sources, destinations))
        return ReschedulingPolicy(self.name, Filters.of(failed), gives, takes, selector, self.constants)

    def _filters(self, where: str, entries: Any) -> Iterable[f.Filter | f.GroupFilter]:
        if not isinstance(entries, list):
            self.fault(where, "is not a list of filters")
            return []
        found = []
        for entry in entries:
            name, settings = self.entry(where, entry)
            if name == "metricBasedFilter" and "metric" in settings:
                settings["metric"] = self._metric(where, settings["metric"])
                if settings["metric"] is None:
                    continue
            if self._config is not None:
                settings |= {key: value for key, value in _of_config(name, self._config).items() if key in settings}
            made = self.make(where, "filter", name, self.filters, settings, f.filter_fault)
            if made is not None:
                found.append(made)
        return found

    def _selector(self, where: str, infer_type: InferType, entry: Any) -> PairSelector | None:
        name, settings = self.entry(where, entry)
        is_of_load = name == MetricBalancePairs.name and settings.get("metric") == LoadTarget().metric
        if self._config is not None and is_of_load:
            settings = _balance_of_config(infer_type, self._config)
        if "metric" in settings:
            settings["metric"] = self._metric(where, settings["metric"])
            if settings["metric"] is None:
                return None
        if "limit" in settings:
            settings["limit"] = self.constant(where, settings["limit"])
            if settings["limit"] is None:
                return None
        made: PairSelector | None = self.make(
            where, "selector", name, self.pair_selectors, settings, pair_selector_fault
        )
        return made

    def _metric(self, where: str, name: Any) -> Metric | None:
        return self.metric(where, name, lambda metric: metric.full and metric.less_is_better, "is no load of a status")


def _of_config(filter_name: str, config: Config) -> dict[str, Any]:
    if filter_name == f.StalenessFilter.name:
        return {"seconds": config.staleness_s}
    return {"domain": config.failover_domain}


def _balance_of_config(infer_type: InferType, config: Config) -> dict[str, Any]:
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
