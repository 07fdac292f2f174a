# SPDX-License-Identifier: Apache-2.0
"""The llumlet's configuration: the flags of `vllm serve`, one frozen object, and the way it reaches child processes.

`vllm serve` parses the flags once, in the parent. The result travels to the EngineCore and API server processes as JSON
in the environment variable `LLUMNIX_LLUMLET`: vLLM's own config objects are hashed into its compilation cache keys, so
values that differ between instances (a port, an id) must not be put there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import socket
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from llumlet import credential_files
from llumlet.credential_files import CredentialFiles, CredentialsError
from llumlet.redis_url import REDIS_SCHEMES, RedisUrl, split_stores
from llumlet.reporter import cms_faults
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.hosts import address_of_interface, reachable_host
from vllm_llumnix.kv.settings import UNLIMITED, Limit, MooncakeSettings, WorkerSettings

if TYPE_CHECKING:
    from llumlet.credentials import Credentials
    from vllm_llumnix.reach import Reach

CONFIG_VARIABLE = "LLUMNIX_LLUMLET"
KNOWN_VARIABLES = frozenset({CONFIG_VARIABLE, "LLUMNIX_FAULTS", "LLUMNIX_CMS", *credential_files.VARIABLES.values()})
_OF_A_KUBERNETES_SERVICE = re.compile(
    r"LLUMNIX_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What kubelet sets in every container of a namespace that has a Service called `llumnix` or `llumnix-…`."""
