# SPDX-License-Identifier: Apache-2.0
"""Reads a policy's file: definitions, metrics, filters, selectors, and every fault in them.

The sections for dispatch (`document`) and for rescheduling (`rescheduling.planning.policies`) are read by one `Reader`.

    name: mine
    define:
      constants: {reserve: 512}
      metrics:
        free_tokens: {value: num_total_gpu_tokens - num_used_gpu_tokens, better: more}
      filters:
        roomFilter: {refuse: prompt_num_tokens > free_tokens - reserve, said: no room now, skip_in_fallback: true}
    full: …           # dispatch: `document`
    rescheduling: …   # `llumsched.rescheduling.planning.policies`

A formula may name the columns of the cluster, those of the request (`llumsched.request`), `age_s`, those of
request providers, constants, and metrics that are known or were defined before. All faults of a file are reported
together, with the known names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from llumlet.process.kinds import Faulty
from llumsched.cluster.providers import all_request_providers
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.metadata import MetadataColumns
from llumsched.cluster.providers.status import StatusColumns
from llumsched.cluster.providers.step_models import StepModels
from llumsched.policy import filters as f
from llumsched.policy import trial
from llumsched.policy.candidates import OF_DECISION
from llumsched.policy.expression import Expression, ExpressionError, numbers
from llumsched.policy.metrics import BUILT_IN_CONSTANTS, Metric, all_metrics
from llumsched.policy.parts import Maker, all_filters, all_selectors, number, switch

SECTIONS: Final = frozenset({"name", "define", "full", "lite", "rescheduling"})

Changed = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Settings of a part with overrides, from its name and its settings in the file."""


class PolicyError(Faulty):
    """Raised for a policy that cannot be used."""


def is_own_file(name: str) -> bool:
    """True if a policy's name is a path."""
    return name.endswith((".yaml", ".yml"))


def built_in_policies(section: str = "full") -> list[str]:
    """Names of the built-in policies with this section."""
    return sorted(
        path.name.removesuffix(".yaml")
        for path in _directory().iterdir()
        if path.name.endswith(".yaml") and f"\n{section}:" in path.read_text()
    )


def read_policy(name: str, section: str = "full") -> str:
    """The text of a built-in policy by name, or of a file by its path, which ends in `.yaml`. Raises PolicyError."""
    if is_own_file(name):
        try:
            return Path(name).read_text()
        except (OSError, UnicodeError) as error:
            raise PolicyError([f"policy {name}: cannot be read: {error}"]) from error
    if name not in (known := built_in_policies(section)):
        raise PolicyError([f"unknown policy {name!r}; known: {', '.join(known)}, or a .yaml file"])
    text: str = (_directory() / f"{name}.yaml").read_text()
    return text


