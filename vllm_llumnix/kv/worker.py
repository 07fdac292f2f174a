# SPDX-License-Identifier: Apache-2.0
"""Start and stop a vLLM worker's mover: called in its main thread, through `collective_rpc`."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from vllm_llumnix import faults
from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.hosts import reachable_host, with_port
from vllm_llumnix.kv import kernels, messages
from vllm_llumnix.kv.block_server import BlockServer
from vllm_llumnix.kv.cuda_share import share
from vllm_llumnix.kv.endpoint import PrivateDirectory
from vllm_llumnix.kv.grants import CAPTURES, Grants
from vllm_llumnix.kv.layout import BlockLayout
from vllm_llumnix.kv.memory import BlockMemory, CudaMemory, HostMemory
from vllm_llumnix.kv.messages import MoverInfo
from vllm_llumnix.kv.mooncake import MooncakeEngine
from vllm_llumnix.kv.mover import Mover
from vllm_llumnix.kv.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.seams import SEAMS
from vllm_llumnix.kv.settings import MooncakeSettings, WorkerSettings
from vllm_llumnix.kv.staging import GpuStagingArea, StagingArea
from vllm_llumnix.kv.transport.base import Transport
from vllm_llumnix.kv.transport.connections import Connections
from vllm_llumnix.kv.transport.local import LocalTransport
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport
from vllm_llumnix.kv.transport.mooncake import MooncakeTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport
from vllm_llumnix.kv.vllm_cache import caches_of, layout_of, storage_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAMPLED_BYTES = 4096
KV_TAG = "kv_cache"
"""What vLLM's sleep mode calls the KV memory."""


class _Running(NamedTuple):
    mover: Mover
    nonce: NoncePage
    server: BlockServer | None
    mooncake: _Mooncake | None


class _Mooncake(NamedTuple):
    """`outgoing` is what peers read, into `incoming` is read from them."""

    engine: MooncakeEngine
    outgoing: StagingArea
    incoming: StagingArea
    exposed: bool
    """Whether peers can write to `incoming` as well."""


_running: _Running | None = None


def start_mover(worker: Any, packed_settings: bytes) -> bytes:
    """Start this worker's mover, in place of an earlier one; returns msgpack of `MoverInfo`.

    packed_settings: msgpack of `WorkerSettings`. A cache whose blocks cannot be carried is no error: the description
    says so (`memory.unavailable`). Raises OSError, ValueError, `zmq.ZMQError` if an endpoint cannot be had.
    """
    global _running
    settings = msgspec.msgpack.decode(packed_settings, type=WorkerSettings)
    worker = getattr(worker, "worker", worker)
    stop_mover(worker)
    device = str(worker.device.type)
    if device == "cpu":
        _permit_amx()
    layout, unavailable = _layout_or_reason(worker.model_runner, device)
    nonce, grants = NoncePage(), Grants()
    transports: list[Transport] = []
    # Torch allocates on a thread's current device, which is the first one unless somebody says otherwise.
    at_start = partial(torch.cuda.set_device, worker.device) if device == "cuda" else lambda: None
    server, mooncake, shared, missing = None, None, None, dict[str, str]()
    choice: kernels.Choice | None = None
    if unavailable is not None:
        missing = dict.fromkeys(settings.transports, unavailable)
        logger.warning("KV blocks of this worker cannot be moved: %s", unavailable)
    else:
        on_gpu = device == "cuda"
        memory: BlockMemory = CudaMemory(layout, storage_of(worker.model_runner)) if on_gpu else HostMemory(layout)
        choice = _beside_the_model(partial(kernels.settle, layout, memory.storage.device))
        try:
            mooncake = _beside_the_model(lambda: _mooncake(memory, settings))
        except TransportUnavailable as error:
            if settings.mooncake is None or settings.mooncake.required:
                raise
            missing["mooncake"] = str(error)
            logger.info("no transport mooncake: %s", error)
        if device == "cuda" and "local" in settings.transports:
            try:
                shared = share(storage_of(worker.model_runner))
            except TransportUnavailable as error:
                missing["local"] = str(error)
                logger.warning("no transport local: %s", error)
        names = [name for name in settings.transports if name not in missing]
        transports = [_transport(name, memory, settings, mooncake) for name in names]
        if settings.allow_readers and "local" in names:
            allow_readers()
        if {"tcp", "mooncake"}.intersection(names):
            tls, staging = tls_context(settings, server_side=True), mooncake and mooncake.outgoing
            server = BlockServer(memory, nonce.value, grants, settings.host, tls, staging, at_start)
            _beside_the_model(server.start)
    mover = Mover(
        rank=worker.rank,
        layout=layout,
        transports=transports,
        directory=PrivateDirectory(settings.directory),
        missing=missing,
        grants=grants,
        at_start=at_start,
    )
    _beside_the_model(mover.start)
    if device == "cuda":
        _watch_sleep(worker)
        _watch_captures(worker)
    if faults.armed("worker.model") or faults.armed("worker.request"):
        _arm(worker)
    _running = _Running(mover, nonce, server, mooncake)
    tcp = with_port(reachable_host(settings.host), server.port) if server is not None else None
    return messages.encode(
        MoverInfo(
            rank=worker.rank,
            endpoint=mover.endpoint,
            thread=mover.thread,
            memory=describe_memory(
                layout,
                nonce,
                settings.instance,
                worker.rank,
                unavailable,
                tcp,
                mooncake and mooncake.engine.segment,
                shared,
            ),
            isa=_isa(worker, device),
            device=device,
            weights=fingerprint(worker.model_runner.model),
            caches=caches_of(worker.model_runner),
            copied_by=choice.backend if choice else "",
            passed_over=choice.passed_over if choice else (),
        )
    )


