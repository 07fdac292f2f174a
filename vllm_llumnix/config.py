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
from llumlet.process.credentials import CredentialFiles, Credentials, CredentialsError
from llumlet.process.kinds import MARK, Kind
from llumlet.process.redis_url import REDIS_SCHEMES, RedisUrl, split_stores
from llumlet.process.settings import Group
from llumlet.protocol.infer_type import InferType
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.kv.settings import UNLIMITED, Limit, MooncakeSettings, NixlSettings, WorkerSettings
from vllm_llumnix.switch import CONFIG_VARIABLE
from vllm_llumnix.wire.addresses import Reach, address_of_interface, reachable_host
from vllm_llumnix.wire.unauthenticated import mooncake_faults, nixl_faults

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ACCEPTABLE = ("vllm", "device", "attention", "parallel")
"""Names of the facts in `engine.compatibility.facts` that may differ between engines."""
INSTANCE_TYPES = tuple(map(str, InferType))
TRANSPORTS = ("auto", "local", "tcp", "mooncake", "nixl")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
END_SECONDS = 5
"""Time for several API servers and their engine to end after a drain, before their parent kills them."""
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
_llumlet = Group(
    "llumlet", "Live migration of running requests to other instances (vllm-llumnix).", "--llumlet-", common=True
)
_more = Group("llumlet-more", "Limits, transports and special cases of live migration.", "--llumlet-")


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    enable_llumlet: bool = _llumlet.setting(
        False,
        MARK,
        "Run a llumlet in the engine process, so that running requests can move to and from other instances.",
        flag="--enable-llumlet",
        variable=None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LlumletConfig(CredentialFiles):
    """The configuration of one llumlet."""

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
        "neutral",
        kinds.one_of(INSTANCE_TYPES),
        "Kind of requests that the scheduler sends to this instance; neutral takes prefill and decode.",
    )
    transport: str = _llumlet.setting(
        "auto",
        kinds.one_of(TRANSPORTS),
        "Transport of KV blocks. 'local' reads the peer's memory on the same host, 'tcp' connects to where the peer's "
        "workers serve it, 'mooncake' uses the Mooncake transfer engine, 'nixl' uses NIXL; 'auto' picks the first of "
        "local, nixl (with --llumlet-nixl-devices), mooncake (with --llumlet-mooncake-interface or "
        "--llumlet-insecure) and tcp that works between two instances.",
    )
    accept: tuple[str, ...] = _more.setting(
        (),
        kinds.several(kinds.one_of(ACCEPTABLE), "|".join(ACCEPTABLE) + ",..."),
        "Differences to tolerate between engines that exchange requests: the release of vLLM, the kind of GPU or CPU, "
        "the attention backend, the number of workers that a model is split over. Such engines round differently, so "
        "that a moved request may go on with other tokens than it would have had unmoved. Use the same value on every "
        "engine. Empty tolerates none.",
    )
    nixl_devices: str = _more.setting(
        "",
        kinds.text("NAME,..."),
        "Network devices that NIXL may use, as in UCX_NET_DEVICES, such as mlx5_0:1 or eth1, or all. Isolate them: "
        "NIXL does not authenticate, and whoever reaches it can read and write all memory of its process.",
    )
    mooncake_protocol: str = _more.setting("tcp", kinds.one_of(MOONCAKE_PROTOCOLS), "Network protocol of Mooncake.")
    mooncake_devices: str = _more.setting(
        "", kinds.text("NAME,..."), "RDMA devices that Mooncake may use, such as mlx5_0. Empty: all."
    )
    mooncake_gpu_direct: bool = _more.setting(
        True, MARK, "Let RDMA devices read and write buffers on the GPU, where they can, instead of in main memory."
    )
    mooncake_interface: str = _more.setting(
        "",
        kinds.text("NAME"),
        "Network interface under whose address Mooncake is reached. Isolate it: Mooncake does not authenticate, and "
        "its ports listen on all addresses.",
    )
    max_migrations_in: int = _more.setting(
        4, kinds.integer(at_least=0), "Largest number of requests that move in at once; 0 refuses all."
    )
    max_migrations_out: int = _more.setting(
        4, kinds.integer(at_least=0), "Largest number of requests that move out at once; 0 refuses all."
    )
    max_migration_tokens_in: int | None = _more.setting(
        None,
        kinds.integer(at_least=1),
        "Largest sum of tokens of the requests that move in at once; a longer one moves alone. Default: no limit.",
    )
    max_migration_tokens_out: int | None = _more.setting(
        None,
        kinds.integer(at_least=1),
        "Largest sum of tokens of the requests that move out at once; a longer one moves alone. Default: no limit.",
    )
    max_migration_kv_ratio_in: float = _more.setting(
        0.25,
        kinds.number("SHARE", above=0, at_most=1),
        "Largest share of the KV cache for the requests that move in at once; a larger one moves alone.",
    )
    max_migration_kv_ratio_out: float = _more.setting(
        0.25,
        kinds.number("SHARE", above=0, at_most=1),
        "Largest share of the KV cache for the requests that move out at once; a larger one moves alone.",
    )
    lease_seconds: float = _more.setting(
        30.0,
        kinds.seconds(at_least=1),
        "Seconds for which blocks stay reserved or pinned for a silent peer. No single copy may take longer.",
    )
    stall_budget_ms: float = _more.setting(
        200.0,
        kinds.number("MS", above=0),
        "Give up a move whose last copy would stall the stream for longer than this many milliseconds.",
    )
    bandwidth_limit: Limit = _more.setting(
        UNLIMITED,
        _LIMIT,
        "Limit of reads from other hosts, in bytes per second (2G) or as a share of the link (20%). Default: no limit.",
    )
    bandwidth_limit_local: Limit = _more.setting(
        UNLIMITED,
        _LIMIT,
        "Limit of reads from this host's memory, in bytes per second (2G) or as a share (20%). Default: no limit.",
    )
    exact: bool = _more.setting(
        False, MARK, "Copy every KV block, also those that this instance's prefix cache already holds: bit-exact moves."
    )
    bypass: bool = _more.setting(
        False,
        MARK,
        "Run workers in processes of their own even if there is only one (--distributed-executor-backend mp): requests "
        "can then be moved away with their KV cache while the model hangs.",
    )
    cms: str = _llumlet.setting(
        "",
        kinds.text("HOST:PORT|redis://..."),
        "Cluster metadata stores that this instance reports its load to, separated by commas: schedulers (HOST:PORT), "
        "or a Redis, also behind Sentinels (redis+sentinel://HOST:PORT,HOST:PORT/SERVICE). Empty reports to none.",
    )
    peers: tuple[str, ...] = _llumlet.setting(
        (),
        kinds.several(Kind(lambda text: str(Address.parse(text))), "HOST:PORT,..."),
        "Llumlets of other instances of the same model. If this engine is lost, its requests continue there from the "
        "last token that their clients received.",
    )
    drain_seconds: float = _llumlet.setting(
        25.0,
        kinds.seconds(),
        "Longest time for streams to end after SIGTERM, in seconds, while requests move to the peers. Applies with "
        "--llumlet-peers or --llumlet-cms. The default fits the 30 seconds that Kubernetes gives; raise both for "
        "longer streams. 0 ends at once.",
    )
    utility_seconds: float = _more.setting(
        300.0,
        kinds.seconds(at_least=1),
        "Longest time that the engine's loop may spend, in seconds, on one call, such as loading an adapter, writing "
        "a profile or new weights, or on one step in which a kernel is compiled. After that it counts as hung and its "
        "streams continue elsewhere. It gets no new requests meanwhile.",
    )
    priority_ageing_seconds: float = _more.setting(
        60.0,
        kinds.seconds(),
        "Longest time, in seconds, that a request waits behind later ones under --scheduling-policy priority. "
        "Afterwards it counts as one of the most urgent. 0 sets no limit.",
    )
    ask_before_preemption: bool = _more.setting(
        False,
        MARK,
        "Before a request is preempted, wait up to 0.1 seconds for the rescheduler to move one. For clusters that run "
        "the rescheduling policy neutral_preemption.",
    )
    insecure: bool = _llumlet.setting(
        False, MARK, "Allow an address other than loopback without authentication and encryption."
    )
    adapt: bool = _more.setting(
        False,
        MARK,
        "Run with a vLLM that differs from the release that the patches were made for, if they apply to its files "
        "exactly and the functions that the llumlet relies on are the same. Give this on the command line: it is "
        "needed before a configuration file is read. Peers must have the same files.",
        variable=None,
    )

    unit: str = ""
    """The name of the data-parallel group, unique in the cluster. Several commands on several hosts can start one."""
    api_server_port: int = 0
    served_models: tuple[str, ...] = ()
    """The model's names at the API server, if they differ from its own."""
    num_ranks: int = 1
    """The number of data-parallel ranks. vLLM does not tell it to engines of models without experts."""

    def credentials(self) -> Credentials:
        """Reads the credentials; each process does so itself. Raises CredentialsError."""
        return Credentials.load(self)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports to use, in order of preference.

        Mooncake and NIXL do not authenticate: `auto` takes Mooncake only on an isolated network and NIXL only on
        devices that were named.
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
        """True if every connection is encrypted and both ends are authenticated."""
        return bool(self.tls_cert and self.token_file)

    @property
    def reaches(self) -> Reach:
        """The addresses in messages that may be connected to."""
        return Reach(anywhere=self.authenticated or self.insecure, keys=bool(self.token_file))

    @property
    def own_ids(self) -> tuple[str, ...]:
        """The instance ids of our data-parallel ranks."""
        return tuple(self.for_rank(rank).instance_id for rank in range(self.num_ranks))

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> LlumletConfig:
        return msgspec.json.decode(text, type=cls)

    def for_rank(self, rank: int) -> LlumletConfig:
        """The configuration of a data-parallel rank: `port` + rank, unless it is free, and an id with a suffix."""
        if self.num_ranks == 1:
            return self
        port = self.port + rank if self.port else 0
        return dataclasses.replace(self, port=port, instance_id=f"{self.instance_id}-dp{rank}")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds the groups of `vllm serve --help=llumlet`, `--help=llumlet-more` and `--help=credentials`."""
    settings.add_arguments(parser, (Switch, LlumletConfig))


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
    """The number of API servers that vLLM will start: one per local rank, unless an external balancer is used."""
    if (count := getattr(args, "api_server_count", None)) is not None:
        return int(count)
    alone = ("data_parallel_external_lb", "data_parallel_multi_port_external_lb")
    if any(getattr(args, flag, False) for flag in alone) or getattr(args, "data_parallel_rank", None) is not None:
        return 1
    local: int | None = getattr(args, "data_parallel_size_local", None)
    return local or int(getattr(args, "data_parallel_size", 1))


def drain_limit(vllm_config: VllmConfig) -> float | None:
    """The longest time of a drain, in seconds; None sets no limit.

    The parent of several API servers ends the rest when `--shutdown-timeout` is over.
    """
    if vllm_config.parallel_config._api_process_count == 1:
        return None
    return max(0.0, float(vllm_config.shutdown_timeout) - END_SECONDS)


def _unit_of(args: argparse.Namespace, instance_id: str) -> str:
    """The name of the data-parallel group: its coordinator's address, or on one host the instance's id."""
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
    """Faults of the stores that reports go to. A report contains request ids, so it goes to this host only, or to an
    authenticated one. A Sentinel of this host may name a server elsewhere: it belongs to this host's operator."""
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
    """The configuration that this process inherited; None if the llumlet is off."""
    text = os.environ.get(CONFIG_VARIABLE)
    return LlumletConfig.from_json(text) if text else None
