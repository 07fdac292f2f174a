# SPDX-License-Identifier: Apache-2.0
"""The llumlet's configuration: the settings of `vllm serve`, one frozen object, and the way it reaches child processes.

`vllm serve` parses the flags once, in the parent. The result travels to the EngineCore and API server processes as JSON
in the environment variable `LLUMNIX_LLUMLET`: vLLM's own config objects are hashed into its compilation cache keys, so
values that differ between instances (a port, an id) must not be put there.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import socket
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from llumlet.contract.cms.reporter import cms_faults
from llumlet.process import kinds, setting_sources, settings
from llumlet.process.addresses import Address
from llumlet.process.credential_files import CredentialFiles, CredentialsError
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK, Kind
from llumlet.process.redis_url import REDIS_SCHEMES, RedisUrl, split_stores
from llumlet.process.settings import Group
from llumlet.protocol.infer_type import InferType
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.hosts import address_of_interface, reachable_host
from vllm_llumnix.kv.settings import UNLIMITED, Limit, MooncakeSettings, NixlSettings, WorkerSettings
from vllm_llumnix.reach import Reach
from vllm_llumnix.switch import CONFIG_VARIABLE
from vllm_llumnix.transport_faults import mooncake_faults, nixl_faults

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ACCEPTABLE = ("vllm", "device", "attention", "parallel")
"""Facts of engines that may differ, by their names in `engine.facts`."""
INSTANCE_TYPES = tuple(map(str, InferType))
TRANSPORTS = ("auto", "local", "tcp", "mooncake", "nixl")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
END_SECONDS = 5
"""What several API servers and their engine have for their end after a drain, before their parent kills them."""
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_RATE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_limit(text: str) -> Limit:
    """`500M` -> 500,000,000 bytes per second, `20%` -> a fifth of the link. Raises ValueError."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())) and 0 < float(match[1]) <= 100:
        return Limit(share=float(match[1]) / 100)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"{text!r} is neither a rate in bytes per second, such as 500000000, 500M or 2G, nor a share, such as 20%"
        )
    return Limit(bytes_per_s=float(match[1]) * _RATE_UNITS[match[2]])


def _instance_id(text: str) -> str:
    if not _INSTANCE_ID.fullmatch(text):
        raise ValueError("must be letters, digits, '.', '_', ':' or '-', at most 128 characters")
    return text


