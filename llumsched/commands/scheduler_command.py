# SPDX-License-Identifier: Apache-2.0
"""`llumnix scheduler`: chooses an instance for each request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from llumlet.process import kinds
from llumlet.process.addresses import Address, is_loopback
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import SWITCH
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group, field_of
from llumlet.process.tls import server_faults
from llumlet.protocol.infer_type import InferType
from llumsched import descriptors
from llumsched.cluster.domains import FailoverDomain
from llumsched.cms.store import name_of, store_faults
from llumsched.console.exit_codes import ExitCode
from llumsched.endpoints import Endpoint
from llumsched.policy.constants import FLAG, POLICY_CONSTANTS, Constants
from llumsched.policy.document import Mode, Overrides, Policy, load_policy
from llumsched.policy.metrics import BUILT_IN_CONSTANTS
from llumsched.policy.reader import PolicyError, built_in_policies
from llumsched.rescheduling import switches as rescheduling
from llumsched.rescheduling.rescheduling_config import (
    DOMAIN,
    HEADROOM,
    HEADROOM_HELP,
    MILLISECONDS,
    SHARE,
    STALENESS,
    ReschedulingConfig,
)
from llumsched.scaling.scaling_config import ScalingConfig
from llumsched.scaling.scaling_config import faults as scaling_faults
from llumsched.scheduler import process
from llumsched.scheduler.static_engines import API_KEY_VARIABLE

DESCRIPTION = """Choose an instance for each request of the gateways.

  llumnix scheduler                                      instances report here (--llumlet-cms 127.0.0.1:8003)
  llumnix scheduler --cms redis://10.0.0.5:6379          or to a Redis, which several schedulers can share
  llumnix scheduler --enable-full-mode-scheduling=false --llm-backend-endpoints 10.0.0.1:8000,10.0.0.2:8000
                                                         lite mode: engines of stock vLLM, which do not report
  llumnix scheduler --enable-rescheduling                also move running requests from hot to cold instances

A switch is written --name, --name=true or --name=false. docs/reference/policies.md explains the policies."""

_log = logging.getLogger("llumnix.scheduler")
_OF_CACHES: Final = ("--cache-index-blocks", "--cache-sent-blocks")
_CONSTANTS: Final = (
    "ttft_slo",
    "tpot_slo",
    "ttft_slo_dispatch_threshold",
    "tpot_slo_dispatch_threshold",
    *BUILT_IN_CONSTANTS,
)
"""Settings that override a policy's constants of the same names."""
_dispatch = Group("dispatch", prefix="--dispatch-")
_objectives = Group("objectives")


@dataclass(frozen=True, slots=True)
class LoadOverride:
    metric: str | None = None
    threshold: float | None = None


def _load(infer_type: str) -> LoadOverride:
    flag = f"--dispatch-{infer_type}-load"
    return field_of(
        LoadOverride(),
        metric=_dispatch.part(
            kinds.text("METRIC"),
            f"metric of the load of {infer_type} instances (default: the policy's)",
            flag=f"{flag}-metric",
        ),
        threshold=_dispatch.part(
            kinds.number("LOAD"),
            f"load from which on {infer_type} instances get no requests, in the unit of the metric (default: the "
            "policy's)",
            flag=f"{flag}-threshold",
        ),
    )


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The mode, the policy and its overrides; None keeps the policy's value."""

    full_mode: bool = _dispatch.setting(
        True,
        SWITCH,
        "take load from the reports of instances (full mode); false takes it from what was sent to them (lite mode)",
        flag="--enable-full-mode-scheduling",
    )
    policy: str = _dispatch.setting(
        "load-balance",
        kinds.text("NAME"),
        f"policy that chooses the instance for a request: {', '.join(built_in_policies())}, or a .yaml file",
        flag="--scheduling-policy",
        common=True,
    )
    neutral: LoadOverride = _load("neutral")
    prefill: LoadOverride = _load("prefill")
    decode: LoadOverride = _load("decode")
    top_k: int | None = _dispatch.setting(
        None, kinds.integer(at_least=1), "number of the best instances to choose among (default: the policy's, 1)"
    )
    failover_domain: FailoverDomain | None = _dispatch.setting(
        None,
        DOMAIN,
        "instances that are assumed to fail together (default: the policy's, instance)",
        flag="--failover-domain",
    )
    staleness_s: float | None = _dispatch.setting(
        None,
        STALENESS,
        "send nothing to an instance whose last status is older than this many seconds; from 10 s up, that is also "
        "when it counts as gone (default: the policy's, 10)",
        flag="--instance-staleness-seconds",
    )
    priority_headroom: float | None = _dispatch.setting(None, HEADROOM, HEADROOM_HELP, flag="--priority-headroom")

    ttft_slo: float | None = _objectives.setting(
        None,
        MILLISECONDS,
        "objective for the time to first token of requests whose gateway names none, in milliseconds (default: the "
        "policy's, 6000)",
    )
    tpot_slo: float | None = _objectives.setting(
        None,
        MILLISECONDS,
        "objective for the mean time between two tokens of requests whose gateway names none, in milliseconds "
        "(default: the policy's, 50)",
    )
    ttft_slo_dispatch_threshold: float | None = _objectives.setting(
        None, SHARE, "share of the objective that the predicted time to first token may reach (default: the policy's)"
    )
    tpot_slo_dispatch_threshold: float | None = _objectives.setting(
        None,
        SHARE,
        "share of the objective that the predicted time between two tokens may reach (default: the policy's)",
    )

    policy_constants: Constants = _dispatch.setting(
        (),
        POLICY_CONSTANTS,
        "values for constants of the policy, or of the rescheduling policies (repeatable)",
        flag=FLAG,
    )

    @property
    def mode(self) -> Mode:
        return Mode.FULL if self.full_mode else Mode.LITE

    def load_policy(self, optional: frozenset[str]) -> Policy:
        """The policy with its overrides. `optional`: constants that this policy need not have. Raises PolicyError."""
        loads: dict[InferType, LoadOverride] = {each: getattr(self, each) for each in InferType}
        overrides = Overrides(
            {each: load.metric for each, load in loads.items() if load.metric is not None},
            {each: load.threshold for each, load in loads.items() if load.threshold is not None},
            self.top_k,
            self.failover_domain,
            self.staleness_s,
            {name: value for name in _CONSTANTS if (value := getattr(self, name)) is not None}
            | dict(self.policy_constants),
            optional,
        )
        return load_policy(self.policy, self.mode, overrides)


