# SPDX-License-Identifier: Apache-2.0
"""From what `llumnix up` was told to the commands that it runs."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llumlet.loopback import is_loopback
from llumlet.types import Address
from llumsched.gateway.config import MOST_WORKERS
from llumsched.up import device
from llumsched.up.cluster import Plan
from llumsched.up.component import ComponentSpec
from llumsched.up.ports import free_ports, is_free

HOST = "127.0.0.1"
GATEWAY_PORT = 8001
SCHEDULER_PORT = 8002
CMS_PORT = 8003
MOST_ENGINES = 256
START_TIMEOUT_S = 60.0
WARM_UP_PROMPT = range(100, 196)
"""Token ids of each engine's first request. The first one is slow; and on CPUs with AMX, where it is of a few tokens
only, it can end the engine with SIGILL."""
OWN_FLAGS = {
    "--host": "engines listen at loopback, behind the gateway",
    "--port": "each engine gets one of its own; `--port` before `--` is the gateway's",
    "--enable-llumlet": "it is on",
    "--llumlet-cms": "it is the scheduler started here",
    "--llumlet-port": "each engine takes a free one",
    "--llumlet-instance-id": "they are engine-0, engine-1, …",
    "--api-key": "the gateway sends requests on as they come, and asks engines for their models without a key",
}
"""Flags of `vllm serve` that are set here, and why nobody else may."""
_WIDTH_FLAGS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Ports are 0 for any free one."""

    model: str
    num_engines: int = 2
    host: str = HOST
    port: int = GATEWAY_PORT
    scheduler_port: int = SCHEDULER_PORT
    cms_port: int = CMS_PORT
    scheduling_policy: str = "load-balance"
    enable_rescheduling: bool = True
    gateway_workers: int = 1
    share_gpus: bool = False
    insecure: bool = False
    """The gateway listens beyond this machine, where it asks nobody who they are."""
    drain_s: float = 25.0
    start_timeout_s: float = 600.0
    engine_args: tuple[str, ...] = ()