def stop_mover(worker: Any) -> None:
    """End the mover, if one runs, for shutdown. Peers that still read will fail."""
    global _running
    if _running is not None:
        running, _running = _running, None
        running.nonce.revoke()
        if running.server is not None:
            running.server.close()
        running.mover.close()
        if running.mooncake is not None:
            running.mooncake.engine.close()


def _watch_sleep(worker: Any) -> None:
    """While vLLM's sleep mode has taken the KV memory away nobody touches it: on a GPU that would end the worker."""
    stock_sleep, stock_discard, stock_wake_up = worker.sleep, worker.discard, worker.wake_up

    def sleep(level: int = 1) -> None:
        _suspend()
        stock_sleep(level)

    def discard(tags: tuple[str, ...]) -> None:
        if KV_TAG in tags:
            _suspend()
        stock_discard(tags)

    def wake_up(tags: list[str] | None = None) -> None:
        stock_wake_up(tags)
        if tags is None or KV_TAG in tags:
            _resume()

    SEAMS.wrap(worker, "Worker.sleep", sleep)
    SEAMS.wrap(worker, "Worker.discard", discard)
    SEAMS.wrap(worker, "Worker.wake_up", wake_up)


def _watch_captures(worker: Any) -> None:
    """While CUDA graphs are captured nobody else touches the GPU: what another thread allocates or asks of it voids the
    graph. That is over when movers start, but comes again when elastic expert parallelism changes the number of ranks.
    """
    stock = worker.compile_or_warm_up_model

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        mover = _running.mover if _running is not None else None
        if mover is None or mover.suspended:
            return stock(*args, **kwargs)
        mover.suspend(CAPTURES, tidies=False)
        try:
            return stock(*args, **kwargs)
        finally:
            mover.resume()

    SEAMS.wrap(worker, "Worker.compile_or_warm_up_model", compile_or_warm_up_model)


def _suspend() -> None:
    if _running is not None:
        _running.mover.suspend()


def _resume() -> None:
    if _running is not None:
        _running.mover.resume()


def _transport(name: str, memory: BlockMemory, settings: WorkerSettings, mooncake: _Mooncake | None) -> Transport:
    match name:
        case "local" if isinstance(memory, CudaMemory):
            return LocalCudaTransport(memory.storage, memory.layout)
        case "local":
            return LocalTransport(memory.layout)
        case "tcp":
            return TcpTransport(memory, tls_context(settings, server_side=False))
        case "mooncake" if mooncake is not None:
            connections = Connections(tls_context(settings, server_side=False))
            return MooncakeTransport(memory, mooncake.engine, mooncake.incoming, connections, exposed=mooncake.exposed)
    raise ValueError(f"no transport {name!r}")


