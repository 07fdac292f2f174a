# SPDX-License-Identifier: Apache-2.0
"""Both ends of `transport.staged` in one process, over each of the networks."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

from tests.kv.fakes import Memory, describe, on_gpu, pull_of, until
from vllm_llumnix.kv.data_plane import tls_context
from vllm_llumnix.kv.memory.block_memory import BlockMemory, HostMemory
from vllm_llumnix.kv.mover.messages import NetworkName, PeerMemory
from vllm_llumnix.kv.mover.process import NoncePage
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine, MooncakeNetwork
from vllm_llumnix.kv.networks.nixl import NixlEngine, NixlNetwork
from vllm_llumnix.kv.networks.staging import GpuStagingArea, SharedStagingArea, StagingArea
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, Grants
from vllm_llumnix.kv.settings import WorkerSettings
from vllm_llumnix.kv.transport.connections import Connections
from vllm_llumnix.kv.transport.staged import Network, StagedTransport

CHUNK = 8 << 20
CAPABILITY = bytes(range(CAPABILITY_BYTES))
BIG = [(4, 65536)]


class Over(Protocol):
    """A network with a source's and a destination's engine in it; each takes a while to start."""

    name: NetworkName
    title: str

    def source(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, dict[str, Any]]:
        """The source's memory and what is read of it, and what its peers are told."""

    def reader(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, Network]: ...

    def done(self, area: StagingArea) -> None:
        """A source has gone."""

    def close(self) -> None: ...


class OverMooncake:
    name: NetworkName = "mooncake"
    title = "Mooncake"

    def __init__(self) -> None:
        self.engines = [MooncakeEngine("127.0.0.1", "tcp") for _ in range(2)]

    def source(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, dict[str, Any]]:
        blocks, made = _staged(memory, gpu, **area)
        self.engines[0].register(made.address, made.num_bytes)
        return blocks, made, {"mooncake": self.engines[0].segment}

    def reader(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, Network]:
        return *_staged(memory, gpu, **area), MooncakeNetwork(self.engines[1])

    def done(self, area: StagingArea) -> None:
        self.engines[0].unregister(area.address)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        until(lambda: not any(thread.name.startswith("llumnix-mooncake") for thread in threading.enumerate()))


class _Started(NamedTuple):
    engine: NixlEngine
    outgoing: SharedStagingArea
    incoming: SharedStagingArea


class OverNixl:
    """Processes are started for each shape of area, and kept."""

    name: NetworkName = "nixl"
    title = "NIXL"

    def __init__(self) -> None:
        self._started: dict[object, _Started] = {}

    def start(self, whose: str, memory: Memory, **area: int) -> _Started:
        key = whose, memory.blocks.bytes_per_block, tuple(area.items())
        if key not in self._started:
            outgoing, incoming = (SharedStagingArea(memory.blocks, **area) for _ in range(2))
            self._started[key] = _Started(NixlEngine("lo", outgoing, incoming), outgoing, incoming)
        return self._started[key]

    def source(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, dict[str, Any]]:
        started = self.start("source", memory, **area)
        return on_gpu(memory) if gpu else HostMemory(memory.blocks), started.outgoing, {"nixl": started.engine.memory}

    def reader(self, memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea, Network]:
        engine, _, incoming = self.start("reader", memory, **area)
        return on_gpu(memory) if gpu else HostMemory(memory.blocks), incoming, NixlNetwork(engine, incoming)

    def done(self, area: StagingArea) -> None:
        """The process is kept."""

    def close(self) -> None:
        for started in self._started.values():
            started.engine.close()


def _staged(memory: Memory, gpu: bool, **area: int) -> tuple[BlockMemory, StagingArea]:
    if not gpu:
        return HostMemory(memory.blocks), StagingArea(memory.blocks, **area)
    cuda = on_gpu(memory)
    return cuda, GpuStagingArea(cuda, **area)


class Source:
    def __init__(
        self, over: Over, memory: Memory, tls: WorkerSettings | None = None, *, gpu: bool = False, **area: int
    ) -> None:
        self._over = over
        self.memory = memory
        self.grants = Grants()
        blocks, self.area, told = over.source(memory, gpu, **area)
        self._nonce = NoncePage()
        context = tls_context(tls, server_side=True) if tls else None
        staging = {over.name: self.area}
        self.server = BlockServer(blocks, self._nonce.value, self.grants, "127.0.0.1", context, staging)
        self.server.start()
        self.peer = describe(memory, self._nonce, tcp=f"127.0.0.1:{self.server.port}", **told)

    @property
    def all_free(self) -> bool:
        return self.area.num_free * self.area.slot_bytes == self.area.num_bytes

    def close(self) -> None:
        self.server.close()
        self._over.done(self.area)
        until(lambda: self.all_free)


class Reader:
    def __init__(
        self,
        over: Over,
        memory: Memory,
        tls: WorkerSettings | None = None,
        *,
        exposed: bool = False,
        gpu: bool = False,
        **area: int,
    ) -> None:
        self.memory = memory
        blocks, self.area, network = over.reader(memory, gpu, **area)
        connections = Connections(tls_context(tls, server_side=False) if tls else None)
        self.transport = StagedTransport(blocks, network, self.area, connections, exposed=exposed)

    def pull(
        self,
        peer: PeerMemory,
        source: list[int],
        destination: list[int],
        capability: bytes = CAPABILITY,
        chunk_bytes: int = CHUNK,
    ) -> Any:
        return self.transport.pull(pull_of(peer, source, destination, capability), chunk_bytes)

    @property
    def all_free(self) -> bool:
        return self.area._there_are(self.area.num_bytes // self.area.slot_bytes)
