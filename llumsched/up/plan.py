# SPDX-License-Identifier: Apache-2.0
"""The commands of a cluster, from the settings of `llumnix up`."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from llumlet.process import kinds
from llumlet.process.addresses import Address, is_loopback
from llumlet.process.kinds import MARK, Kind
from llumlet.process.settings import Group, entries, field_of
from llumlet.protocol.infer_type import InferType
from llumsched.contract import CMS_PORT, SCHEDULER_PORT
from llumsched.gateway.config import MOST_WORKERS
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.reader import PolicyError, built_in_policies
from llumsched.scaling.scaling_config import BOUNDS, Bounds, ScalingConfig
from llumsched.scaling.scaling_config import faults as scaling_faults
from llumsched.up import device, hub
from llumsched.up.autoscaler import LEAVE_S, AutoscalePlan
from llumsched.up.component import ComponentSpec
from llumsched.up.fleet import ClusterPlan
from llumsched.up.ports import free_port, free_ports, is_free

HOST = "127.0.0.1"
GATEWAY_PORT = 8001
METRICS_PORT = 8004
MOST_ENGINES = 256
START_TIMEOUT_S = 60.0
WARM_UP_PROMPT = range(100, 196)
"""Token ids of each engine's first request, which is slow. A short first request can end an engine with SIGILL on CPUs
with AMX."""
OWN_FLAGS = {
    "--host": "engines listen at loopback, behind the gateway",
    "--port": "each engine gets one of its own; `--port` before `--` is the gateway's",
    "--enable-llumlet": "it is on",
    "--llumlet-cms": "it is the scheduler started here",
    "--llumlet-port": "each engine takes a free one",
    "--llumlet-instance-id": "they are engine-0, engine-1, …",
    "--api-key": "the gateway sends requests on as they come, and asks engines for their models without a key",
}
"""Flags of `vllm serve` that are set here, with the reason why users may not."""
_BY_PRIORITY: Final = "virtual-usage"
"""The dispatch policy that needs two more settings: moves by the same load formula, and engines that serve by
priority."""
_DRAIN: Final = "--llumlet-drain-seconds"
_QUEUE: Final = "--scheduling-policy"
_CONFIG_ELSEWHERE: Final = ("--hf-config-path", "--config-format")
_WIDTH_FLAGS = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp"))


_cluster = Group("")
_scaling = Group("autoscaling", "These apply with --autoscale.", "--autoscale-")
_SCALING: Final = {entry.field: entry.setting for entry in entries(ScalingConfig) if entry.field != "bounds"}
"""The scheduler's scaling settings by field, without the bounds."""