def _mooncake(memory: BlockMemory, settings: WorkerSettings) -> _Mooncake | None:
    """None if it is not to be used. Raises TransportUnavailable."""
    wanted = settings.mooncake
    if wanted is None:
        return None
    engine = MooncakeEngine(wanted.host, wanted.protocol, wanted.devices)
    if wanted.protocol == "rdma" and wanted.gpu_direct and isinstance(memory, CudaMemory):
        try:
            mooncake = _staged(engine, partial(GpuStagingArea, memory), wanted)
        except (TransportUnavailable, torch.OutOfMemoryError) as error:
            logger.warning("mooncake goes through main memory: no buffers on the GPU: %s", error)
        else:
            logger.info("mooncake reads and writes buffers on the GPU")
            return mooncake
    return _staged(engine, partial(StagingArea, memory.layout), wanted)


def _staged(engine: MooncakeEngine, area: Callable[[int], StagingArea], wanted: MooncakeSettings) -> _Mooncake:
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
    return _Mooncake(engine, outgoing, incoming, exposed)


def tls_context(settings: WorkerSettings, *, server_side: bool) -> ssl.SSLContext | None:
    """Both ends show a certificate of the same authority. None without certificates."""
    if settings.tls is None:
        return None
    certificate, key, authority = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _arm(worker: Any) -> None:
    """Let a test make the model hang, or the worker die of a marked request in its first step."""
    execute = worker.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        faults.hit("worker.model")
        faults.hit_tokens("worker.request", (new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs))
        return execute(scheduler_output, *args, **kwargs)

    SEAMS.wrap(worker, "Worker.execute_model", execute_model)


def _beside_the_model(start: Callable[[], T]) -> T:
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


def _layout_or_reason(model_runner: Any, device: str) -> tuple[BlockLayout, str | None]:
    nothing = BlockLayout(base=0, storage_bytes=0, num_blocks=0, regions=(), layout="")
    if device not in ("cpu", "cuda"):
        return nothing, f"the KV cache lies on a {device} device, which no transport reads"
    try:
        return layout_of(model_runner), None
    except TransportUnavailable as error:
        return nothing, str(error)


def _permit_amx() -> None:
    """Ask the kernel for AMX tiles: without, a first forward pass of few tokens dies of SIGILL."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("the kernel does not permit AMX tiles; vLLM's CPU kernels may crash")


def _isa(worker: Any, device: str) -> str:
    """How the attention kernels pack the inside of a page."""
    if device == "cpu":
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return "+".join(sorted({layer.isa for layer in layers if getattr(layer, "isa", None)})) or "none"
    if device == "cuda":
        return "cuda-{}.{}".format(*torch.cuda.get_device_capability(worker.device))
    return device


def fingerprint(model: Any) -> str:
    """Eight hex digits that tell models of different weights apart.

    Made of the names, shapes and types of all parameters, and of up to 4 KiB of each. Equal for
    workers that loaded the same weights in the same way. vLLM's CPU build moves the weights of
    linear layers into packed buffers and leaves empty parameters; there the embeddings and norms
    speak for the model. They do, too, where data-parallel ranks share the experts out or
    experts change places: every rank holds others, and the KV cache knows nothing of them.
    """
    digest, scattered = 0, _scattered_experts(model)
    for name, parameter in sorted(model.named_parameters()):
        if id(parameter) in scattered:
            continue
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), digest)
        try:
            digest = zlib.crc32(_sampled(parameter), digest)
        except (RuntimeError, TypeError) as error:
            # On the meta device, or of a type that this device cannot index: the others speak for the model.
            logger.warning("the weights of %s are not part of the model's fingerprint: %s", name, error)
    return f"{digest:08x}"


def _scattered_experts(model: Any) -> set[int]:
    """The ids of parameters of experts that do not lie where they lie in a peer of the same model and settings."""
    scattered = set[int]()
    for module in model.modules():
        if any(cls.__name__ == "RoutedExperts" for cls in type(module).__mro__):
            parallel = module.moe_config.moe_parallel_config
            if parallel.dp_size > 1 or parallel.enable_eplb:
                scattered.update(map(id, module.parameters()))
    return scattered


def _sampled(parameter: Any) -> bytes:
    """Evenly spaced elements of a tensor, whatever its strides and device."""
    count = min(parameter.numel(), max(1, SAMPLED_BYTES // parameter.element_size()))
    if count == 0:
        return b""
    shape = tuple(parameter.shape) or (1,)
    flat = np.linspace(0, parameter.numel() - 1, count).astype(np.int64)
    index = tuple(torch.from_numpy(axis).to(parameter.device) for axis in np.unravel_index(flat, shape))
    sample = parameter.detach().reshape(shape)[index] if parameter.ndim == 0 else parameter.detach()[index]
    return bytes(sample.contiguous().view(torch.uint8).cpu().numpy())