_LIMIT: Final = Kind(parse_limit, "RATE|SHARE")
_llumlet = Group("llumlet", "Live migration of running requests to other instances (vllm-llumnix).", "--llumlet-")


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    enable_llumlet: bool = _llumlet.setting(
        False,
        MARK,
        "Run a llumlet in the engine process: running requests can be moved to and from other instances.",
        flag="--enable-llumlet",
        variable=None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LlumletConfig(CredentialFiles):
    """What one instance's llumlet was told. Seconds, bytes per second and milliseconds as the names say."""

    host: str = _llumlet.setting(
        "127.0.0.1",
        kinds.text("ADDRESS"),
        "Address on which the llumlet's gRPC service and the token relay listen. An address other than loopback needs "
        "mutual TLS and a token, or --llumlet-insecure.",
    )
    port: int = _llumlet.setting(
        0, kinds.port(), "Port of the gRPC service; 0 takes a free one. Data-parallel rank r listens on PORT + r."
    )
    instance_id: str = _llumlet.setting(
        "",
        Kind(_instance_id, "ID"),
        "Name of this instance, unique in the cluster. Default: host name and a random suffix.",
    )
    instance_type: str = _llumlet.setting(
        "neutral", kinds.one_of(INSTANCE_TYPES), "What the scheduler uses this instance for."
    )
    transport: str = _llumlet.setting(
        "auto",
        kinds.one_of(TRANSPORTS),
        "How KV blocks travel. 'local' reads the peer's memory on the same host, 'tcp' connects to where the peer's "
        "workers serve it, 'mooncake' uses the Mooncake transfer engine, 'nixl' uses NIXL; 'auto' picks the first of "
        "local, nixl (with --llumlet-nixl-devices), mooncake (with --llumlet-mooncake-interface or "
        "--llumlet-insecure) and tcp that works between two instances.",
    )
    accept: tuple[str, ...] = _llumlet.setting(
        (),
        kinds.several(kinds.one_of(ACCEPTABLE), "|".join(ACCEPTABLE) + ",..."),
        "Differences to tolerate between engines that exchange requests: the release of vLLM, the kind of GPU or CPU, "
        "the attention backend, the number of workers that a model is split over. Such engines round differently, so "
        "that a moved request may go on with other tokens than it would have had unmoved. Use the same value on every "
        "engine. Empty tolerates none.",
    )
    nixl_devices: str = _llumlet.setting(
        "",
        kinds.text("NAME,..."),
        "Network devices that NIXL may use, in the words of UCX_NET_DEVICES, such as mlx5_0:1 or eth1, or all. Nobody "
        "but the instances may reach them: NIXL authenticates nobody, and lets others read and write all memory of the "
        "process that it runs in.",
    )
    mooncake_protocol: str = _llumlet.setting("tcp", kinds.one_of(MOONCAKE_PROTOCOLS), "What Mooncake runs over.")
    mooncake_devices: str = _llumlet.setting(
        "", kinds.text("NAME,..."), "RDMA devices that Mooncake may use, such as mlx5_0. Default: all."
    )
    mooncake_gpu_direct: bool = _llumlet.setting(
        True, MARK, "Let RDMA devices read and write buffers on the GPU, where they can, instead of in main memory."
    )
    mooncake_interface: str = _llumlet.setting(
        "",
        kinds.text("NAME"),
        "Network interface, isolated from everybody but the instances, under whose address Mooncake is reached: it "
        "authenticates nobody. Its ports listen at all addresses all the same; keep others from them.",
    )
    max_migrations_in: int = _llumlet.setting(
        4, kinds.integer(at_least=0), "How many requests may be on their way into this instance at once."
    )
    max_migrations_out: int = _llumlet.setting(
        4, kinds.integer(at_least=0), "How many requests may be on their way out of this instance at once."
    )
    max_migration_tokens_in: int | None = _llumlet.setting(
        None,
        kinds.integer(at_least=1),
        "How many tokens the requests on their way into this instance may have together. A longer request goes alone. "
        "Default: no limit.",
    )
    max_migration_tokens_out: int | None = _llumlet.setting(
        None, kinds.integer(at_least=1), "The same for requests on their way out of this instance."
    )
    max_migration_kv_ratio_in: float = _llumlet.setting(
        0.25,
        kinds.number("SHARE", above=0, at_most=1),
        "The limit of tokens on their way in as a share of this instance's KV cache: so much of it can moves keep from "
        "the instance's own requests, or one longer request that goes alone.",
    )
    max_migration_kv_ratio_out: float = _llumlet.setting(
        0.25, kinds.number("SHARE", above=0, at_most=1), "The same for requests on their way out of this instance."
    )
    lease_seconds: float = _llumlet.setting(
        30.0,
        kinds.seconds(at_least=1),
        "How long blocks stay reserved, or pinned, for a peer that has fallen silent; no single copy may take longer.",
    )
    stall_budget_ms: float = _llumlet.setting(
        200.0,
        kinds.number("MS", above=0),
        "A move is given up when its last copy would hold the stream up for longer than this.",
    )
    bandwidth_limit: Limit = _llumlet.setting(
        UNLIMITED,
        _LIMIT,
        "Upper bound of what this instance pulls from peers on other hosts: bytes per second, such as 2G, or a share "
        "of what the link gives, such as 20%. Default: unlimited.",
    )
    bandwidth_limit_local: Limit = _llumlet.setting(
        UNLIMITED, _LIMIT, "The same for peers on this host, whose link is the memory."
    )
    exact: bool = _llumlet.setting(
        False, MARK, "Copy every KV block, also those that this instance's prefix cache already holds: bit-exact moves."
    )
    bypass: bool = _llumlet.setting(
        False,
        MARK,
        "Run workers in processes of their own even if there is only one (--distributed-executor-backend mp): requests "
        "can then be moved away with their KV cache while the model hangs.",
    )
    cms: str = _llumlet.setting(
        "",
        kinds.text("HOST:PORT|redis://..."),
        "Cluster metadata stores, separated by commas: schedulers, or a Redis, which may be one behind Sentinels "
        "(redis+sentinel://HOST:PORT,HOST:PORT/SERVICE). They are told of this instance, and of its load whenever that "
        "changes.",
    )
    peers: tuple[str, ...] = _llumlet.setting(
        (),
        kinds.several(Kind(lambda text: str(Address.parse(text))), "HOST:PORT,..."),
        "Llumlets of other instances of the same model: when an engine is lost, its requests go on there from what "
        "their clients have received.",
    )
    drain_seconds: float = _llumlet.setting(
        25.0,
        kinds.seconds(),
        "On SIGTERM, with --llumlet-peers or --llumlet-cms: how long streams may go on while requests move to the "
        "peers. The default fits the 30 seconds that Kubernetes gives; raise both for longer streams. 0: end at once.",
    )
    utility_seconds: float = _llumlet.setting(
        300.0,
        kinds.seconds(at_least=1),
        "How long the engine's loop may be busy with one call, such as loading an adapter, writing a profile or new "
        "weights, or with one step in which a kernel is compiled, before it counts as hung and its streams go on "
        "elsewhere. It gets no new requests meanwhile.",
    )
    priority_ageing_seconds: float = _llumlet.setting(
        60.0,
        kinds.seconds(),
        "With --scheduling-policy priority: how long a request waits at most behind others that came later. From then "
        "on it counts as one of the most urgent of those that wait. 0: for ever.",
    )
    ask_before_preemption: bool = _llumlet.setting(
        False,
        MARK,
        "Where blocks are lacking, wait a tenth of a second for the rescheduler to move a request before one is "
        "preempted. For clusters that run the policy neutral_preemption.",
    )
    insecure: bool = _llumlet.setting(
        False, MARK, "Allow an address other than loopback although nothing is authenticated or encrypted."
    )
    adapt: bool = _llumlet.setting(
        False,
        MARK,
        "Run with a vLLM that differs from the release that the patches are made for, if they go into its files word "
        "for word and the functions that the llumlet relies on are the same. On the command line only: it is needed "
        "before a configuration file is read. Peers must have the same files.",
        variable=None,
    )

    unit: str = ""
    """Names the data-parallel group, which several commands on several hosts can start. Unique in the cluster."""
    api_server_port: int = 0
    served_models: tuple[str, ...] = ()
    """Names of the model at the API server, if it has others than the model's own."""
    num_ranks: int = 1
    """Data-parallel. An engine whose model has no experts does not know: vLLM tells it that it is alone."""

    def credentials(self) -> Credentials:
        """Read anew by each process: the contents are not handed down. Raises CredentialsError."""
        return Credentials.load(self)

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports to be used, in order of preference.

        Mooncake and NIXL let everybody who reaches their ports read what is on its way, and NIXL more: `auto` takes
        either only on a network that somebody has said to be isolated, and NIXL only on devices that were named.
        """
        if self.transport != "auto":
            return (self.transport,)
        isolated = bool(self.mooncake_interface) or self.insecure
        chosen = {"local": True, "nixl": bool(self.nixl_devices), "mooncake": isolated, "tcp": True}
        return tuple(name for name, is_chosen in chosen.items() if is_chosen)

    def worker_settings(self) -> WorkerSettings:
        mooncake = None
        if "mooncake" in self.transports:
            interface = self.mooncake_interface
            mooncake = MooncakeSettings(
                host=address_of_interface(interface) if interface else reachable_host(self.host),
                protocol=self.mooncake_protocol,
                devices=self.mooncake_devices,
                gpu_direct=self.mooncake_gpu_direct,
                required=self.transport == "mooncake",
                max_in=self.max_migrations_in,
                max_out=self.max_migrations_out,
            )
        nixl = None
        if "nixl" in self.transports:
            nixl = NixlSettings(
                devices=self.nixl_devices,
                required=self.transport == "nixl",
                max_in=self.max_migrations_in,
                max_out=self.max_migrations_out,
            )
        return WorkerSettings(
            instance=self.instance_id,
            transports=self.transports,
            host=self.host,
            tls=(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert else None,
            mooncake=mooncake,
            nixl=nixl,
        )

    @property
    def authenticated(self) -> bool:
        """Whether every connection is encrypted and both of its ends are known."""
        return bool(self.tls_cert and self.token_file)

    @property
    def reaches(self) -> Reach:
        """What addresses in messages are worth: see `Reach`."""
        return Reach(anywhere=self.authenticated or self.insecure, keys=bool(self.token_file))

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Ids of our ranks, each of which is an instance."""
        return tuple(self.for_rank(rank).instance_id for rank in range(self.num_ranks))

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> LlumletConfig:
        return msgspec.json.decode(text, type=cls)

    def for_rank(self, rank: int) -> LlumletConfig:
        """Data-parallel ranks are instances of their own: `port` + rank (unless free), id with a suffix."""
        if self.num_ranks == 1:
            return self
        port = self.port + rank if self.port else 0
        return dataclasses.replace(self, port=port, instance_id=f"{self.instance_id}-dp{rank}")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """The `llumlet` group of `vllm serve --help=llumlet`."""
    group = parser.add_argument_group(_llumlet.title, _llumlet.description)
    settings.add_arguments(parser, (Switch, LlumletConfig), into=group)


def config_from_args(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> LlumletConfig | None:
    """The llumlet's configuration, or None without `--enable-llumlet`.

    Sets flags of vLLM's own in `args` where ours need it: the executor for `--llumlet-bypass`, and for the drain of
    several API servers `--shutdown-timeout`, for which their parent waits before it ends them and the engine.
    Raises ConfigError with every fault found in the flags and in `LLUMNIX_*` variables.
    """
    if not getattr(args, "enable_llumlet", False):
        if given := setting_sources.read("llumlet", (LlumletConfig,), args, {}).given:
            raise ConfigError([f"{', '.join(given)} needs --enable-llumlet"])
        return None
    reading = setting_sources.read("llumlet", (LlumletConfig,), args, environ)
    config = reading.make(
        LlumletConfig,
        instance_id=f"{socket.gethostname()[:100]}-{uuid.uuid4().hex[:8]}",
        num_ranks=getattr(args, "data_parallel_size", 1),
        api_server_port=getattr(args, "port", None) or 0,
        served_models=tuple(getattr(args, "served_model_name", None) or ()),
    )
    for check in (_host_faults, _peer_faults, _cms_faults):
        reading.check(check, config)
    reading.check(_executor_faults, config, args)
    reading.check(mooncake_faults, config, reading)
    reading.check(nixl_faults, config)
    try:
        config.credentials()
    except CredentialsError as error:
        reading.faults += error.faults
    if environ.get("VLLM_USE_RUST_FRONTEND", "").lower() in ("1", "true"):
        reading.faults.append("--enable-llumlet does not work with the Rust front-end: unset VLLM_USE_RUST_FRONTEND")
    if reading.faults:
        raise ConfigError(reading.faults)
    if config.bypass:
        args.distributed_executor_backend = "mp"
    if (config.peers or config.cms) and config.drain_seconds and _num_api_servers(args) > 1:
        args.shutdown_timeout = max(getattr(args, "shutdown_timeout", 0), math.ceil(config.drain_seconds) + END_SECONDS)
    return dataclasses.replace(config, unit=_unit_of(args, config.instance_id))


def _num_api_servers(args: argparse.Namespace) -> int:
    """API servers that vLLM will start: one for each local rank, unless somebody else balances the load between
    these."""
    if (count := getattr(args, "api_server_count", None)) is not None:
        return int(count)
    alone = ("data_parallel_external_lb", "data_parallel_multi_port_external_lb")
    if any(getattr(args, flag, False) for flag in alone) or getattr(args, "data_parallel_rank", None) is not None:
        return 1
    local: int | None = getattr(args, "data_parallel_size_local", None)
    return local or int(getattr(args, "data_parallel_size", 1))


def drain_limit(vllm_config: VllmConfig) -> float | None:
    """How long a drain may take at most, in seconds; None: as long as it is asked to.

    The parent of several API servers ends what is left when `--shutdown-timeout` is over.
    """
    if vllm_config.parallel_config._api_process_count == 1:
        return None
    return max(0.0, float(vllm_config.shutdown_timeout) - END_SECONDS)


def _unit_of(args: argparse.Namespace, instance_id: str) -> str:
    """A group on several hosts has one coordinator; a group on one host has its name to itself."""
    num_ranks, num_here = getattr(args, "data_parallel_size", 1), getattr(args, "data_parallel_size_local", None)
    address = getattr(args, "data_parallel_address", None)
    spread = getattr(args, "data_parallel_rank", None) is not None or num_here not in (None, num_ranks)
    if num_ranks > 1 and spread and address:
        return f"{address}:{getattr(args, 'data_parallel_rpc_port', None)}"
    return instance_id


def _host_faults(config: LlumletConfig) -> Iterator[str]:
    if problem := config.reaches.why_not(config.host):
        yield f"--llumlet-host: {problem}; or add --llumlet-insecure on an isolated network"


def _peer_faults(config: LlumletConfig) -> Iterator[str]:
    for peer in config.peers:
        if problem := config.reaches.why_not_llumlet(peer):
            yield f"--llumlet-peers: {problem}"


def _executor_faults(config: LlumletConfig, args: argparse.Namespace) -> Iterator[str]:
    if config.bypass and (getattr(args, "distributed_executor_backend", None) or "mp") != "mp":
        yield "--llumlet-bypass needs --distributed-executor-backend mp"


def _cms_faults(config: LlumletConfig) -> list[str]:
    """Faults of where reports go. A report goes out unasked, request ids in it: to this host, or to one that proves to
    be the one that is meant. A Sentinel of this host may name a server elsewhere: it is of this host's operator, as a
    proxy would be."""
    if not config.cms:
        return []
    if problems := cms_faults(config.cms):
        return [f"--llumlet-cms: {problem}" for problem in problems]
    for store in split_stores(config.cms):
        if not store.startswith(REDIS_SCHEMES):
            found = [config.reaches.why_not_llumlet(store)]
        elif (url := RedisUrl.parse(store)).tls:
            found = []
        else:
            found = [config.reaches.why_not(host) for host, _ in url.hosts]
        problems += [f"--llumlet-cms: {problem}" for problem in found if problem]
    return problems


def current() -> LlumletConfig | None:
    """The configuration this process inherited; None when the llumlet is off."""
    text = os.environ.get(CONFIG_VARIABLE)
    return LlumletConfig.from_json(text) if text else None
