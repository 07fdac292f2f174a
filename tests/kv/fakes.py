# SPDX-License-Identifier: Apache-2.0
"""Memory, processes and a worker to try the data plane on. `python -m tests.kv.fakes` is a source
worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_llumnix.kv.memory.block_memory import CudaMemory, HostMemory
from vllm_llumnix.kv.memory.layout import BlockLayout, Strip, TensorRegion
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.messages import CudaShare, NetworkName, NixlMemory, PeerMemory, Pull
from vllm_llumnix.kv.mover.process import NoncePage, describe_memory
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine
from vllm_llumnix.kv.networks.nixl import NixlEngine
from vllm_llumnix.kv.networks.staging import SharedStagingArea, StagingArea
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import Grants
from vllm_llumnix.kv.settings import WorkerSettings

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def regions_of(layout: str, shapes: list[tuple[int, int]], num_blocks: int) -> tuple[tuple[TensorRegion, ...], int]:
    """Regions of (num_layers, page_bytes) as vLLM would place them, and the bytes they need."""
    per_block = sum(num_layers * page for num_layers, page in shapes)
    regions, offset = [], 0
    for num_layers, page in shapes:
        if layout.startswith("L"):
            regions.append(TensorRegion(offset, num_layers, page * num_blocks, page, page))
            offset += num_layers * page * num_blocks
        else:
            regions.append(TensorRegion(offset, num_layers, page, per_block, page))
            offset += num_layers * page
    return tuple(regions), per_block * num_blocks


@dataclass
class Memory:
    """A KV cache: one array and its layout."""

    layout: str = "LBHNC"
    shapes: list[tuple[int, int]] = field(default_factory=lambda: [(4, 256)])
    num_blocks: int = 32
    seed: int = 0
    heads: int = 0
    tokens: int = 0
    strips: tuple[tuple[int, int], ...] = ()
    """The fields of each `Strip`."""

    def __post_init__(self) -> None:
        regions, size = regions_of(self.layout, self.shapes, self.num_blocks)
        self.bytes = np.random.default_rng(self.seed).integers(0, 256, size, dtype=np.uint8)
        self.blocks = BlockLayout(
            base=self.bytes.ctypes.data,
            storage_bytes=size,
            num_blocks=self.num_blocks,
            regions=regions,
            layout=self.layout,
            heads=self.heads,
            tokens=self.tokens,
            strips=tuple(Strip(*fields) for fields in self.strips),
        )

    def block(self, block: int) -> list[bytes]:
        """The pages of one block, layer by layer, straight from the formula."""
        return [
            self.bytes[at : at + region.page_bytes].tobytes()
            for region in self.blocks.regions
            for layer in range(region.num_layers)
            for at in [region.offset + layer * region.layer_stride + block * region.block_stride]
        ]


def describe(
    memory: Memory,
    nonce: NoncePage,
    instance: str = "here",
    tcp: str | None = None,
    mooncake: str | None = None,
    cuda: CudaShare | None = None,
    nixl: NixlMemory | None = None,
) -> PeerMemory:
    return describe_memory(memory.blocks, nonce, instance, rank=0, tcp=tcp, mooncake=mooncake, cuda=cuda, nixl=nixl)


def pull_of(peer: PeerMemory, source: list[int], destination: list[int], capability: bytes = b"", **more: Any) -> Pull:
    return Pull(
        peer=peer,
        src_blocks=source,
        dst_blocks=destination,
        capability=capability,
        **({"job": 1, "deadline_s": 5.0} | more),
    )


def shared(memory: Memory) -> CudaShare:
    """What torch would say of `memory` if it were on a GPU of this process."""
    return CudaShare(
        gpu="GPU-1",
        handle=b"\x03c" + bytes(range(64)),
        num_bytes=memory.bytes.nbytes,
        offset=0,
        counter=f"/torch_{os.getpid()}_{2**32 - 1}_0".encode(),
        counter_offset=0,
        event=bytes(64),
        event_required=True,
    )


class SourceProcess:
    """Another process that holds a `Memory`; `memory` is our own copy of its bytes.

    With a `capability`, it also serves all of its blocks under that; over a `network` as well. `cuda`: it describes
    them as those of a GPU.
    """

    def __init__(
        self, capability: bytes = b"", network: NetworkName | None = None, cuda: bool = False, **shape: Any
    ) -> None:
        self.memory = Memory(**shape)
        flags = [repr(shape), capability.hex(), network or "", "cuda" * cuda]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.fakes", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._child.stdout is not None
        line = self._child.stdout.readline().decode()
        self.peer = msgspec.msgpack.decode(bytes.fromhex(line), type=PeerMemory)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._child.kill()
        self._child.wait()

    def stop(self) -> None:
        """SIGSTOP."""
        self._child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def source_process(
    capability: bytes = b"", network: NetworkName | None = None, cuda: bool = False, **shape: Any
) -> Iterator[SourceProcess]:
    source = SourceProcess(capability, network, cuda, **shape)
    try:
        yield source
    finally:
        source.close()


class FakeWorker:
    """What `start_mover` reads of a vLLM worker, on a torch storage that holds a `Memory`'s
    layout: by default that of `memory` itself.
    """

    def __init__(self, memory: Memory, device: str = "cpu", storage: torch.Tensor | None = None) -> None:
        self.rank = 0
        self.device = torch.device(device)
        self.storage = torch.from_numpy(memory.bytes) if storage is None else storage
        self.model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        layer = SimpleNamespace(isa="amx")
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"0": layer, "1": layer}),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: {"model_type": "fake"})),
        )
        self.model_runner = SimpleNamespace(
            kv_cache_config=kv_cache_config(memory),
            kv_caches=[self.storage[:16], self.storage[16:]],
            model=self.model,
        )

    def execute_model(self, scheduler_output: Any) -> None:
        """A step: what the tests compute, they compute elsewhere."""

    def compile_or_warm_up_model(self) -> float:
        """Captures CUDA graphs."""
        return 0.0

    def sleep(self, level: int = 1) -> None:
        """vLLM's sleep mode."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Of a part."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Its end."""


