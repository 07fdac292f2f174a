# SPDX-License-Identifier: Apache-2.0
"""The load of an instance in the metric of its infer type: the metrics of the scheduler, and its account of what it
sent and no status shows yet."""

from __future__ import annotations

import math
from collections.abc import Callable

from llumsched.cms.view import Instance
from llumsched.rescheduling.config import INFER_TYPES, Config
from llumsched.rescheduling.snapshot import Measure
from llumsched.scheduling.load import NONE_IN_FLIGHT, Counters, Load
from llumsched.scheduling.metrics import all_metrics

CountersOf = Callable[[str], Counters]
"""By instance id: the dispatcher's account."""


def no_account(instance_id: str) -> Counters:
    """Of a process that dispatches nothing."""
    return NONE_IN_FLIGHT


def measure(config: Config, counters_of: CountersOf = no_account) -> Measure:
    """Raises KeyError for a metric that does not exist: `metric_faults` says so before."""
    known = all_metrics()
    metrics = {infer_type: known[config.target(infer_type).metric] for infer_type in INFER_TYPES}
    neutral = metrics["neutral"]

    def load_of(instance: Instance) -> float:
        """`Metric.value`, without its detours: a pass asks for every instance of the cluster."""
        metadata = instance.metadata
        metric = metrics.get(metadata.instance_type, neutral)
        load = Load(instance, counters_of(metadata.instance_id))
        try:
            number = float(metric.of(load))
        except Exception:  # noqa: BLE001 - whatever a foreign metric raises
            number = math.nan
        return metric.value(load) if math.isnan(number) else number

    return load_of


def metric_fault(name: str) -> str:
    """Why it cannot tell hot instances from cold ones; empty if it can."""
    try:
        known = all_metrics()
    except ValueError as error:
        return str(error)
    loads = [metric.name for metric in known.values() if metric.less_is_better and metric.full]
    if name not in known:
        return f"{name!r} is none of {', '.join(sorted(loads))}"
    return "" if name in loads else f"{name!r} is no load of a status; there are {', '.join(sorted(loads))}"