def _scaling_field() -> ScalingConfig:
    """The scheduler's scaling settings, under flags of this command."""
    parts = {name: replace(one, group=_scaling, flag=_scaling.flag(name), mode="") for name, one in _SCALING.items()}
    return field_of(ScalingConfig(), **parts)


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The settings of a cluster. Port 0 picks a free one."""

    model: str = _cluster.setting(
        "",
        Kind(str, "MODEL", {"nargs": "?"}),
        "directory of the model, or a name that vLLM knows",
        flag="model",
        common=True,
    )
    num_engines: int = _cluster.setting(
        2, kinds.integer(at_least=1, at_most=MOST_ENGINES), "number of engines", flag="--engines", common=True
    )
    autoscale: Bounds | None = _cluster.setting(
        None,
        BOUNDS,
        "number of engines, from MIN to MAX as the load demands and MIN at first; replaces --engines",
        common=True,
    )
    scaling: ScalingConfig = _scaling_field()
    host: str = _cluster.setting(
        HOST, kinds.text("HOST"), "address the gateway listens on; everything else listens on loopback", common=True
    )
    port: int = _cluster.setting(GATEWAY_PORT, kinds.port(), "port of the gateway; 0 picks a free port", common=True)
    scheduler_port: int = _cluster.setting(
        SCHEDULER_PORT, kinds.port(), "port of the scheduler and its web page; 0 picks a free port"
    )
    cms_port: int = _cluster.setting(CMS_PORT, kinds.port(), "port to which the engines report; 0 picks a free port")
    metrics_port: int = _cluster.setting(
        METRICS_PORT,
        kinds.port(),
        "loopback port of the gateway's metrics; 0 picks a free port. If the port is taken, no metrics are served",
    )
    scheduling_policy: str = _cluster.setting(
        "load-balance",
        kinds.text("NAME"),
        f"policy that chooses the engine for a request: {', '.join(built_in_policies())}, or a .yaml file",
        common=True,
    )
    enable_rescheduling: bool = _cluster.setting(
        True, MARK, "move running requests from hot engines to cold ones", common=True
    )
    gateway_workers: int = _cluster.setting(
        1, kinds.integer(at_least=1, at_most=MOST_WORKERS), "number of gateway processes", common=True
    )
    share_gpus: bool = _cluster.setting(
        False, MARK, "let every engine use all GPUs, instead of GPUs of its own", common=True
    )
    insecure: bool = _cluster.setting(
        False,
        MARK,
        "allow the gateway to listen beyond this machine without keys or TLS; it then accepts every client",
        common=True,
    )
    drain_s: float = _cluster.setting(
        25.0, kinds.seconds(), "longest time for streams to end when everything stops, in seconds; 0 cuts them at once"
    )
    start_timeout_s: float = _cluster.setting(
        600.0, kinds.seconds(above=0), "longest time for an engine to become ready, in seconds", flag="--start-timeout"
    )
    engine_args: tuple[str, ...] = ()

    @property
    def most_engines(self) -> int:
        return self.autoscale.most if self.autoscale is not None else self.num_engines

    @property
    def first_engines(self) -> int:
        """Number of engines at the start."""
        return self.autoscale.least if self.autoscale is not None else self.num_engines


def _host_faults(config: UpConfig) -> Iterator[str]:
    if not (config.insecure or is_loopback(config.host)):
        yield (
            f"--host {config.host} is not a loopback address: give --insecure as well, or start a `llumnix gateway` "
            "beside this, with --api-key-file, --ssl-certfile and --ssl-keyfile"
        )


def _port_faults(config: UpConfig) -> Iterator[str]:
    ports = {
        "--port": (config.host, config.port),
        "--scheduler-port": (HOST, config.scheduler_port),
        "--cms-port": (HOST, config.cms_port),
    }
    flags_of: dict[int, str] = {}
    for flag, (host, port) in ports.items():
        if port and port in flags_of:
            yield f"{flag} and {flags_of[port]} are both {port}"
        elif port and not is_free(host, port):
            yield f"{flag} {port} of {host} is taken; 0 takes any free one"
        flags_of.setdefault(port, flag)


def _policy_faults(config: UpConfig) -> list[str]:
    try:
        load_policy(config.scheduling_policy, Mode.FULL)
    except PolicyError as error:
        return error.faults
    return []


def _engine_faults(config: UpConfig) -> Iterator[str]:
    for argument in config.engine_args:
        flag = _flag_of(argument)
        if flag in OWN_FLAGS:
            yield f"{flag} cannot be given for the engines: {OWN_FLAGS[flag]}"


def _model_faults(config: UpConfig) -> Iterator[str]:
    if not config.model:
        yield "MODEL is missing"
    if _looks_like_a_path(config.model) and not Path(config.model).is_dir():
        yield f"MODEL {config.model} is not a directory"
    if device.vllm_command() is None:
        yield "`vllm` was not found, neither beside this Python nor in PATH"


def _gpu_faults(config: UpConfig) -> Iterator[str]:
    if config.share_gpus or device.vllm_command() is None or device.vllm_is_for_cpu():
        return
    wanted, there = config.most_engines * _gpus_per_engine(config.engine_args), len(device.gpus(os.environ))
    if wanted > there:
        yield (
            f"{config.most_engines} engines want {wanted} GPUs, and {there} are here; with --share-gpus all engines "
            "use all of them (give each a part of the memory: -- --gpu-memory-utilization 0.4)"
        )


def _autoscale_faults(config: UpConfig) -> Iterator[str]:
    if config.autoscale is None:
        return
    if config.autoscale.most > MOST_ENGINES:
        yield f"--autoscale {config.autoscale}: more than {MOST_ENGINES} engines"
    yield from scaling_faults(config.scaling, _scaling.prefix)


CHECKS: Final = (
    _host_faults,
    _port_faults,
    _policy_faults,
    _engine_faults,
    _model_faults,
    _gpu_faults,
    _autoscale_faults,
)
"""Checks that yield the faults that keep the cluster from starting, a sentence each."""


def model_fault(config: UpConfig) -> str:
    """The reason why no engine can load the model; "" if none is known. Takes some seconds."""
    if any(_last_value(config.engine_args, flag) is not None for flag in _CONFIG_ELSEWHERE):
        return ""
    return hub.fault(config.model, _last_value(config.engine_args, "--revision"))


def plan_of(config: UpConfig, environment: Mapping[str, str] = os.environ) -> ClusterPlan:
    """The components of a cluster, with free ports."""
    *engine_ports, spare_gateway, spare_scheduler, spare_cms, spare_metrics = free_ports(config.first_engines + 4)
    port = config.port or spare_gateway
    scheduler = Address(HOST, config.scheduler_port or spare_scheduler)
    cms = Address(HOST, config.cms_port or spare_cms)
    gateway = f"http://{Address(_reachable(config.host), port)}"
    return ClusterPlan(
        scheduler=_scheduler(config, scheduler, cms),
        gateway=_gateway(config, port, config.metrics_port or spare_metrics, scheduler, f"{gateway}/healthz"),
        engines=tuple(
            _engine(config, index, f"engine-{index}", own, cms, environment) for index, own in enumerate(engine_ports)
        ),
        models_url=f"{gateway}/v1/models",
        model=served_name(config),
        greeting=_greeting(config, gateway, scheduler, cms),
        drain_s=config.drain_s,
        autoscale=_autoscale(config, scheduler, cms, environment),
    )


def _autoscale(
    config: UpConfig, scheduler: Address, cms: Address, environment: Mapping[str, str]
) -> AutoscalePlan | None:
    if config.autoscale is None:
        return None

    def engine(place: int, life: int) -> ComponentSpec:
        name = f"engine-{place}.{life}" if life else f"engine-{place}"
        return _engine(config, place, name, free_port(), cms, environment)

    asked = urlencode({"model": served_name(config), "infer_type": InferType.NEUTRAL})
    return AutoscalePlan(config.autoscale, engine, f"http://{scheduler}/scale?{asked}", f"http://{scheduler}/instances")


def served_name(config: UpConfig) -> str:
    """The model's name for clients."""
    return _last_value(config.engine_args, "--served-model-name") or config.model


