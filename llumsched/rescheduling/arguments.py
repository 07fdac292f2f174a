# SPDX-License-Identifier: Apache-2.0
"""Whether there is a rescheduler, and where; and what is wrong with its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llumlet.kinds import SWITCH
from llumlet.setting_sources import Reading
from llumsched.policy.reader import PolicyError, is_own_file
from llumsched.rescheduling.config import Config, rescheduling
from llumsched.rescheduling.moves import selection_fault
from llumsched.rescheduling.policies import load_rescheduling_policy


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
    """The settings of a rescheduler; what contradicts itself is added to the faults."""
    config = reading.make(Config)
    for check in (_policies, _selection):
        reading.check(check, config)
    switches = reading.make_with_defaults(Switches)
    if switches.colocated and switches.standalone:
        reading.faults.append("--colocated-rescheduling-mode and --standalone-rescheduling-mode exclude each other")
    return switches, config


def _policies(config: Config) -> Iterator[str]:
    if not config.policies:
        yield "--rescheduling-policies is empty"
    for name in config.policies:
        if is_own_file(name):
            try:
                load_rescheduling_policy(name, config)
            except PolicyError as error:
                yield from error.faults


def _selection(config: Config) -> Iterator[str]:
    if fault := selection_fault(config.selection):
        yield f"--rescheduling-req-select-value {fault}"
