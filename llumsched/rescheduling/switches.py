# SPDX-License-Identifier: Apache-2.0
"""Settings that enable the rescheduler, and the checks of its configuration."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from llumlet.process.kinds import SWITCH
from llumlet.process.setting_sources import Reading
from llumsched.policy.constants import FLAG
from llumsched.policy.reader import PolicyError, is_own_file
from llumsched.rescheduling.planning.moves import selection_fault
from llumsched.rescheduling.planning.policies import load_rescheduling_policy
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig, rescheduling

_LEAVE: Final = "tpot_migrate_out_ceil_threshold"
_BELOW_LEAVE: Final[Mapping[str, str]] = {
    "tpot_slo_dispatch_threshold": "what may leave an instance might come there",
    "tpot_migrate_out_floor_threshold": "an instance would be too slow and too idle at a time",
}
"""Constants that must not exceed that one, with the reason."""


@dataclass(frozen=True, slots=True)
class Switches:
    enable: bool | None = rescheduling.setting(
        None, SWITCH, "run a rescheduler; false disables it in every mode", flag="--enable-rescheduling", common=True
    )
    colocated: bool = rescheduling.setting(
        False, SWITCH, "run the rescheduler inside the scheduler process", flag="--colocated-rescheduling-mode"
    )
    standalone: bool = rescheduling.setting(
        False, SWITCH, "run the rescheduler in a process of its own", flag="--standalone-rescheduling-mode"
    )

    @property
    def enabled(self) -> bool:
        """`--enable-rescheduling` if given; otherwise true if a mode was given."""
        return self.colocated or self.standalone if self.enable is None else self.enable

    @property
    def in_scheduler(self) -> bool:
        return self.enabled and not self.standalone


def prepare(reading: Reading) -> tuple[Switches, ReschedulingConfig]:
    """The settings of a rescheduler. Contradictions are added to the faults."""
    config = reading.make(ReschedulingConfig)
    for check in (_policies, _selection, _said_twice):
        reading.check(check, config)
    switches = reading.make(Switches)
    if switches.colocated and switches.standalone:
        reading.faults.append("--colocated-rescheduling-mode and --standalone-rescheduling-mode exclude each other")
    return switches, config


def constants(config: ReschedulingConfig) -> Mapping[str, Mapping[str, float]]:
    """The constants of the valid policies, by policy."""
    found = {}
    for name in config.policies:
        with suppress(PolicyError):
            found[name] = load_rescheduling_policy(name, config).constants
    return found


def names_set(config: ReschedulingConfig) -> frozenset[str]:
    """Settings shared with dispatch that a rescheduler uses."""
    return _used(config, constants(config)) | {"failover_domain", "staleness_s"}


def _used(config: ReschedulingConfig, by_policy: Mapping[str, Mapping[str, float]]) -> frozenset[str]:
    """Names of given constants that a policy defines."""
    used = (found.keys() & config.constants(of_own_file=is_own_file(name)).keys() for name, found in by_policy.items())
    return frozenset().union(*used)


def constant_faults(config: ReschedulingConfig, used_elsewhere: Container[str] = ()) -> Iterator[str]:
    """`used_elsewhere`: names of constants that dispatch uses or reports itself."""
    by_policy = constants(config)
    used = _used(config, by_policy)
    of_files = frozenset().union(*(found for name, found in by_policy.items() if is_own_file(name)))
    for name in config.objectives | config.built_in_constants:
        if name not in used and name not in used_elsewhere:
            instead = f"; a file of one's own takes {FLAG} {name}=VALUE" if name in of_files else ""
            yield f"--{name.replace('_', '-')}: none of --rescheduling-policies has a use for it{instead}"
    for name, _ in config.policy_constants:
        if name not in used and name not in used_elsewhere:
            yield f"{FLAG} {name}: none of the policies defines it"
    for policy, of_policy in by_policy.items():
        for lower, why in _BELOW_LEAVE.items():
            if lower in of_policy and _LEAVE in of_policy and of_policy[_LEAVE] < of_policy[lower]:
                yield f"{policy}: {_LEAVE} {of_policy[_LEAVE]:g} is below {lower} {of_policy[lower]:g}: {why}"


def _policies(config: ReschedulingConfig) -> Iterator[str]:
    if not config.policies:
        yield "--rescheduling-policies is empty"
    for name in config.policies:
        if is_own_file(name):
            try:
                load_rescheduling_policy(name, config)
            except PolicyError as error:
                yield from error.faults


def _said_twice(config: ReschedulingConfig) -> Iterator[str]:
    for name, _ in config.policy_constants:
        if name in config.objectives | config.built_in_constants:
            yield f"{FLAG} {name}: --{name.replace('_', '-')} says it as well"


def _selection(config: ReschedulingConfig) -> Iterator[str]:
    if fault := selection_fault(config.selection):
        yield f"--rescheduling-req-select-value {fault}"