def _scheduler(config: UpConfig, address: Address, cms: Address) -> ComponentSpec:
    command = [*_llumnix("scheduler"), "--host", address.host, "--port", str(address.port), "--cms", f"listen://{cms}"]
    command += ["--scheduling-policy", config.scheduling_policy]
    if config.enable_rescheduling:
        command += ["--enable-rescheduling", "--colocated-rescheduling-mode"]
        if config.scheduling_policy == _BY_PRIORITY:
            command += ["--rescheduling-neutral-load-metric", "virtual_usage"]
    if config.autoscale is not None:
        command += ["--scaling", str(config.autoscale), *_scaling_flags(config.scaling)]
    return ComponentSpec("scheduler", tuple(command), f"http://{address}/healthz", START_TIMEOUT_S)


def _scaling_flags(config: ScalingConfig) -> Iterator[str]:
    """The scheduler's flags for settings that differ from the default."""
    default = ScalingConfig()
    for name, setting in _SCALING.items():
        if (value := getattr(config, name)) != getattr(default, name):
            yield from (setting.flag, str(value))


def _gateway(config: UpConfig, port: int, metrics_port: int, scheduler: Address, ready_url: str) -> ComponentSpec:
    command = [*_llumnix("gateway"), "--host", config.host, "--port", str(port), "--metrics-port", str(metrics_port)]
    command += ["--scheduler-endpoints", str(scheduler), "--workers", str(config.gateway_workers)]
    command += ["--shutdown-timeout", f"{config.drain_s:g}s"]
    if config.insecure:
        command.append("--insecure")
    tokenizer = _last_value(config.engine_args, "--tokenizer") or config.model
    # A name costs a look at the hub, and ends the gateway if there is no tokenizer that it can read.
    if Path(tokenizer).is_dir() or load_policy(config.scheduling_policy, Mode.FULL).heeds_prefixes:
        command += ["--tokenizer-path", tokenizer]
        template = _last_value(config.engine_args, "--chat-template")
        if template is not None and Path(template).is_file():
            command += ["--chat-template", template]
    return ComponentSpec("gateway", tuple(command), ready_url, START_TIMEOUT_S)


