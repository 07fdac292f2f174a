# SPDX-License-Identifier: Apache-2.0
"""Policies: what the pipeline runs, per mode and infer type, read from YAML.

`policies/*.yaml` are the built-in ones and show the form. Five filters are part of every policy and come first: the
request's model, the infer type, room for the prompt, instances that failed the same request before, and those of which
gateways complain. All faults of a document are reported at once, with the names that are known; those of the other
mode's section are among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from llumsched.scheduling import filters as f
from llumsched.scheduling.extensions import load_values
from llumsched.scheduling.load import InferType
from llumsched.scheduling.metrics import Metric, all_metrics
from llumsched.scheduling.pipeline import Stage, make_stage
from llumsched.scheduling.selectors import MetricBasedSelector, RoundRobinSelector, Selector

FILTER_ENTRY_POINTS = "llumnix.filters"


class Mode(StrEnum):
    FULL = "full"
    """Instances report their status to a CMS."""
    LITE = "lite"
    """They do not; load is what was sent to them."""


class PolicyError(ValueError):
    """`faults` says everything wrong with it, a sentence each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class Overrides:
    """What flags say instead of the policy. None and what is not there leave it as it is."""

    metrics: Mapping[InferType, str] = field(default_factory=dict)
    """Instead of the first metric, in the selector and in the filters that have a threshold for it."""
    thresholds: Mapping[InferType, float] = field(default_factory=dict)
    top_k: int | None = None
    failover_domain: str | None = None
    staleness_s: float | None = None
    optional: frozenset[str] = frozenset()
    """Names of fields above that are for others too. Of the rest, what finds nothing to override is a fault."""


