# SPDX-License-Identifier: Apache-2.0
"""What of the data plane only a GPU reaches, gone through once over the fake GPU.

    python -m tests.support.fake_gpu.paths

One line of JSON: for each path what came of it, True if the bytes are in their places. Copies compute nothing but
addresses, and the fake carries them out; see `tests/benchmarks/test_gpu_fake.py`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tests.kv.fakes import FakeWorker, Memory, packed
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import Uploaded
from vllm_llumnix.kv.memory.block_memory import CudaMemory, HostMemory, OnDevice
from vllm_llumnix.kv.memory.layout import Cut
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.networks.staging import GpuStagingArea
from vllm_llumnix.kv.worker import start_mover, stop_mover

GPU = torch.device("cuda", 0)
SHAPES = [(3, 8 * 4096), (1, 512)]
IDS, OTHER_IDS = [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]


def pair(shapes: Any = SHAPES, **more: Any) -> tuple[Memory, CudaMemory, torch.Tensor]:
    """A memory, and the same on the GPU."""
    memory = Memory(shapes=shapes, seed=1, **more)
    storage = torch.from_numpy(memory.bytes).to(GPU)
    return memory, CudaMemory(memory.blocks, storage.untyped_storage()), storage


def expected(memory: Memory, ids: list[int], cut: Cut | None = None) -> torch.Tensor:
    host = HostMemory(memory.blocks).cut(cut)
    buffer = torch.zeros(len(ids) * host.layout.bytes_per_block, dtype=torch.uint8)
    host.gather(ids, buffer)
    return buffer


def through_host_buffers() -> bool:
    memory, gpu, storage = pair()
    buffer = gpu.buffer(5 * memory.blocks.bytes_per_block)
    gpu.gather(IDS, buffer)
    assert buffer.is_pinned()
    assert torch.equal(buffer, expected(memory, IDS))
    gpu.scatter(OTHER_IDS, buffer)
    HostMemory(memory.blocks).scatter(OTHER_IDS, buffer)
    return torch.equal(storage.cpu(), torch.from_numpy(memory.bytes))


def through_a_socket() -> bool:
    """As `tcp` has it, from a block of 24 MiB, in parts."""
    there, source, _ = pair([(24, 1 << 20)], num_blocks=3)
    here = Memory(shapes=[(24, 1 << 20)], num_blocks=3, seed=2)
    storage = torch.from_numpy(here.bytes).to(GPU)
    destination = CudaMemory(here.blocks, storage.untyped_storage())
    ends = socket.socketpair()
    sending, receiving = source.transfer([2, 0], False), destination.transfer([0, 1], False)

    def send() -> None:
        while sending.left:
            sending.send(ends[0], 1 << 20)

    thread = threading.Thread(target=send)
    thread.start()
    while receiving.left:
        receiving.receive(ends[1], 1 << 20)
    receiving.close()
    thread.join()
    sending.close()
    for end in ends:
        end.close()
    HostMemory(here.blocks).scatter([0, 1], expected(there, [2, 0]))
    return torch.equal(storage.cpu(), torch.from_numpy(here.bytes))


def on_the_device() -> bool:
    memory, gpu, _ = pair()
    buffer = torch.zeros(5 * memory.blocks.bytes_per_block, dtype=torch.uint8, device=GPU)
    OnDevice(gpu).gather(IDS, buffer)
    return torch.equal(buffer.cpu(), expected(memory, IDS))


def parts_of_pages() -> bool:
    memory, gpu, _ = pair([(3, 8 * 4096)], heads=8, tokens=4, strips=((1, 8 * 1024),))
    cut = Cut(1, 2, "heads")
    buffer = gpu.buffer(5 * memory.blocks.bytes_per_block // 2)
    gpu.cut(cut).gather(IDS, buffer)
    return torch.equal(buffer, expected(memory, IDS, cut))


def staging_on_the_gpu() -> bool:
    """What GPUDirect RDMA reads and writes."""
    memory, gpu, _ = pair([(3, 8 * 4096)], heads=8, tokens=4, strips=((1, 8 * 1024),))
    area = GpuStagingArea(gpu, 2, 1 << 20, 8 << 20)
    (slot,) = area.take(1)
    cut = Cut(1, 2, "heads")
    blocks = area.blocks_of(gpu).cut(cut)
    blocks.gather(IDS, slot.memory)
    size = len(IDS) * blocks.layout.bytes_per_block
    private = area.private()
    area.copy(slot.memory[:size], private[:size])
    area.wipe(slot.memory)  # by a kernel, which the fake does not carry out
    area.give_back([slot])
    return torch.equal(private[:size].cpu(), expected(memory, IDS, cut))


def ids_uploaded_once() -> bool:
    memory, gpu, storage = pair()
    ids = Uploaded.to(GPU, IDS)
    buffer = torch.zeros(2 * memory.blocks.bytes_per_block, dtype=torch.uint8, device=GPU)
    kernels.gather(storage, memory.blocks, ids[1:3], buffer)
    torch.cuda.synchronize()
    return torch.equal(buffer.cpu(), expected(memory, IDS[1:3])) and gpu.ids(IDS).there.device == GPU


def a_worker(num_blocks: int = 8) -> MoverInfo:
    memory = Memory(shapes=[(3, 8 * 4096)], num_blocks=num_blocks)
    worker: Any = FakeWorker(memory, str(GPU), torch.from_numpy(memory.bytes).to(GPU))
    worker.model.to(GPU)
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("local", "tcp"))), type=MoverInfo)
    worker.sleep()
    worker.wake_up()
    worker.compile_or_warm_up_model()
    stop_mover(worker)
    return info


def worker_starts() -> bool:
    info = a_worker()
    return info.memory.unavailable is None and info.memory.cuda is not None and info.isa == "cuda-9.0"


def worker_without_memory() -> str:
    """vLLM has taken all: what torch says then reaches the engine, which starts."""
    held = [torch.empty(1 << 20, dtype=torch.uint8, device=GPU)]
    torch.cuda.empty_cache()
    try:
        while True:
            held.append(torch.empty(2 << 20, dtype=torch.uint8, device=GPU))
    except torch.OutOfMemoryError:
        del held[-12:]  # the memory of the fake worker, and no more
    torch.cuda.empty_cache()
    found = a_worker(num_blocks=220).memory.unavailable or "available"
    held.clear()
    torch.cuda.empty_cache()
    return found


PATHS: tuple[Callable[[], bool | str], ...] = (
    *(through_host_buffers, through_a_socket, on_the_device, parts_of_pages, staging_on_the_gpu),
    *(ids_uploaded_once, worker_starts, worker_without_memory),
)


def main() -> None:
    found: dict[str, bool | str] = {}
    for path in PATHS:
        try:
            found[path.__name__] = path()
        except Exception as error:  # noqa: BLE001 - the others are still to come
            found[path.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