SETTINGS: Final = (process.SchedulerConfig, Dispatch, rescheduling.Switches, ReschedulingConfig, ScalingConfig)


def prepare(reading: Reading) -> process.SchedulerConfig | None:
    dispatch = reading.make(Dispatch)
    reading.faults += reading.of_other_modes(dispatch.mode)
    switches, config = rescheduling.prepare(reading)
    scaling = reading.make(ScalingConfig)
    reading.check(scaling_faults, scaling)
    reading.check(_rescheduling_faults, switches, dispatch)
    constants, shared = dict(dispatch.policy_constants), frozenset[str]()
    if switches.in_scheduler:
        shared = rescheduling.names_set(reading.make(ReschedulingConfig)).union(constants)
    policy: Any = None
    try:
        policy = dispatch.load_policy(shared)
    except PolicyError as error:
        reading.faults += error.faults
    if switches.in_scheduler:
        of_dispatch = constants if policy is None else policy.constants
        reading.check(rescheduling.constant_faults, config, {*_CONSTANTS, *of_dispatch})
    made = reading.make(
        process.SchedulerConfig,
        policy=policy,
        backend_api_key=os.environ.get(API_KEY_VARIABLE, ""),
        rescheduling=config if switches.in_scheduler else None,
        scaling=scaling,
    )
    for check in (_cms_faults, _host_faults, _tls_faults, _profile_faults):
        reading.check(check, made)
    reading.check(_endpoint_faults, made, dispatch)
    if policy is not None:
        reading.check(_cache_faults, made, reading.given)
    return None if reading.faults else made


def _cms_faults(config: process.SchedulerConfig) -> list[str]:
    return [f"--cms {fault}" for fault in store_faults(config.cms)]


def _rescheduling_faults(switches: rescheduling.Switches, dispatch: Dispatch) -> Iterator[str]:
    if switches.standalone:
        yield "--standalone-rescheduling-mode is for `llumnix rescheduler`"
    if switches.in_scheduler and dispatch.mode is Mode.LITE:
        yield "rescheduling needs full mode: engines that report nothing cannot move requests"


def _endpoint_faults(config: process.SchedulerConfig, dispatch: Dispatch) -> Iterator[str]:
    if dispatch.mode is Mode.LITE and not config.backend_endpoints:
        yield "--enable-full-mode-scheduling=false needs --llm-backend-endpoints"


def _cache_faults(config: process.SchedulerConfig, given: Container[str]) -> Iterator[str]:
    if config.knows_caches:
        return
    for flag in _OF_CACHES:
        if flag in given:
            yield (
                f"{flag} has no effect with the policy {config.policy.name}, which reads no prefix cache: "
                "use the policy prefix-cache, or --enable-cache-aware-scheduling to follow caches under any policy"
            )


def _host_faults(config: process.SchedulerConfig) -> Iterator[str]:
    is_guarded = config.service_token_file and config.ssl_certfile
    if not (is_guarded or config.insecure or is_loopback(config.host)):
        yield (
            f"--host {config.host} is not a loopback address, and whoever reaches this scheduler sees and influences "
            "where requests go: it needs --service-token-file, --ssl-certfile and --ssl-keyfile, or else --insecure"
        )


def _tls_faults(config: process.SchedulerConfig) -> list[str]:
    return server_faults(config.ssl_certfile, config.ssl_keyfile)


def _profile_faults(config: process.SchedulerConfig) -> Iterator[str]:
    try:
        process.profiles_of(config)
    except ValueError as error:
        yield str(error)


def _warnings(config: process.SchedulerConfig) -> Iterator[str]:
    """Warnings about settings that are valid and probably not intended."""
    if config.cache_aware and not config.policy.heeds_prefixes:
        yield (
            f"--enable-cache-aware-scheduling changes no placement: no formula of the policy {config.policy.name} "
            "reads prefix caches; the policy prefix-cache does"
        )


def run(config: process.SchedulerConfig, credentials: Credentials) -> int:
    import uvloop

    descriptors.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(_serve(replace(config, credentials=credentials)))
    except (OSError, ValueError) as error:
        print(f"llumnix scheduler: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.OK


async def _serve(config: process.SchedulerConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    for warning in _warnings(config):
        _log.warning(warning)
    running = await process.serve(config)
    try:
        policy = config.policy
        source = name_of(config.cms) if policy.mode is Mode.FULL else ", ".join(map(str, config.backend_endpoints))
        url = Endpoint(Address(running.host, running.port), is_tls=bool(config.ssl_certfile)).url("")
        _log.info("at %s: %s, %s mode, %s", url, policy.name, policy.mode, source)
        await ended.wait()
    finally:
        await running.close()
