# SPDX-License-Identifier: Apache-2.0
"""Dispatch policies, per mode and infer type, read from YAML.

`policies/*.yaml` are the built-in ones and show the form. Five filters come first in every policy: the request's model,
the infer type, room for the prompt, instances that failed the request before, and gateways' complaints. Faults of the
other mode's section are reported too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers import HIT_COLUMN
from llumsched.policy import filters as f
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import BUILT_IN_CONSTANTS, Metric
from llumsched.policy.parts import STRUCTURAL
from llumsched.policy.pipeline import Filters, Stage
from llumsched.policy.reader import PolicyError, Reader, parse_yaml, read_policy
from llumsched.policy.selectors import Selector, WeightedSelector, selector_fault


class Mode(StrEnum):
    FULL = "full"
    """Instances report their status to a CMS."""
    LITE = "lite"
    """Instances do not report; load is counted from the sent requests."""


@dataclass(frozen=True)
class Overrides:
    """Values of flags that override the policy. None, or a missing entry, keeps the policy's."""

    metrics: Mapping[InferType, str] = field(default_factory=dict)
    """Metrics that replace the first one, in the selector and in filters with a threshold for it."""
    thresholds: Mapping[InferType, float] = field(default_factory=dict)
    top_k: int | None = None
    failover_domain: str | None = None
    staleness_s: float | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    """Values of constants, defined by the policy or built in."""
    optional: frozenset[str] = frozenset()
    """Names of fields and constants that others use too. Any other override that changes nothing is a fault."""


@dataclass(frozen=True)
class Policy:
    name: str
    mode: Mode
    stages: Mapping[InferType, Stage]
    constants: Mapping[str, float] = field(default_factory=dict)
    """Values of its own constants, and of the built-in ones that it uses."""
    built_in_constants: Mapping[str, float] = field(default_factory=lambda: BUILT_IN_CONSTANTS)
    """Values of all built-in constants."""

    @property
    def reads(self) -> frozenset[str]:
        """Columns that its formulas name."""
        formulas = [metric.of for metric in self._metrics if isinstance(metric.of, Expression)]
        formulas += [one.condition for one in self._filters if isinstance(one, f.ConditionFilter)]
        return frozenset().union(*(formula.names for formula in formulas))

    @property
    def parts(self) -> frozenset[str]:
        """Its metrics, filters and selectors, as `raised` names them."""
        selectors = [f"Selector {stage.selector.name}" for stage in self.stages.values()]
        metrics = [f"Metric {metric.name}" for metric in self._metrics]
        return frozenset([*selectors, *metrics, *(f"Filter {one.name}" for one in self._filters)])

    @property
    def heeds_prefixes(self) -> bool:
        """True if it places by prefix caches: by hits, or by a prediction that includes them."""
        names = self.reads.union(metric.name for metric in self._metrics)
        return HIT_COLUMN in names or "predicted_ttft" in names

    @property
    def refuses_late(self) -> bool:
        """True if it refuses requests that would rather wait than be late."""
        return "may_wait" in self.reads

    @property
    def _filters(self) -> list[f.Filter | f.GroupFilter]:
        return [one for stage in self.stages.values() for one in stage.filters]

    @property
    def _metrics(self) -> list[Metric]:
        """The metrics that it compares, or has thresholds for."""
        compared = [metric for stage in self.stages.values() for metric in stage.metrics]
        return compared + [one.metric for one in self._filters if isinstance(one, f.MetricBasedFilter)]

    @property
    def staleness_s(self) -> float:
        """Silence after which an instance counts as failed; 0 for never."""
        return max((one.seconds for one in self._filters if isinstance(one, f.StalenessFilter)), default=0.0)


def load_policy(name: str, mode: Mode, overrides: Overrides | None = None) -> Policy:
    """A built-in policy by name, or a file by its path, which ends in `.yaml`. Raises PolicyError."""
    return parse_policy(read_policy(name), name, mode, overrides or Overrides())


def parse_policy(text: str, source: str, mode: Mode, overrides: Overrides) -> Policy:
    """The policy of a text. Raises PolicyError."""
    document = parse_yaml(text, source)
    section = _ModeSection(source, document, mode, overrides)
    policy, faults = section.policy(), section.reader.faults
    other_mode = Mode.LITE if mode is Mode.FULL else Mode.FULL
    if section.reader.document.get(other_mode) is not None:
        other = _ModeSection(source, document, other_mode, Overrides())
        other.policy()
        faults += [fault for fault in other.reader.faults if fault not in faults]
    if faults:
        raise PolicyError(faults)
    return policy


_SETTINGS: Final = {
    "stalenessFilter": ("staleness_s", "seconds"),
    "failoverFilter": ("failover_domain", "domain"),
    "metricBasedSelector": ("top_k", "top_k"),
    "weightedSelector": ("top_k", "top_k"),
}
"""Fields of `Overrides`, and the settings that they replace."""