@dataclass(frozen=True)
class Policy:
    name: str
    mode: Mode
    stages: Mapping[InferType, Stage]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All that it looks at, each once."""
        found: dict[str, Metric] = {}
        for stage in self.stages.values():
            used = [one.metric for one in stage.filters if isinstance(one, f.MetricBasedFilter)]
            found.update((metric.name, metric) for metric in (*stage.metrics, *used))
        return tuple(found.values())

    @property
    def staleness_s(self) -> float:
        """Silence after which an instance counts as failed; 0 if it never does."""
        filters = [one for stage in self.stages.values() for one in stage.filters]
        return max((one.seconds for one in filters if isinstance(one, f.StalenessFilter)), default=0.0)


def built_in_policies() -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in _directory().iterdir() if path.name.endswith(".yaml"))


def load_policy(name: str, mode: Mode, overrides: Overrides | None = None) -> Policy:
    """A built-in policy by name, or that of a file by its path, which ends in `.yaml`. Raises PolicyError."""
    if name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeError) as error:
            raise PolicyError([f"policy {name}: cannot be read: {error}"]) from error
    elif name in built_in_policies():
        text = (_directory() / f"{name}.yaml").read_text()
    else:
        raise PolicyError([f"unknown policy {name!r}; known: {', '.join(built_in_policies())}, or a .yaml file"])
    return parse_policy(text, name, mode, overrides or Overrides())


def parse_policy(text: str, source: str, mode: Mode, overrides: Overrides) -> Policy:
    """Raises PolicyError."""
    try:
        document = yaml.safe_load(text)
    except Exception as error:  # beside YAMLError, whatever a scalar's constructor or deep nesting raises
        raise PolicyError([f"policy {source}: is no YAML: {error}"]) from error
    try:
        metrics, makers = all_metrics(), _all_filters()
    except ValueError as error:
        raise PolicyError([str(error)]) from error
    reader = _Reader(source, mode, overrides, metrics, makers)
    policy, faults = reader.policy(document), reader.faults
    other_mode = Mode.LITE if mode is Mode.FULL else Mode.FULL
    if policy is not None and document.get(other_mode) is not None:
        other = _Reader(source, other_mode, Overrides(), metrics, makers)
        other.stages(document[other_mode])
        faults += other.faults
    if faults or policy is None:
        raise PolicyError(faults)
    return policy


_Maker = Callable[..., Any]
_STRUCTURAL = (f.ModelFilter, f.CapacityFilter, f.RetryFilter, f.BreakerFilter)
_FILTERS: Mapping[str, _Maker] = {
    "schedulabilityFilter": f.SchedulabilityFilter,
    "stalenessFilter": lambda seconds: f.StalenessFilter(_seconds(seconds)),
    "metricBasedFilter": lambda metric, threshold, skip_in_fallback=True: f.MetricBasedFilter(
        metric, _number(threshold), _switch(skip_in_fallback)
    ),
    "failoverFilter": lambda domain: f.FailoverFilter(f.FailoverDomain(domain)),
}
_SELECTORS: Mapping[str, _Maker] = {
    "metricBasedSelector": lambda top_k=1: MetricBasedSelector(_top_k(top_k)),
    "roundRobinSelector": RoundRobinSelector,
}
_SETTINGS: Final = {
    "stalenessFilter": ("staleness_s", "seconds"),
    "failoverFilter": ("failover_domain", "domain"),
    "metricBasedSelector": ("top_k", "top_k"),
}
"""Fields of `Overrides`, and the settings whose place they take."""


class _Reader:
    """Of what a document says of one mode; collects what is wrong."""

    def __init__(
        self,
        source: str,
        mode: Mode,
        overrides: Overrides,
        metrics: Mapping[str, Metric],
        makers: Mapping[str, _Maker],
    ) -> None:
        self.faults: list[str] = []
        self._source, self._mode, self._overrides = source, mode, overrides
        self._metrics, self._makers = metrics, makers
        self._overridden: set[str] = set()
        """Fields of the overrides, those by infer type with it."""

    def policy(self, document: Any) -> Policy | None:
        if not isinstance(document, dict):
            self._fault("", "is not a mapping of name, full, lite")
            return None
        self._only("", document, {"name", *Mode})
        return Policy(str(document.get("name", self._source)), self._mode, self.stages(document.get(self._mode)))

    def stages(self, sections: Any) -> dict[InferType, Stage]:
        if not isinstance(sections, dict) or not sections:
            self._fault("", f"has no section {str(self._mode)!r} with infer types")
            return {}
        self._only(f"{self._mode}", sections, set(InferType))
        stages = {
            infer_type: stage
            for infer_type in InferType
            if infer_type in sections and (stage := self._stage(infer_type, sections[infer_type])) is not None
        }
        self._all_overridden()
        return stages

    def _stage(self, infer_type: InferType, section: Any) -> Stage | None:
        where = f"{self._mode}.{infer_type}"
        if not isinstance(section, dict):
            self._fault(where, "is not a mapping of metrics, filters, selector")
            return None
        self._only(where, section, {"metrics", "filters", "selector"})
        names = section.get("metrics", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._fault(where, "metrics is not a list of names")
            return None
        first, instead = (names[0] if names else None), self._overrides.metrics.get(infer_type)
        renamed = {}
        if first is not None and instead is not None:
            renamed[first] = instead
            self._overridden.add(f"metrics {infer_type}")
        metrics = [metric for name in names if (metric := self._metric(where, renamed.get(name, name))) is not None]
        filters = self._filters(where, infer_type, section.get("filters", []), renamed, first)
        selector = self._selector(where, section.get("selector"), bool(names))
        return make_stage(infer_type, metrics, filters, selector) if selector is not None else None

    def _filters(
        self, where: str, infer_type: InferType, entries: Any, renamed: Mapping[str, str], first: str | None
    ) -> list[f.Filter | f.GroupFilter]:
        found: list[f.Filter | f.GroupFilter] = [f.InferTypeFilter(infer_type), *(make() for make in _STRUCTURAL)]
        if not isinstance(entries, list):
            self._fault(where, "filters is not a list")
            return found
        for entry in entries:
            name, settings = self._entry(where, entry)
            if name not in self._makers:
                self._fault(where, f"unknown filter {name!r}; known: {', '.join(sorted(self._makers))}")
                continue
            settings = dict(settings)
            if name == "metricBasedFilter" and "metric" in settings:
                named = settings["metric"]
                if named == first and infer_type in self._overrides.thresholds:
                    settings["threshold"] = self._overrides.thresholds[infer_type]
                    self._overridden.add(f"thresholds {infer_type}")
                settings["metric"] = self._metric(where, renamed.get(named, named) if named == first else named)
                if settings["metric"] is None:
                    continue
            settings |= self._instead(name)
            made = self._make(where, name, self._makers[name], settings, f.filter_fault)
            if made is not None:
                found.append(made)
        return found

    def _selector(self, where: str, entry: Any, has_metrics: bool) -> Selector | None:
        name, settings = self._entry(where, entry)
        if name not in _SELECTORS:
            self._fault(where, f"unknown selector {name!r}; known: {', '.join(sorted(_SELECTORS))}")
            return None
        if name == "metricBasedSelector" and not has_metrics:
            self._fault(where, "metricBasedSelector needs a metric")
        made: Selector | None = self._make(where, name, _SELECTORS[name], {**settings, **self._instead(name)})
        return made

    def _instead(self, name: str) -> dict[str, Any]:
        """What an override sets in a filter or a selector."""
        if name not in _SETTINGS:
            return {}
        field_name, setting = _SETTINGS[name]
        value = getattr(self._overrides, field_name)
        self._overridden.add(field_name)
        return {} if value is None else {setting: value}

    def _all_overridden(self) -> None:
        """Who gives a flag that changes nothing meant something by it."""
        for infer_type, metric in self._overrides.metrics.items():
            if f"metrics {infer_type}" not in self._overridden:
                self._fault(f"{self._mode}.{infer_type}", f"uses no metric that {metric!r} could take the place of")
        for infer_type, threshold in self._overrides.thresholds.items():
            if f"thresholds {infer_type}" not in self._overridden:
                self._fault(f"{self._mode}.{infer_type}", f"has no load threshold to set to {threshold:g}")
        for part, (field_name, setting) in _SETTINGS.items():
            value = getattr(self._overrides, field_name)
            if value is not None and field_name not in self._overridden | self._overrides.optional:
                self._fault(f"{self._mode}", f"has no {part} to set {setting} to {value}")

    def _metric(self, where: str, name: Any) -> Metric | None:
        fits = {n for n, metric in self._metrics.items() if (metric.full if self._mode is Mode.FULL else metric.lite)}
        known = isinstance(name, str) and name in self._metrics
        if known and name in fits:
            return self._metrics[name]
        wrong = f"is no metric of {self._mode} mode" if known else "is unknown"
        self._fault(where, f"metric {name!r} {wrong}; known: {', '.join(sorted(fits))}")
        return None

    def _entry(self, where: str, entry: Any) -> tuple[str, Mapping[str, Any]]:
        """`name`, or `name: {setting: value}`."""
        if isinstance(entry, dict) and len(entry) == 1:
            name, settings = next(iter(entry.items()))
            if isinstance(settings, dict):
                return str(name), settings
            self._fault(where, f"the settings of {name!r} are not a mapping")
            return str(name), {}
        return (entry if isinstance(entry, str) else repr(entry)), {}

    def _make(
        self,
        where: str,
        name: str,
        maker: _Maker,
        settings: Mapping[str, Any],
        fault_of: Callable[[object], str | None] = lambda _: None,
    ) -> Any:
        """None if there is a fault."""
        try:
            made = maker(**settings)
            said = fault_of(made)
        except (TypeError, ValueError) as error:
            said = str(error).replace("<lambda>()", "it")
        except Exception as error:  # noqa: BLE001 - whatever a foreign filter raises
            said = f"{type(error).__name__}: {error}"
        if said is None:
            return made
        self._fault(where, f"{name}: {said}")
        return None

    def _only(self, where: str, mapping: Mapping[Any, Any], known: set[str]) -> None:
        unknown = [str(key) for key in mapping if key not in known]
        if unknown:
            self._fault(where, f"has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")

    def _fault(self, where: str, said: str) -> None:
        fault = f"policy {self._source}: {where + ': ' if where else ''}{said}"
        if fault not in self.faults:  # a metric is named in several places
            self.faults.append(fault)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _seconds(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"{value!r} seconds are not positive")
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"skip_in_fallback {value!r} is neither true nor false")
    return value


def _top_k(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"top_k {value!r} is not a number from 1 on")
    return value


def _all_filters() -> dict[str, _Maker]:
    return load_values(FILTER_ENTRY_POINTS, _FILTERS, lambda _, value: None if callable(value) else "is not callable")


def _directory() -> Any:
    return files("llumsched.scheduling") / "policies"
