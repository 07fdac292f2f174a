# SPDX-License-Identifier: Apache-2.0
"""All that moves blocks into and out of one worker: its memory, its transports and what serves its peers.

What cannot be had is left out, and `missing` says why: a worker without any transport is no error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.memory.block_memory import BlockMemory, CudaMemory, HostMemory
from vllm_llumnix.kv.memory.cuda_share import share
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.memory.vllm_cache import arrangement_of, layout_of, storage_of
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
from vllm_llumnix.kv.mover.messages import CudaShare, NetworkName, PeerMemory
from vllm_llumnix.kv.mover.mover_thread import Mover
from vllm_llumnix.kv.mover.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine, MooncakeNetwork
from vllm_llumnix.kv.networks.nixl import NixlEngine, NixlNetwork
from vllm_llumnix.kv.networks.staging import GpuStagingArea, SharedStagingArea, StagingArea
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import Grants
from vllm_llumnix.kv.settings import MooncakeSettings, NixlSettings, WorkerSettings
from vllm_llumnix.kv.transport.base import Transport
from vllm_llumnix.kv.transport.connections import Connections
from vllm_llumnix.kv.transport.local import LocalTransport
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport
from vllm_llumnix.kv.transport.staged import Network, StagedTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport
from vllm_llumnix.kv.vllm_worker_types import Worker
from vllm_llumnix.wire import block_tls
from vllm_llumnix.wire.addresses import reachable_host, with_port

logger = logging.getLogger(__name__)
T = TypeVar("T")
W = TypeVar("W", MooncakeSettings, NixlSettings)
_WHY_CHARACTERS = 160
"""The first sentences of torch: how much was asked for, and how much is free."""


class _Staged(NamedTuple):
    """A network that runs. `outgoing` is what peers read, into `incoming` is read from them."""

    engine: MooncakeEngine | NixlEngine
    network: Network
    outgoing: StagingArea
    incoming: StagingArea
    exposed: bool
    """True if peers can write to `incoming` as well."""


class DataPlane:
    """The data plane of one worker, running from here on. `unavailable`: why none of its blocks can be moved, if so; a
    GPU without memory for copying them is such a reason.

    out_of_memory: the error of an earlier use of the GPU, if it had no memory for that.

    Raises OSError, ValueError, `zmq.ZMQError` if an endpoint cannot be had, TransportUnavailable without a transport
    that is required.
    """

    def __init__(
        self, worker: Worker, settings: WorkerSettings, out_of_memory: torch.OutOfMemoryError | None = None
    ) -> None:
        self._settings = settings
        device = str(worker.device.type)
        self.layout, self.unavailable = _layout_or_reason(worker, device)
        self.choice: kernels.Choice | None = None
        """The choice of the backend that copies blocks."""
        self.missing: dict[str, str] = {}
        """Why a transport that is wanted is not there, by its name."""
        self._nonce = NoncePage()
        self._grants = Grants()
        self._shared: CudaShare | None = None
        self._staged: dict[NetworkName, _Staged] = {}
        self._server: BlockServer | None = None
        self._rank: int = worker.rank
        # Torch allocates on a thread's current device, which is the first one unless somebody says otherwise.
        self._at_start = partial(torch.cuda.set_device, worker.device) if device == "cuda" else lambda: None
        transports: list[Transport] = []
        if out_of_memory is not None:
            self._do_without(out_of_memory)
        if self.unavailable is None:
            storage = storage_of(worker.model_runner) if device == "cuda" else None
            try:
                memory = HostMemory(self.layout) if storage is None else CudaMemory(self.layout, storage)
                transports = self._open(memory, storage)
            except torch.OutOfMemoryError as error:
                self._do_without(error)
        if self.unavailable is not None:
            self.missing = dict.fromkeys(settings.transports, self.unavailable)
            logger.warning("KV blocks of this worker cannot be moved: %s", self.unavailable)
        self.mover = Mover(
            rank=worker.rank,
            layout=self.layout,
            transports=transports,
            directory=PrivateDirectory(settings.directory),
            missing=self.missing,
            grants=self._grants,
            at_start=self._at_start,
        )
        beside_the_model(self.mover.start)

    @property
    def description(self) -> PeerMemory:
        server, host = self._server, reachable_host(self._settings.host)
        return describe_memory(
            self.layout,
            self._nonce,
            self._settings.instance,
            self._rank,
            self.unavailable,
            with_port(host, server.port) if server is not None else None,
            next((engine.segment for engine in self._engines if isinstance(engine, MooncakeEngine)), None),
            self._shared,
            next((engine.memory for engine in self._engines if isinstance(engine, NixlEngine)), None),
        )

    def close(self) -> None:
        """Peers that still read will fail."""
        self._nonce.revoke()
        if self._server is not None:
            self._server.close()
        self.mover.close()
        for engine in self._engines:
            engine.close()

    @property
    def _engines(self) -> list[MooncakeEngine | NixlEngine]:
        return [staged.engine for staged in self._staged.values()]

    def _do_without(self, error: torch.OutOfMemoryError) -> None:
        """The model has its memory, and serves: it is copying that has none."""
        why = textwrap.shorten(str(error), _WHY_CHARACTERS, placeholder="…")
        self.unavailable = f"no GPU memory for copying blocks; a lower --gpu-memory-utilization leaves some: {why}"
        for engine in self._engines:
            engine.close()
        self._staged.clear()
        self._shared = None

    def _open(self, memory: BlockMemory, storage: torch.Tensor | None) -> list[Transport]:
        """The transports that are wanted and can be had; and what peers read through is served. `storage`: a GPU's."""
        settings = self._settings
        self.choice = beside_the_model(partial(kernels.settle, self.layout, memory.storage.device))
        self._stage_or_not("nixl", settings.nixl, partial(_nixl, memory))
        self._stage_or_not("mooncake", settings.mooncake, partial(_mooncake, memory))
        if storage is not None and "local" in settings.transports:
            self._shared = self._share_or_not(storage)
        names = [name for name in settings.transports if name not in self.missing]
        transports = [_transport(name, memory, settings, self._staged) for name in names]
        if settings.allow_readers and "local" in names:
            allow_readers()
        if "tcp" in names or self._staged:
            tls = tls_context(settings, server_side=True)
            staging = {name: staged.outgoing for name, staged in self._staged.items()}
            server = BlockServer(memory, self._nonce.value, self._grants, settings.host, tls, staging, self._at_start)
            beside_the_model(server.start)
            self._server = server
        return transports

    def _stage_or_not(self, name: NetworkName, wanted: W | None, start: Callable[[W], _Staged]) -> None:
        if wanted is None:
            return
        try:
            self._staged[name] = beside_the_model(partial(start, wanted))
        except TransportUnavailable as error:
            if wanted.required:
                raise
            self.missing[name] = str(error)
            logger.info("no transport %s: %s", name, error)

    def _share_or_not(self, storage: torch.Tensor) -> CudaShare | None:
        try:
            return share(storage)
        except TransportUnavailable as error:
            self.missing["local"] = str(error)
            logger.warning("no transport local: %s", error)
            return None