def packed(**settings: Any) -> bytes:
    """What an engine called `here` tells its workers."""
    return messages.encode(WorkerSettings(**{"instance": "here", **settings}))


class FullAttentionSpec:
    """Stands for vLLM's class of that name."""

    def __init__(
        self, page_size_bytes: int, dtype: npt.DTypeLike = np.uint16, num_kv_heads: int = 0, block_size: int = 0
    ) -> None:
        self.page_size_bytes = self.unpadded_page_size_bytes = page_size_bytes
        self.dtype = np.dtype(dtype)
        self.num_kv_heads, self.block_size = num_kv_heads, block_size
        self.num_head_slots = None


class UniformTypeKVCacheSpecs:
    def __init__(self, kv_cache_specs: dict[str, Any]) -> None:
        self.kv_cache_specs = kv_cache_specs


def kv_cache_config(memory: Memory) -> Any:
    """What vLLM would have planned for `memory`: one cache group, a tensor for each region."""
    tensors, specs = [], {}
    for number, region in enumerate(memory.blocks.regions):
        layers = [f"{number}.{layer}" for layer in range(region.num_layers)]
        spec = FullAttentionSpec(region.page_bytes, num_kv_heads=memory.heads, block_size=memory.tokens)
        specs |= dict.fromkeys(layers, spec)
        tensors.append(
            SimpleNamespace(
                layers=layers,
                layer_stride=region.layer_stride,
                block_stride=region.block_stride,
                offset=region.offset,
                host_resident=False,
            )
        )
    group = SimpleNamespace(
        layer_names=list(specs),
        kv_cache_spec=UniformTypeKVCacheSpecs(specs),
        enable_kv_transfer=True,
    )
    return SimpleNamespace(
        num_blocks=memory.num_blocks,
        kv_cache_layout=memory.layout,
        kv_cache_groups=[group],
        kv_cache_tensors=tensors,
    )


class FakeStream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeEvent:
    """Done when it is asked for the third time."""

    def __init__(self, **_: Any) -> None:
        self.asked = 0

    def record(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)

    def synchronize(self) -> None:
        """There is nothing to wait for: what was enqueued is done."""

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2


def on_gpu(memory: Memory) -> CudaMemory:
    return CudaMemory(memory.blocks, torch.from_numpy(memory.bytes).untyped_storage())


def _serve() -> None:
    """Hold a memory until the parent closes our stdin, or ends."""
    import ast

    memory = Memory(**ast.literal_eval(sys.argv[1]))
    nonce, tcp, found = NoncePage(), None, dict[str, Any]()
    if capability := bytes.fromhex(sys.argv[2]):
        grants = Grants()
        grants.allow(capability, range(memory.num_blocks))
        staging: dict[NetworkName, StagingArea] = {}
        match sys.argv[3]:
            case "mooncake":
                area, engine = StagingArea(memory.blocks), MooncakeEngine("127.0.0.1", "tcp")
                engine.register(area.address, area.num_bytes)
                staging, found = {"mooncake": area}, {"mooncake": engine.segment}
            case "nixl":
                outgoing, incoming = (SharedStagingArea(memory.blocks) for _ in range(2))
                beside = NixlEngine("lo", outgoing, incoming)
                staging, found = {"nixl": outgoing}, {"nixl": beside.memory}
        server = BlockServer(HostMemory(memory.blocks), nonce.value, grants, "127.0.0.1", staging=staging)
        server.start()
        tcp = f"127.0.0.1:{server.port}"
    cuda = shared(memory) if sys.argv[4] else None
    print(messages.encode(describe(memory, nonce, "there", tcp, cuda=cuda, **found)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