def faults_of(config: UpConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Everything that would keep the cluster from starting, a sentence each."""
    found = []
    if not 1 <= config.num_engines <= MOST_ENGINES:
        found.append(f"--engines must be from 1 to {MOST_ENGINES}")
    if not 1 <= config.gateway_workers <= MOST_WORKERS:
        found.append(f"--gateway-workers must be from 1 to {MOST_WORKERS}")
    if config.drain_s < 0:
        found.append("--drain-seconds must not be negative")
    if config.start_timeout_s <= 0:
        found.append("--start-timeout must be positive")
    if not (config.insecure or is_loopback(config.host)):
        found.append(
            f"--host {config.host} is not a loopback address: give --insecure as well, or start a `llumnix gateway` "
            "beside this, with --api-key-file, --ssl-certfile and --ssl-keyfile"
        )
    found += _port_faults(config)
    for argument in config.engine_args:
        flag = argument.partition("=")[0]
        if flag in OWN_FLAGS:
            found.append(f"{flag} cannot be given for the engines: {OWN_FLAGS[flag]}")
    if _looks_like_a_path(config.model) and not Path(config.model).is_dir():
        found.append(f"MODEL {config.model} is no directory")
    if device.vllm_command() is None:
        found.append("`vllm` was not found, neither beside this Python nor in PATH")
    elif config.num_engines >= 1:
        found += _gpu_faults(config, environment)
    return found


def plan_of(config: UpConfig, environment: Mapping[str, str] = os.environ) -> Plan:
    """The components. Ports are chosen here: they are free now."""
    *engine_ports, spare_gateway, spare_scheduler, spare_cms = free_ports(config.num_engines + 3)
    port = config.port or spare_gateway
    scheduler = Address(HOST, config.scheduler_port or spare_scheduler)
    cms = Address(HOST, config.cms_port or spare_cms)
    gateway = f"http://{Address(_reachable(config.host), port)}"
    return Plan(
        scheduler=_scheduler(config, scheduler, cms),
        gateway=_gateway(config, port, scheduler, f"{gateway}/healthz"),
        engines=tuple(_engine(config, index, own, cms, environment) for index, own in enumerate(engine_ports)),
        models_url=f"{gateway}/v1/models",
        model=served_name(config),
        greeting=_greeting(config, gateway, scheduler, cms),
        drain_s=config.drain_s,
    )


def served_name(config: UpConfig) -> str:
    """Under which clients ask for the model."""
    return _last_value(config.engine_args, "--served-model-name") or config.model


def _scheduler(config: UpConfig, address: Address, cms: Address) -> ComponentSpec:
    command = [*_llumnix("scheduler"), "--host", address.host, "--port", str(address.port), "--cms", f"listen://{cms}"]
    command += ["--scheduling-policy", config.scheduling_policy]
    if config.enable_rescheduling:
        command += ["--enable-rescheduling", "--colocated-rescheduling-mode"]
    return ComponentSpec("scheduler", tuple(command), f"http://{address}/healthz", START_TIMEOUT_S)


def _gateway(config: UpConfig, port: int, scheduler: Address, ready_url: str) -> ComponentSpec:
    command = [*_llumnix("gateway"), "--host", config.host, "--port", str(port)]
    command += ["--scheduler-endpoints", str(scheduler), "--workers", str(config.gateway_workers)]
    command += ["--shutdown-timeout", f"{config.drain_s:g}s"]
    if config.insecure:
        command.append("--insecure")
    if Path(config.model).is_dir():
        command += ["--tokenizer-path", f"{served_name(config)}={config.model}"]
    return ComponentSpec("gateway", tuple(command), ready_url, START_TIMEOUT_S)


def _engine(config: UpConfig, index: int, port: int, cms: Address, environment: Mapping[str, str]) -> ComponentSpec:
    name = f"engine-{index}"
    vllm = device.vllm_command()
    assert vllm is not None, "faults_of was not asked"
    command = [vllm, "serve", config.model, "--host", HOST, "--port", str(port)]
    command += ["--enable-llumlet", "--llumlet-cms", str(cms), "--llumlet-instance-id", name]
    cores: list[int] = []
    own: dict[str, str] = {"VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1")}
    if device.vllm_is_for_cpu():
        cores = device.cores_of(index, config.num_engines)
        own |= device.cpu_environment(config.num_engines, len(cores), environment)
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
    return f"""llumnix up: {config.num_engines} engines are ready

    {gateway}            the OpenAI API
    http://{scheduler}            the cluster, live
    llumnix top --cms {cms} --scheduler {scheduler}

    curl {gateway}/v1/completions -H 'Content-Type: application/json' \\
         -d {shlex.quote(body)}
"""


def _llumnix(name: str) -> list[str]:
    # -P: this directory must not stand in for a package of the same name.
    return [sys.executable, "-P", "-m", "llumsched.cli", name]


def _reachable(host: str) -> str:
    """An address of this machine on which a server that listens at `host` answers."""
    return {"0.0.0.0": HOST, "::": "::1"}.get(host, host)


def _port_faults(config: UpConfig) -> list[str]:
    ports = {
        "--port": (config.host, config.port),
        "--scheduler-port": (HOST, config.scheduler_port),
        "--cms-port": (HOST, config.cms_port),
    }
    found, flags_of = [], dict[int, str]()
    for flag, (host, port) in ports.items():
        if not 0 <= port < 65536:
            found.append(f"{flag} {port} is not a port")
        elif port and port in flags_of:
            found.append(f"{flag} and {flags_of[port]} are both {port}")
        elif port and not is_free(host, port):
            found.append(f"{flag} {port} of {host} is taken; 0 takes any free one")
        flags_of.setdefault(port, flag)
    return found


def _gpu_faults(config: UpConfig, environment: Mapping[str, str]) -> list[str]:
    if device.vllm_is_for_cpu() or config.share_gpus:
        return []
    wanted, there = config.num_engines * _gpus_per_engine(config.engine_args), len(device.gpus(environment))
    if wanted <= there:
        return []
    return [
        f"{config.num_engines} engines want {wanted} GPUs, and {there} are here; with --share-gpus all engines use all "
        "of them (give each a part of the memory: -- --gpu-memory-utilization 0.4)"
    ]


def _gpus_per_engine(arguments: tuple[str, ...]) -> int:
    width = 1
    for flags in _WIDTH_FLAGS:
        for flag in flags:
            text = _last_value(arguments, flag)
            if text is not None and text.isdigit():
                width *= max(1, int(text))
    return width


def _last_value(arguments: tuple[str, ...], flag: str) -> str | None:
    """The value that counts of `--flag VALUE` or `--flag=VALUE`; the first, if it has several."""
    value = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == flag:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))
