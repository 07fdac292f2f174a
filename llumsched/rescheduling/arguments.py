# SPDX-License-Identifier: Apache-2.0
"""Whether there is a rescheduler, and where; and what is wrong with its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llumlet.kinds import SWITCH
from llumlet.protocol.selection import ALL, Order, Unit
from llumlet.setting_sources import Reading
from llumsched.rescheduling.config import Config, rescheduling
from llumsched.rescheduling.loads import metric_fault
from llumsched.rescheduling.moves import AS_NEEDED


@dataclass(frozen=True, slots=True)
class Switches:
    enable: bool | None = rescheduling.setting(
        None, SWITCH, "reschedule; =false switches it off whatever the mode", flag="--enable-rescheduling"
    )
    colocated: bool = rescheduling.setting(
        False, SWITCH, "inside the scheduler process", flag="--colocated-rescheduling-mode"
    )
    standalone: bool = rescheduling.setting(
        False, SWITCH, "in a process of its own", flag="--standalone-rescheduling-mode"
    )

    @property
    def enabled(self) -> bool:
        """`--enable-rescheduling` if it was given; else whether a mode was."""
        return self.colocated or self.standalone if self.enable is None else self.enable

    @property
    def in_scheduler(self) -> bool:
        return self.enabled and not self.standalone


def prepare(reading: Reading) -> tuple[Switches, Config]:
    """Adds what contradicts itself to the faults."""
    config = reading.make(Config)
    for check in (_policies, _selection):
        reading.check(check, config)
    reading.check(_metrics, reading.make_with_defaults(Config))
    switches = reading.make_with_defaults(Switches)
    if switches.colocated and switches.standalone:
        reading.faults.append("--colocated-rescheduling-mode and --standalone-rescheduling-mode exclude each other")
    return switches, config


def _policies(config: Config) -> Iterator[str]:
    if not config.policies:
        yield "--rescheduling-policies is empty"


def _metrics(config: Config) -> Iterator[str]:
    for infer_type in ("decode", "neutral"):
        if fault := metric_fault(config.target(infer_type).metric):
            yield f"--rescheduling-{infer_type}-load-metric {fault}"


def _selection(config: Config) -> Iterator[str]:
    unit, order, value = config.selection.unit, config.selection.order, config.selection.value
    fault = ""
    if unit is Unit.RATIO:
        fault = "" if 0 <= value <= 1 else "a RATIO lies in (0, 1]"
    elif value != int(value):
        fault = f"a {unit} is a whole number"
    elif value < AS_NEEDED and not (unit is Unit.NUM_REQ and value == ALL):
        fault = f"a {unit} is not negative"
    if value == AS_NEEDED and order is Order.FCW:
        fault = "0 (as needed) counts tokens that run, and FCW takes what waits: give a number"
    if fault:
        yield f"--rescheduling-req-select-value {value:g}: {fault}"