INSTANCE_TYPES = ("neutral", "prefill", "decode")
TRANSPORTS = ("auto", "local", "tcp", "mooncake")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
END_SECONDS = 5
"""What several API servers and their engine have for their end after a drain, before their parent kills them."""
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MOONCAKE_FIELDS = ("mooncake_protocol", "mooncake_devices", "mooncake_gpu_direct", "mooncake_interface")
_RATE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclasses.dataclass(frozen=True)
class LlumletConfig:
    """What one instance's llumlet was told. Seconds, bytes per second and milliseconds as the names say."""

    instance_id: str
    unit: str = ""
    """Names the data-parallel group, which several commands on several hosts can start. Unique in the cluster."""
    api_server_port: int = 0
    served_models: tuple[str, ...] = ()
    """Names of the model at the API server, if it has others than the model's own."""
    cms: str = ""
    num_ranks: int = 1
    """Data-parallel. An engine whose model has no experts does not know: vLLM tells it that it is alone."""
    host: str = "127.0.0.1"
    port: int = 0
    instance_type: str = "neutral"
    transport: str = "auto"
    max_migrations_in: int = 4
    max_migrations_out: int = 4
    max_migration_tokens_in: int | None = None
    max_migration_tokens_out: int | None = None
    max_migration_kv_ratio_in: float = 0.25
    max_migration_kv_ratio_out: float = 0.25
    lease_seconds: float = 30.0
    stall_budget_ms: float = 200.0
    mooncake_protocol: str = "tcp"
    mooncake_devices: str = ""
    mooncake_gpu_direct: bool = True
    mooncake_interface: str = ""
    bandwidth_limit: Limit = UNLIMITED
    bandwidth_limit_local: Limit = UNLIMITED
    exact: bool = False
    bypass: bool = False
    insecure: bool = False
    peers: tuple[str, ...] = ()
    drain_seconds: float = 25.0
    utility_seconds: float = 300.0
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token_file: str = ""
    adapt: bool = False
    """Read by `patching.installed` as well, before vLLM is imported."""

    def credentials(self) -> Credentials:
        """Read anew by each process: the contents are not handed down. Raises CredentialsError."""
        from llumlet.credentials import Credentials

        return Credentials.load(CredentialFiles(self.tls_cert, self.tls_key, self.tls_ca, self.token_file))

    @property
    def transports(self) -> tuple[str, ...]:
        """Those to be used, in order of preference.

        Mooncake lets everybody who reaches its ports read what is on its way: `auto` takes it only on a network that
        somebody has said to be isolated.
        """
        if self.transport != "auto":
            return (self.transport,)
        isolated = bool(self.mooncake_interface) or self.insecure
        return ("local", "mooncake", "tcp") if isolated else ("local", "tcp")

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
        return WorkerSettings(
            instance=self.instance_id,
            transports=self.transports,
            host=self.host,
            tls=(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert else None,
            mooncake=mooncake,
        )

    @property
    def authenticated(self) -> bool:
        """Whether every connection is encrypted and both of its ends are known."""
        return bool(self.tls_cert and self.token_file)

    @property
    def reaches(self) -> Reach:
        """What addresses in messages are worth: see `Reach`."""
        from vllm_llumnix.reach import Reach

        return Reach(anywhere=self.authenticated or self.insecure, keys=bool(self.token_file))

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Of our ranks, each of which is an instance."""
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


_DEFAULTS = LlumletConfig(instance_id="")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """The `llumlet` group of `vllm serve --help=llumlet`."""
    group = parser.add_argument_group(
        title="llumlet",
        description="Live migration of running requests to other instances (vllm-llumnix).",
    )
    add = group.add_argument
    add(
        "--enable-llumlet",
        action="store_true",
        default=False,
        help="Run a llumlet in the engine process: running requests can be moved to and from other instances.",
    )
    add(
        "--llumlet-host",
        default=_DEFAULTS.host,
        metavar="ADDRESS",
        help="Address on which the llumlet's gRPC service and the token relay listen. An address other than loopback "
        "needs mutual TLS and a token, or --llumlet-insecure.",
    )
    add(
        "--llumlet-port",
        type=int,
        default=_DEFAULTS.port,
        metavar="PORT",
        help="Port of the gRPC service; 0 takes a free one. Data-parallel rank r listens on PORT + r.",
    )
    add(
        "--llumlet-instance-id",
        default=None,
        metavar="ID",
        help="Name of this instance, unique in the cluster. Default: host name and a random suffix.",
    )
    add(
        "--llumlet-instance-type",
        choices=INSTANCE_TYPES,
        default=_DEFAULTS.instance_type,
        help="What the scheduler uses this instance for.",
    )
    add(
        "--llumlet-transport",
        choices=TRANSPORTS,
        default=_DEFAULTS.transport,
        help="How KV blocks travel. 'local' reads the peer's memory on the same host, 'tcp' connects to where the "
        "peer's workers serve it, 'mooncake' uses the Mooncake transfer engine; 'auto' picks the first of local, "
        "mooncake (with --llumlet-mooncake-interface or --llumlet-insecure) and tcp that works between two instances.",
    )
    add(
        "--llumlet-mooncake-protocol",
        choices=MOONCAKE_PROTOCOLS,
        default=_DEFAULTS.mooncake_protocol,
        help="What Mooncake runs over.",
    )
    add(
        "--llumlet-mooncake-devices",
        default=_DEFAULTS.mooncake_devices,
        metavar="NAME,...",
        help="RDMA devices that Mooncake may use, such as mlx5_0. Default: all.",
    )
    add(
        "--llumlet-mooncake-gpu-direct",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.mooncake_gpu_direct,
        help="Let RDMA devices read and write buffers on the GPU, where they can, instead of in main memory.",
    )
    add(
        "--llumlet-mooncake-interface",
        default=_DEFAULTS.mooncake_interface,
        metavar="NAME",
        help="Network interface, isolated from everybody but the instances, under whose address Mooncake is reached: "
        "it authenticates nobody. Its ports listen at all addresses all the same; keep others from them.",
    )
    add(
        "--llumlet-max-migrations-in",
        type=int,
        default=_DEFAULTS.max_migrations_in,
        metavar="N",
        help="How many requests may be on their way into this instance at once.",
    )
    add(
        "--llumlet-max-migrations-out",
        type=int,
        default=_DEFAULTS.max_migrations_out,
        metavar="N",
        help="How many requests may be on their way out of this instance at once.",
    )
    for direction, way in (("in", "into"), ("out", "out of")):
        add(
            f"--llumlet-max-migration-tokens-{direction}",
            type=int,
            default=None,
            metavar="N",
            help=f"How many tokens the requests on their way {way} this instance may have together. A longer request "
            "goes alone. Default: no limit.",
        )
        add(
            f"--llumlet-max-migration-kv-ratio-{direction}",
            type=float,
            default=getattr(_DEFAULTS, f"max_migration_kv_ratio_{direction}"),
            metavar="SHARE",
            help="The same as a share of this instance's KV cache, above 0 and at most 1: so much of it can moves "
            "keep from the instance's own requests, or one longer request that goes alone.",
        )
    add(
        "--llumlet-lease-seconds",
        type=float,
        default=_DEFAULTS.lease_seconds,
        metavar="SECONDS",
        help="How long blocks stay reserved, or pinned, for a peer that has fallen silent; no single copy may take "
        "longer.",
    )
    add(
        "--llumlet-stall-budget-ms",
        type=float,
        default=_DEFAULTS.stall_budget_ms,
        metavar="MS",
        help="A move is given up when its last copy would hold the stream up for longer than this.",
    )
    add(
        "--llumlet-bandwidth-limit",
        type=parse_limit,
        default=_DEFAULTS.bandwidth_limit,
        metavar="RATE|SHARE",
        help="Upper bound of what this instance pulls from peers on other hosts: bytes per second, such as 2G, or a "
        "share of what the link gives, such as 20%%. Default: unlimited.",
    )
    add(
        "--llumlet-bandwidth-limit-local",
        type=parse_limit,
        default=_DEFAULTS.bandwidth_limit_local,
        metavar="RATE|SHARE",
        help="The same for peers on this host, whose link is the memory.",
    )
    add(
        "--llumlet-exact",
        action="store_true",
        default=False,
        help="Copy every KV block, also those that this instance's prefix cache already holds: bit-exact moves.",
    )
    add(
        "--llumlet-bypass",
        action="store_true",
        default=False,
        help="Run workers in processes of their own even if there is only one (--distributed-executor-backend mp): "
        "requests can then be moved away with their KV cache while the model hangs.",
    )
    add(
        "--llumlet-cms",
        default=_DEFAULTS.cms,
        metavar="HOST:PORT|redis://...",
        help="Cluster metadata stores, separated by commas: schedulers, or a Redis, which may be one behind Sentinels "
        "(redis+sentinel://HOST:PORT,HOST:PORT/SERVICE). They are told of this instance, and of its load whenever that "
        "changes.",
    )
    add(
        "--llumlet-peers",
        type=parse_peers,
        default=_DEFAULTS.peers,
        metavar="HOST:PORT,...",
        help="Llumlets of other instances of the same model: when an engine is lost, its requests go on there from "
        "what their clients have received.",
    )
    add(
        "--llumlet-drain-seconds",
        type=float,
        default=_DEFAULTS.drain_seconds,
        metavar="SECONDS",
        help="On SIGTERM, with --llumlet-peers or --llumlet-cms: how long streams may go on while requests move to the "
        "peers. The default fits the 30 seconds that Kubernetes gives; raise both for longer streams. 0: end at once.",
    )
    add(
        "--llumlet-utility-seconds",
        type=float,
        default=_DEFAULTS.utility_seconds,
        metavar="SECONDS",
        help="How long the engine's loop may be busy with one call, such as loading an adapter, writing a profile or "
        "new weights, before it counts as hung and its streams go on elsewhere. It gets no new requests meanwhile.",
    )
    add(
        "--llumlet-insecure",
        action="store_true",
        default=False,
        help="Allow an address other than loopback although nothing is authenticated or encrypted.",
    )
    add(
        "--llumlet-adapt",
        action="store_true",
        default=False,
        help="Run with a vLLM that differs from the release that the patches are made for, if they go into its files "
        "word for word and the functions that the llumlet relies on are the same. On the command line only: it is "
        "needed before a configuration file is read. Peers must have the same files.",
    )
    credential_files.add_arguments(group)


def parse_limit(text: str) -> Limit:
    """`500M` -> 500,000,000 bytes per second, `20%` -> a fifth of the link. Raises argparse.ArgumentTypeError."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())) and 0 < float(match[1]) <= 100:
        return Limit(share=float(match[1]) / 100)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a rate in bytes per second, such as 500000000, 500M or 2G, nor a share, such as 20%"
        )
    return Limit(bytes_per_s=float(match[1]) * _RATE_UNITS[match[2]])