def parse_yaml(text: str, source: str) -> Any:
    """A YAML document. Raises PolicyError."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # beside YAMLError, whatever a scalar's constructor or deep nesting raises
        raise PolicyError([f"policy {source}: is no YAML: {error}"]) from error


def _directory() -> Any:
    return files("llumsched.policy") / "policies"


class Reader:
    """Reads one section of a document, and collects the faults."""

    def __init__(
        self, source: str, document: Any, fits: Callable[[Metric], bool], unfit: str, constants: Mapping[str, float]
    ) -> None:
        """`fits`: true if the section may use a metric; `unfit` is said of others. `constants`: values in place of
        those that are defined or built in. Raises PolicyError for installed extensions that do not load."""
        self.faults: list[str] = []
        self.constants: dict[str, float] = {}
        """Its own constants, and the built-in ones that it uses."""
        self._fits, self._unfit = fits, unfit
        self._given = constants
        self._source = source
        try:
            self.metrics: dict[str, Metric] = all_metrics({})
            self.filters: dict[str, Maker] = all_filters()
            self.selectors: dict[str, Maker] = all_selectors()
            self._providers = all_request_providers()
        except ValueError as error:
            raise PolicyError([str(error)]) from error
        self._columns = {*StatusColumns().columns, *MetadataColumns.columns, *InFlight.columns, *StepModels.columns}
        self._columns |= {name for provider in self._providers for name in provider.columns}
        self._columns |= {*OF_DECISION, *BUILT_IN_CONSTANTS}
        self.document: Mapping[str, Any] = document if isinstance(document, dict) else {}
        if not isinstance(document, dict):
            self.fault("", f"is not a mapping of {', '.join(sorted(SECTIONS))}")
            return
        self.only("", document, SECTIONS)
        self._define(document.get("define", {}))

    @property
    def name(self) -> str:
        return str(self.document.get("name", self._source))

    def done(self) -> None:
        """Raises PolicyError if there is a fault."""
        if self.faults:
            raise PolicyError(self.faults)

    # Definitions

    def _define(self, section: Any) -> None:
        if not isinstance(section, dict):
            self.fault("define", "is not a mapping of constants, metrics, filters")
            return
        self.only("define", section, {"constants", "metrics", "filters"})
        for name, value in self._named("constants", section):
            self._define_constant(name, value)
        for name, settings in self._definitions("metrics", section, {"value", "better", "is_share"}):
            self._define_metric(name, settings)
        for name, settings in self._definitions("filters", section, {"refuse", "said", "skip_in_fallback"}):
            self._define_filter(name, settings)

    def _definitions(
        self, kind: str, section: Mapping[str, Any], known: set[str]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, settings in self._named(kind, section):
            where = f"define.{kind}.{name}"
            if isinstance(settings, dict):
                self.only(where, settings, known)
                yield name, settings
            else:
                self.fault(where, f"is not a mapping of {', '.join(sorted(known))}")

    def _named(self, kind: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Named entries of a part of the definitions."""
        entries = section.get(kind, {})
        if not isinstance(entries, dict):
            self.fault(f"define.{kind}", "is not a mapping of names")
            return
        for name, value in entries.items():
            where = f"define.{kind}.{name}"
            if str(name) in self.metrics | self.filters | self.constants or str(name) in self._columns:
                self.fault(where, "has a name that is in use already")
            elif not str(name).isidentifier():
                self.fault(where, "is no name that a formula could use")
            else:
                yield str(name), value

    def _define_constant(self, name: str, value: Any) -> None:
        try:
            self.constants[name] = self._given.get(name, number(value))
        except ValueError as error:
            self.fault(f"define.constants.{name}", str(error))

    def _define_metric(self, name: str, settings: Mapping[str, Any]) -> None:
        where = f"define.metrics.{name}"
        formula = self._formula(where, settings.get("value"))
        better = settings.get("better", "less")
        if better not in ("less", "more"):
            self.fault(where, f"better {better!r} is neither less nor more")
        if formula is None:
            return
        try:
            is_share = switch("is_share", settings.get("is_share", False))
        except ValueError as error:
            self.fault(where, str(error))
            return
        self.metrics[name] = Metric(name, formula, better == "less", is_share, lite=True)

    def _define_filter(self, name: str, settings: Mapping[str, Any]) -> None:
        where = f"define.filters.{name}"
        condition = self._formula(where, settings.get("refuse"))
        try:
            skip = switch("skip_in_fallback", settings.get("skip_in_fallback", False))
        except ValueError as error:
            self.fault(where, str(error))
            return
        if condition is not None:
            made = f.ConditionFilter(name, self._settled(condition), str(settings.get("said", "")), skip)
            self.filters[name] = lambda skip_in_fallback=skip: replace(
                made, skip_in_fallback=switch("skip_in_fallback", skip_in_fallback)
            )

    def _formula(self, where: str, text: Any) -> Expression | None:
        """The formula of a text, with metrics in place of their names; None if there is a fault."""
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            self.fault(where, f"{text!r} is no formula")
            return None
        try:
            formula = Expression(str(text)).with_names(self._formulas())
        except ExpressionError as error:
            self.fault(where, str(error))
            return None
        unknown = sorted(formula.names - self._columns)
        for name in unknown:
            self.fault(where, f"there is no column {name!r}; known: {', '.join(sorted(self._columns))}")
        return None if unknown else formula

    def _formulas(self) -> dict[str, Expression]:
        """Formulas by the names that may stand for them. A column hides a metric of the same name."""
        return numbers(self.constants) | {
            name: metric.of
            for name, metric in self.metrics.items()
            if isinstance(metric.of, Expression) and name not in self._columns
        }

    @property
    def built_in_constants(self) -> dict[str, float]:
        """Values of all built-in constants."""
        return {name: self._given.get(name, value) for name, value in BUILT_IN_CONSTANTS.items()}

    def _settled(self, formula: Expression) -> Expression:
        """The formula with built-in constants replaced by numbers."""
        named = {name: value for name, value in self.built_in_constants.items() if name in formula.names}
        self.constants |= named
        return formula.with_names(numbers(named))

    # Parts of sections

    def metric(self, where: str, name: Any) -> Metric | None:
        """A metric by name; None if there is a fault."""
        metric = self.metrics.get(name) if isinstance(name, str) else None
        if metric is not None and self._fits(metric):
            metric = replace(metric, of=self._settled(metric.of)) if isinstance(metric.of, Expression) else metric
            if (said := trial.fault_of(metric, self._providers)) is not None:
                self.fault(where, f"metric {name!r} {said}")
            return metric
        known = ", ".join(sorted(name for name, metric in self.metrics.items() if self._fits(metric)))
        self.fault(where, f"metric {name!r} {'is unknown' if metric is None else self._unfit}; known: {known}")
        return None

    def constant(self, where: str, text: Any) -> float | None:
        """The value of a formula of constants; None if there is a fault."""
        formula = self._formula(where, text)
        if formula is None:
            return None
        formula = self._settled(formula)
        if formula.names:
            self.fault(where, f"{text!r} is no formula of constants: it names {', '.join(sorted(formula.names))}")
            return None
        return float(formula.of(lambda name: math.nan))

    def resolved(self, where: str, settings: dict[str, Any]) -> bool:
        """Replaces a metric's name by the metric, and a limit's formula by its number. False if there is a fault."""
        for key, found in (("metric", self.metric), ("limit", self.constant)):
            if key in settings:
                settings[key] = found(where, settings[key])
        return None not in (settings.get("metric", 0), settings.get("limit", 0))

    def listed_filters(self, where: str, entries: Any, changed: Changed) -> list[f.Filter | f.GroupFilter]:
        """The filters of a list, without faulty ones."""
        if not isinstance(entries, list):
            self.fault(where, "filters is not a list")
            return []
        found = []
        for entry in entries:
            name, settings = self.entry(where, entry)
            settings = changed(name, settings)
            if name == f.MetricBasedFilter.name and not self.resolved(where, settings):
                continue
            made = self.make(where, "filter", name, self.filters, settings, f.filter_fault)
            if made is not None:
                found.append(made)
        return found

    def entry(self, where: str, entry: Any) -> tuple[str, dict[str, Any]]:
        """Name and settings of `name`, or of `name: {setting: value}`."""
        if isinstance(entry, dict) and len(entry) == 1:
            name, settings = next(iter(entry.items()))
            if isinstance(settings, dict):
                return str(name), dict(settings)
            self.fault(where, f"the settings of {name!r} are not a mapping")
            return str(name), {}
        return (entry if isinstance(entry, str) else repr(entry)), {}

    def make(
        self,
        where: str,
        kind: str,
        name: str,
        makers: Mapping[str, Maker],
        settings: Mapping[str, Any],
        fault_of: Callable[[object], str | None],
    ) -> Any:
        """A filter or selector; None if there is a fault."""
        if name not in makers:
            self.fault(where, f"unknown {kind} {name!r}; known: {', '.join(sorted(makers))}")
            return None
        try:
            made = makers[name](**settings)
            said = fault_of(made) or trial.fault_of(made, self._providers)
        except (TypeError, ValueError) as error:
            said = str(error).replace("<lambda>()", "it").replace("Reader._define_filter.<locals>.", "")
        except Exception as error:  # noqa: BLE001 - whatever a foreign filter raises
            said = f"{type(error).__name__}: {error}"
        if said is None:
            return made
        self.fault(where, f"{name}: {said}")
        return None

    def only(self, where: str, mapping: Mapping[Any, Any], known: frozenset[str] | set[str]) -> None:
        unknown = [str(key) for key in mapping if key not in known]
        if unknown:
            self.fault(where, f"has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")

    def fault(self, where: str, said: str) -> None:
        fault = f"policy {self._source}: {where + ': ' if where else ''}{said}"
        if fault not in self.faults:  # a metric is named in several places
            self.faults.append(fault)