class _ModeSection:
    """The section of a mode in a document, with overrides."""

    def __init__(self, source: str, document: Any, mode: Mode, overrides: Overrides) -> None:
        fits = attrgetter("full" if mode is Mode.FULL else "lite")
        self.reader = Reader(source, document, fits, f"is no metric of {mode} mode", overrides.constants)
        self._mode, self._overrides = mode, overrides
        self._overridden: set[str] = set()
        """Fields of the overrides that were used; per infer type, its name follows the field's."""

    def policy(self) -> Policy:
        """The policy; invalid if the reader has faults."""
        reader = self.reader
        stages = self._stages(reader.document.get(self._mode)) if reader.document else {}
        return Policy(reader.name, self._mode, stages, reader.constants, reader.built_in_constants)

    def _stages(self, sections: Any) -> dict[InferType, Stage]:
        if not isinstance(sections, dict) or not sections:
            self.reader.fault("", f"has no section {str(self._mode)!r} with infer types")
            return {}
        self.reader.only(f"{self._mode}", sections, set(InferType))
        stages = {
            infer_type: stage
            for infer_type in InferType
            if infer_type in sections and (stage := self._stage(infer_type, sections[infer_type])) is not None
        }
        for where, said in self._not_overridden():
            self.reader.fault(where, said)
        return stages

    def _stage(self, infer_type: InferType, section: Any) -> Stage | None:
        reader, where = self.reader, f"{self._mode}.{infer_type}"
        if not isinstance(section, dict):
            reader.fault(where, "is not a mapping of metrics, filters, selector")
            return None
        reader.only(where, section, {"metrics", "filters", "selector"})
        names = section.get("metrics", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            reader.fault(where, "metrics is not a list of names")
            return None
        first = instead = names[0] if names else None
        if first is not None and infer_type in self._overrides.metrics:
            instead = self._overrides.metrics[infer_type]
            self._overridden.add(f"metrics {infer_type}")

        def changed(name: str, settings: dict[str, Any]) -> dict[str, Any]:
            if name == f.MetricBasedFilter.name and first is not None and settings.get("metric") == first:
                settings["metric"] = instead
                if infer_type in self._overrides.thresholds:
                    settings["threshold"] = self._overrides.thresholds[infer_type]
                    self._overridden.add(f"thresholds {infer_type}")
            return settings | self._instead(name)

        names = [instead if name == first else name for name in names]
        metrics = [metric for name in names if (metric := reader.metric(where, name)) is not None]
        filters = reader.listed_filters(where, section.get("filters", []), changed)
        structural = (f.InferTypeFilter(infer_type), *(make() for make in STRUCTURAL))
        selector = self._selector(where, section.get("selector"), names)
        return Stage(infer_type, tuple(metrics), Filters.of([*structural, *filters]), selector) if selector else None

    def _selector(self, where: str, entry: Any, names: list[str]) -> Selector | None:
        reader = self.reader
        name, settings = reader.entry(where, entry)
        if name in ("metricBasedSelector", "weightedSelector") and not names:
            reader.fault(where, f"{name} needs a metric")
        settings |= self._instead(name)
        made: Selector | None = reader.make(where, "selector", name, reader.selectors, settings, selector_fault)
        if isinstance(made, WeightedSelector):
            for metric in sorted(made.weights.keys() - set(names)):
                reader.fault(
                    where, f"weightedSelector: weighs {metric!r}, which is none of the metrics of this section"
                )
        return made

    def _instead(self, name: str) -> dict[str, Any]:
        """Settings that an override changes in a filter or a selector."""
        if name not in _SETTINGS:
            return {}
        field_name, setting = _SETTINGS[name]
        value = getattr(self._overrides, field_name)
        self._overridden.add(field_name)
        return {} if value is None else {setting: value}

    def _not_overridden(self) -> Iterator[tuple[str, str]]:
        """Faults of overrides that changed nothing."""
        overrides, known = self._overrides, self.reader.constants
        for infer_type, metric in overrides.metrics.items():
            if f"metrics {infer_type}" not in self._overridden:
                yield f"{self._mode}.{infer_type}", f"uses no metric that {metric!r} could take the place of"
        for infer_type, threshold in overrides.thresholds.items():
            if f"thresholds {infer_type}" not in self._overridden:
                yield f"{self._mode}.{infer_type}", f"has no load threshold to set to {threshold:g}"
        for name in sorted(overrides.constants.keys() - known.keys() - overrides.optional):
            there = f"; it defines {', '.join(sorted(known))}" if known else ""
            yield f"{self._mode}", f"has no constant {name} to set to {overrides.constants[name]:g}{there}"
        for part, (field_name, setting) in _SETTINGS.items():
            value = getattr(overrides, field_name)
            if value is not None and field_name not in self._overridden | overrides.optional:
                yield f"{self._mode}", f"has no {part} to set {setting} to {value}"
                self._overridden.add(field_name)