def _engine(
    config: UpConfig, index: int, name: str, port: int, cms: Address, environment: Mapping[str, str]
) -> ComponentSpec:
    vllm = device.vllm_command()
    assert vllm is not None, "CHECKS were not made"
    command = [vllm, "serve", config.model, "--host", HOST, "--port", str(port)]
    command += ["--enable-llumlet", "--llumlet-cms", str(cms), "--llumlet-instance-id", name]
    if config.autoscale is not None and _last_value(config.engine_args, _DRAIN) is None:
        # Who leaves has all the time that its streams take; `ClusterPlan.drain_s` counts when everything stops.
        command += [_DRAIN, f"{LEAVE_S:.0f}"]
    if config.scheduling_policy == _BY_PRIORITY and _last_value(config.engine_args, _QUEUE) is None:
        command += [_QUEUE, "priority"]
    cores: list[int] = []
    own: dict[str, str] = {"VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1")}
    if device.vllm_is_for_cpu():
        cores = device.cores_of(index, config.most_engines)
        own |= device.cpu_environment(config.most_engines, len(cores), environment)
    elif not config.share_gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(
            device.own_first(device.gpus(environment), index, _gpus_per_engine(config.engine_args))
        )
    engine = f"http://{HOST}:{port}"
    warm_up = {"model": served_name(config), "prompt": list(WARM_UP_PROMPT), "max_tokens": 2}
    return ComponentSpec(
        name,
        (*command, *config.engine_args),
        f"{engine}/health",
        config.start_timeout_s,
        environment=own,
        warm_up=(f"{engine}/v1/completions", warm_up),
        cores=tuple(cores),
    )


def _greeting(config: UpConfig, gateway: str, scheduler: Address, cms: Address) -> str:
    body = f'{{"model": "{served_name(config)}", "prompt": "Hello", "max_tokens": 16}}'
    return f"""llumnix up: {_engines(config)} ready

    {gateway}            the OpenAI API
    http://{scheduler}            the cluster, live
    llumnix top{_named(scheduler, cms)}

    curl {gateway}/v1/completions -H 'Content-Type: application/json' \\
         -d {shlex.quote(body)}
"""


def _named(scheduler: Address, cms: Address) -> str:
    """Flags with which commands find this cluster; "" if they need none."""
    if cms.port != scheduler.port + 1:
        return f" --cms {cms} --scheduler {scheduler}"
    return "" if scheduler.port == SCHEDULER_PORT else f" --cluster {scheduler}"


def _engines(config: UpConfig) -> str:
    number = config.first_engines
    more = f" of up to {config.most_engines}" if config.autoscale is not None else ""
    return f"{number}{more} engine{'s are' if number > 1 or more else ' is'}"


def _llumnix(name: str) -> list[str]:
    # -P: this directory must not stand in for a package of the same name.
    return [sys.executable, "-P", "-m", "llumsched.cli", name]


def _reachable(host: str) -> str:
    """An address of this machine for a server that listens on `host`."""
    return {"0.0.0.0": HOST, "::": "::1"}.get(host, host)


def _gpus_per_engine(arguments: tuple[str, ...]) -> int:
    width = 1
    for flags in _WIDTH_FLAGS:
        for flag in flags:
            text = _last_value(arguments, flag)
            if text is not None and text.isdigit():
                width *= max(1, int(text))
    return width


def _last_value(arguments: tuple[str, ...], flag: str) -> str | None:
    """The effective value of `--flag VALUE` or `--flag=VALUE`; the first of several values."""
    value = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if _flag_of(argument) == flag:
            _, equals, after = argument.partition("=")
            value = after if equals else following
    return value


def _flag_of(argument: str) -> str:
    """The flag in an argument. vLLM takes underscores for dashes in long flags."""
    flag = argument.partition("=")[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))