def parse_peers(text: str) -> tuple[str, ...]:
    """`a:1,b:2` -> ("a:1", "b:2"). Raises argparse.ArgumentTypeError."""
    peers = tuple(part.strip() for part in text.split(",") if part.strip())
    for peer in peers:
        host, colon, port = peer.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise argparse.ArgumentTypeError(f"{peer!r} is not HOST:PORT")
    return peers


def config_from_args(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> LlumletConfig | None:
    """The llumlet's configuration, or None without `--enable-llumlet`.

    Sets flags of vLLM's own in `args` where ours need it: the executor for `--llumlet-bypass`, and for the drain of
    several API servers `--shutdown-timeout`, for which their parent waits before it ends them and the engine.
    Raises ConfigError with every fault found in the flags and in `LLUMNIX_*` variables.
    """
    enabled = getattr(args, "enable_llumlet", False)
    values = _given(args)
    faults: list[str] = []
    if not enabled:
        changed = [name for name, value in values.items() if value is not None and value != getattr(_DEFAULTS, name)]
        if changed:
            flags = ", ".join("--llumlet-" + name.replace("_", "-") for name in changed)
            raise ConfigError([f"{flags} needs --enable-llumlet"])
        return None
    if not values.get("instance_id"):
        values["instance_id"] = f"{socket.gethostname()[:100]}-{uuid.uuid4().hex[:8]}"
    values |= dataclasses.asdict(CredentialFiles.given(args, environ))
    values["num_ranks"] = getattr(args, "data_parallel_size", 1)
    values["unit"] = _unit_of(args, values["instance_id"])
    values["api_server_port"] = getattr(args, "port", None) or 0
    values["served_models"] = tuple(getattr(args, "served_model_name", None) or ())
    config = LlumletConfig(**values)
    if config.bypass:
        if (getattr(args, "distributed_executor_backend", None) or "mp") != "mp":
            faults.append("--llumlet-bypass needs --distributed-executor-backend mp")
        args.distributed_executor_backend = "mp"
    faults += _faults(config)
    if not faults and (config.peers or config.cms) and config.drain_seconds and _num_api_servers(args) > 1:
        args.shutdown_timeout = max(getattr(args, "shutdown_timeout", 0), math.ceil(config.drain_seconds) + END_SECONDS)
    try:
        config.credentials()
    except CredentialsError as error:
        faults += error.faults
    if unknown := unknown_variables(environ):
        faults.append(f"unknown variables {', '.join(unknown)}; known: {', '.join(sorted(KNOWN_VARIABLES))}")
    if environ.get("VLLM_USE_RUST_FRONTEND", "").lower() in ("1", "true"):
        faults.append("--enable-llumlet does not work with the Rust front-end: unset VLLM_USE_RUST_FRONTEND")
    if faults:
        raise ConfigError(faults)
    return config


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that look like ours and are not: misspelt, or of another release."""
    ours = {name for name in environ if name.startswith("LLUMNIX_") and not _OF_A_KUBERNETES_SERVICE.fullmatch(name)}
    return sorted(ours - KNOWN_VARIABLES)


def _num_api_servers(args: argparse.Namespace) -> int:
    """As many as vLLM will start: one for each local rank, unless somebody else balances the load between these."""
    if (count := getattr(args, "api_server_count", None)) is not None:
        return int(count)
    alone = ("data_parallel_external_lb", "data_parallel_multi_port_external_lb")
    if any(getattr(args, flag, False) for flag in alone) or getattr(args, "data_parallel_rank", None) is not None:
        return 1
    return getattr(args, "data_parallel_size_local", None) or getattr(args, "data_parallel_size", 1)


def drain_limit(vllm_config: Any) -> float | None:
    """How long a drain may take at most, in seconds; None: as long as it is asked to.

    The parent of several API servers ends what is left when `--shutdown-timeout` is over.
    """
    if vllm_config.parallel_config._api_process_count == 1:
        return None
    return max(0.0, vllm_config.shutdown_timeout - END_SECONDS)


def _unit_of(args: argparse.Namespace, instance_id: str) -> str:
    """A group on several hosts has one coordinator; a group on one host has its name to itself."""
    num_ranks, num_here = getattr(args, "data_parallel_size", 1), getattr(args, "data_parallel_size_local", None)
    address = getattr(args, "data_parallel_address", None)
    spread = getattr(args, "data_parallel_rank", None) is not None or num_here not in (None, num_ranks)
    if num_ranks > 1 and spread and address:
        return f"{address}:{getattr(args, 'data_parallel_rpc_port', None)}"
    return instance_id


def _given(args: argparse.Namespace) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(LlumletConfig))
    flags = {name: "llumlet_" + name for name in names}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}


def _faults(config: LlumletConfig) -> list[str]:
    faults = []
    if not _INSTANCE_ID.fullmatch(config.instance_id):
        faults.append("--llumlet-instance-id must be letters, digits, '.', '_', ':' or '-', at most 128 characters")
    if not 0 <= config.port < 65536:
        faults.append(f"--llumlet-port {config.port} is not a port")
    for name in ("max_migrations_in", "max_migrations_out"):
        if getattr(config, name) < 0:
            faults.append(f"--llumlet-{name.replace('_', '-')} must not be negative")
    for direction in ("in", "out"):
        tokens = getattr(config, f"max_migration_tokens_{direction}")
        if tokens is not None and tokens < 1:
            faults.append(f"--llumlet-max-migration-tokens-{direction} must be positive")
        ratio = getattr(config, f"max_migration_kv_ratio_{direction}")
        if not 0 < ratio <= 1:
            faults.append(f"--llumlet-max-migration-kv-ratio-{direction} must be above 0 and at most 1")
    if not config.lease_seconds >= 1:
        faults.append("--llumlet-lease-seconds must be at least 1")
    if not 0 <= config.drain_seconds < float("inf"):
        faults.append("--llumlet-drain-seconds must not be negative or infinite")
    if not config.utility_seconds >= 1:
        faults.append("--llumlet-utility-seconds must be at least 1")
    if not config.stall_budget_ms > 0:
        faults.append("--llumlet-stall-budget-ms must be positive")
    faults += _mooncake_faults(config)
    if problem := config.reaches.why_not(config.host):
        faults.append(f"--llumlet-host: {problem}; or add --llumlet-insecure on an isolated network")
    for peer in config.peers:
        if problem := config.reaches.why_not_llumlet(peer):
            faults.append(f"--llumlet-peers: {problem}")
    if config.cms:
        faults += [f"--llumlet-cms: {problem}" for problem in _cms_problems(config)]
    return faults


def _cms_problems(config: LlumletConfig) -> list[str]:
    """It goes out unasked, request ids in it: to this host, or to one that proves to be the one that is meant. A
    Sentinel of this host may name a server elsewhere: it is of this host's operator, as a proxy would be."""
    problems = cms_faults(config.cms)
    if problems:
        return problems
    for store in split_stores(config.cms):
        if not store.startswith(REDIS_SCHEMES):
            found = [config.reaches.why_not_llumlet(store)]
        elif (url := RedisUrl.parse(store)).tls:
            found = []
        else:
            found = [config.reaches.why_not(host) for host, _ in url.hosts]
        problems += filter(None, found)
    return problems


def _mooncake_faults(config: LlumletConfig) -> list[str]:
    from vllm_llumnix.reach import Reach

    if config.transport not in ("auto", "mooncake"):
        given = [name for name in _MOONCAKE_FIELDS if getattr(config, name) != getattr(_DEFAULTS, name)]
        flags = ", ".join("--llumlet-" + name.replace("_", "-") for name in given)
        return [f"{flags} needs --llumlet-transport auto or mooncake"] if given else []
    faults = []
    if config.mooncake_interface:
        try:
            address = address_of_interface(config.mooncake_interface)
        except ValueError as error:
            faults.append(f"--llumlet-mooncake-interface: {error}")
        else:
            if config.reaches.why_not(address) is not None and config.reaches.why_not(config.host) is None:
                faults.append(
                    f"--llumlet-mooncake-interface {config.mooncake_interface} has the address {address}, which peers "
                    f"refuse while --llumlet-host is {config.host}: give this instance an address on that network with "
                    "TLS and a token (or --llumlet-insecure), or name the interface lo"
                )
    if config.transport == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            faults.append("--llumlet-transport mooncake: pip install vllm-llumnix[mooncake]")
        if not (config.insecure or config.mooncake_interface or Reach(anywhere=False).why_not(config.host) is None):
            faults.append(
                "--llumlet-transport mooncake authenticates nobody: name an isolated network with "
                "--llumlet-mooncake-interface, or add --llumlet-insecure"
            )
    return faults


def current() -> LlumletConfig | None:
    """The configuration this process inherited; None when the llumlet is off."""
    text = os.environ.get(CONFIG_VARIABLE)
    return LlumletConfig.from_json(text) if text else None