def _transport(
    name: str, memory: BlockMemory, settings: WorkerSettings, networks: Mapping[NetworkName, _Staged]
) -> Transport:
    match name:
        case "local" if isinstance(memory, CudaMemory):
            return LocalCudaTransport(memory.storage, memory.layout)
        case "local":
            return LocalTransport(memory.layout)
        case "tcp":
            return TcpTransport(memory, tls_context(settings, server_side=False))
        case "mooncake" | "nixl" if (staged := networks.get(name)) is not None:
            connections = Connections(tls_context(settings, server_side=False))
            return StagedTransport(memory, staged.network, staged.incoming, connections, exposed=staged.exposed)
    raise ValueError(f"no transport {name!r}")


def _nixl(memory: BlockMemory, wanted: NixlSettings) -> _Staged:
    """Through main memory, also from and to GPUs: theirs cannot be handed to another process and to a network card.
    Raises TransportUnavailable."""
    outgoing, incoming = (SharedStagingArea(memory.layout, num) for num in (wanted.max_out, wanted.max_in))
    engine = NixlEngine(wanted.devices, outgoing, incoming)
    return _Staged(engine, NixlNetwork(engine, incoming), outgoing, incoming, exposed=True)


def _mooncake(memory: BlockMemory, wanted: MooncakeSettings) -> _Staged:
    """Raises TransportUnavailable."""
    engine = MooncakeEngine(wanted.host, wanted.protocol, wanted.devices)
    if wanted.protocol == "rdma" and wanted.gpu_direct and isinstance(memory, CudaMemory):
        try:
            staged = _registered(engine, partial(GpuStagingArea, memory), wanted)
        except (TransportUnavailable, torch.OutOfMemoryError) as error:
            logger.warning("mooncake goes through main memory: no buffers on the GPU: %s", error)
        else:
            logger.info("mooncake reads and writes buffers on the GPU")
            return staged
    return _registered(engine, partial(StagingArea, memory.layout), wanted)


def _registered(engine: MooncakeEngine, area: Callable[[int], StagingArea], wanted: MooncakeSettings) -> _Staged:
    """`area` makes one for so many moves. Raises TransportUnavailable."""
    outgoing, incoming = area(wanted.max_out), area(wanted.max_in)
    exposed = wanted.protocol != "tcp"
    engine.register(outgoing.address, outgoing.num_bytes)
    if exposed:
        # A network card writes only where it may; over TCP the process itself writes, and nobody else shall.
        try:
            engine.register(incoming.address, incoming.num_bytes)
        except TransportUnavailable:
            engine.unregister(outgoing.address)
            raise
    return _Staged(engine, MooncakeNetwork(engine), outgoing, incoming, exposed)


def tls_context(settings: WorkerSettings, *, server_side: bool) -> ssl.SSLContext | None:
    """None without certificates."""
    return None if settings.tls is None else block_tls.context(*settings.tls, server_side=server_side)


def beside_the_model(start: Callable[[], T]) -> T:
    """Threads that are started so run where the mover may, too."""
    cpus = _unbound_cpus()

    def unbind() -> None:
        with contextlib.suppress(OSError):  # a wish, no condition
            os.sched_setaffinity(0, cpus)

    with ThreadPoolExecutor(1, initializer=unbind) as helper:
        return helper.submit(start).result()


def _unbound_cpus() -> set[int]:
    """The CPUs of our parent process, which is not bound.

    vLLM's CPU worker binds its main thread to one core, and a thread inherits that: the mover would
    take turns with the forward pass although other cores are free.
    """
    return os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)


def _layout_or_reason(worker: Worker, device: str) -> tuple[BlockLayout, str | None]:
    nothing = BlockLayout(base=0, storage_bytes=0, num_blocks=0, regions=(), layout="")
    if device not in ("cpu", "cuda"):
        return nothing, f"the KV cache lies on a {device} device, which no transport reads"
    try:
        layers = worker.vllm_config.compilation_config.static_forward_context
        return layout_of(worker.model_runner, arrangement_of(worker, device), layers), None
    except TransportUnavailable as error:
        return nothing, str(error)
