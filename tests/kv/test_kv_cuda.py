# SPDX-License-Identifier: Apache-2.0
"""The GPU's side of every transport, with streams that are none and "GPU" memory that is main memory.

What this cannot show is whether CUDA does what the code takes it to do: see `benchmarks/gpu_check`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.kv.fakes import (
    FakeEvent,
    FakeStream,
    FakeWorker,
    Memory,
    describe,
    on_gpu,
    packed,
    pull_of,
    shared,
    source_process,
    until,
)
from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv import data_plane, kernels
from vllm_llumnix.kv import fingerprint as kv_fingerprint
from vllm_llumnix.kv import worker as kv_worker
from vllm_llumnix.kv.kernels import plan
from vllm_llumnix.kv.memory import block_memory as kv_memory
from vllm_llumnix.kv.memory.block_memory import CudaMemory, HostMemory
from vllm_llumnix.kv.memory.cuda_share import require_plausible
from vllm_llumnix.kv.mover import mover_thread as mover
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
from vllm_llumnix.kv.mover.messages import CudaShare, MoverInfo, PeerMemory, PullReport
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.mover.mover_thread import Mover
from vllm_llumnix.kv.mover.process import NoncePage, describe_memory
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import ASLEEP, CAPABILITY_BYTES, CAPTURES, Grants
from vllm_llumnix.kv.settings import UNLIMITED, Limit
from vllm_llumnix.kv.transport import local_cuda
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport
from vllm_llumnix.kv.worker import start_mover, stop_mover

pytestmark = pytest.mark.usefixtures("gpu_in_main_memory")

CAPABILITY = bytes(CAPABILITY_BYTES)
SHAPES = [(3, 4096), (1, 512)]


@pytest.fixture
def peer() -> Iterator[Any]:
    pages: list[NoncePage] = []

    def describe(memory: Memory, **more: Any) -> PeerMemory:
        pages.append(NoncePage())
        return describe_memory(memory.blocks, pages[-1], "there", 0, **more)

    yield describe
    for page in pages:
        page.revoke()


@pytest.mark.parametrize("scratch_bytes", [1, 40_000, 1 << 20])
def test_there_and_back(scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", scratch_bytes)
    there, here = Memory(shapes=SHAPES, seed=1), Memory("BLHNC", SHAPES, seed=2)
    source, destination = on_gpu(there), on_gpu(here)
    ids, other_ids = [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]
    buffer = torch.zeros(5 * there.blocks.bytes_per_block, dtype=torch.uint8)
    source.gather(ids, buffer)
    reference = torch.zeros_like(buffer)
    HostMemory(there.blocks).gather(ids, reference)
    assert torch.equal(buffer, reference)
    destination.scatter(other_ids, buffer)
    for theirs, ours in zip(ids, other_ids, strict=True):
        assert here.block(ours) == there.block(theirs)


@pytest.mark.parametrize("scratch_bytes", [1, 40_000])
def test_tcp(scratch_bytes: int, peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", scratch_bytes)
    there, here = Memory(shapes=SHAPES, seed=1), Memory(shapes=SHAPES, seed=2)
    page, grants = NoncePage(), Grants()
    grants.allow(CAPABILITY, range(32))
    server = BlockServer(on_gpu(there), page.value, grants, "127.0.0.1")
    server.start()
    transport = TcpTransport(on_gpu(here))
    try:
        described = describe_memory(there.blocks, page, "there", 0, tcp=f"127.0.0.1:{server.port}")
        transport.probe(described)
        ids, other_ids = [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]
        assert (
            sum(transport.pull(pull_of(described, ids, other_ids, CAPABILITY), 1000)) == 5 * here.blocks.bytes_per_block
        )
        for theirs, ours in zip(ids, other_ids, strict=True):
            assert here.block(ours) == there.block(theirs)
        with pytest.raises(ValueError, match="block ids"):
            list(transport.pull(pull_of(described, [0], [32], CAPABILITY), 1000))
    finally:
        transport.close()
        server.close()


@pytest.mark.parametrize("fails", ["", "gather", "scatter"])
def test_a_scratch_belongs_to_one_stream(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies follow each other, so that none finds it in use. Nothing is under way after a failure."""
    current: list[FakeStream] = []
    failed: list[FakeStream] = []
    seen: dict[int, set[int]] = {}
    real = {step: getattr(kv_memory.kernels, step) for step in ("gather", "scatter")}

    @contextlib.contextmanager
    def stream(it: Any) -> Iterator[None]:
        current.append(it)
        yield
        current.pop()

    def noting(step: str) -> Any:
        def copy(storage: torch.Tensor, layout: Any, ids: Any, scratch: torch.Tensor) -> None:
            seen.setdefault(scratch.data_ptr(), set()).add(id(current[-1]))
            if step == fails:
                failed.append(current[-1])
                raise RuntimeError("not launched")
            real[step](storage, layout, ids, scratch)

        return copy

    monkeypatch.setattr(torch.cuda, "stream", stream)
    for step in real:
        monkeypatch.setattr(kv_memory.kernels, step, noting(step))
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", 1)
    memory = Memory(shapes=SHAPES, seed=1)
    gpu, buffer = on_gpu(memory), torch.zeros(5 * memory.blocks.bytes_per_block, dtype=torch.uint8)
    for copy in (gpu.gather, gpu.scatter):
        with pytest.raises(RuntimeError) if copy.__name__ == fails else contextlib.nullcontext():
            copy([5, 0, 31, 7, 8], buffer)
    assert len(seen) == 2 * kv_memory.NUM_LANES - (bool(fails) and 1)
    assert len(set.union(*seen.values())) == len(seen)
    assert all(len(streams) == 1 for streams in seen.values())
    assert [stream.synchronized for stream in failed] == [1] * bool(fails)


def test_local(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = Memory(shapes=SHAPES, seed=1), Memory("BLHNC", SHAPES, seed=2)
    before = Memory("BLHNC", SHAPES, seed=2)
    mapped: list[CudaShare] = []

    def fake_mapped(shared: CudaShare, device: torch.device) -> torch.Tensor:
        mapped.append(shared)
        return torch.from_numpy(there.bytes)

    monkeypatch.setattr(local_cuda, "mapped", fake_mapped)
    monkeypatch.setattr(local_cuda, "TURN_SECONDS", 0.0)
    done = threading.Event()
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: done.wait(20.0))
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    described = peer(there, cuda=shared(there))
    transport.probe(described)
    ids, other_ids = [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]
    turns = iter(transport.pull(pull_of(described, ids, other_ids), 2 * there.blocks.bytes_per_block))
    assert [next(turns), next(turns)] == [0, 0], "the mover is not held up by the GPU"
    done.set()
    assert sum(turns) == 5 * here.blocks.bytes_per_block
    moved = dict(zip(other_ids, ids, strict=True))
    for block in range(32):
        assert here.block(block) == (there.block(moved[block]) if block in moved else before.block(block))
    pull = transport.pull(pull_of(described, [1, 2], [1, 2]), there.blocks.bytes_per_block)
    next(pull)
    stream = transport._stream
    assert isinstance(stream, FakeStream)
    waited = stream.synchronized
    pull.close()  # type: ignore[attr-defined]
    assert stream.synchronized == waited + 1
    assert len(mapped) == 1
    transport.close()


def test_a_stream_that_reads_uploaded_ids_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the allocator gives their memory, once they are forgotten, to the stream on which they were uploaded."""
    recorded: list[tuple[Any, Any]] = []

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

        def record_stream(self, stream: Any) -> None:
            recorded.append((self.data_ptr(), stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a lane's")
    memory = Memory(shapes=SHAPES, seed=1)
    there = torch.tensor([5, 0, 31]).as_subclass(OnGpu)
    ids = kernels.Uploaded(np.array([5, 0, 31]), there)[1:]
    storage, buffer = torch.from_numpy(memory.bytes), torch.zeros(1 << 20, dtype=torch.uint8)
    copy = plan.planned(storage, memory.blocks, ids, buffer, to_buffer=True)
    assert copy.ids_there is ids.there
    assert recorded == [(ids.there.data_ptr(), "a lane's")]


@pytest.mark.parametrize("large", [False, True], ids=["some blocks at a time", "parts of a block at a time"])
def test_a_round_uploads_its_ids_once(large: bool, peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tables of both layouts, whatever the number of chunks."""
    uploaded: list[int] = []
    stock = plan.on_device

    def on_device(words: Any, device: torch.device) -> torch.Tensor:
        uploaded.append(len(words))
        return stock(words, device)

    monkeypatch.setattr(plan, "on_device", on_device)
    monkeypatch.setattr(kernels, "_settled", {torch.device("cpu"): "torch"})
    there, here = Memory(shapes=SHAPES, seed=1), Memory("BLHNC", SHAPES, seed=2)
    monkeypatch.setattr(local_cuda, "mapped", lambda *_: torch.from_numpy(there.bytes))
    block = there.blocks.bytes_per_block
    monkeypatch.setattr(local_cuda, "BUFFER_BYTES", block // 2 if large else 8 * block)
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    ids, other_ids = [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]
    sizes = list(transport.pull(pull_of(peer(there, cuda=shared(there)), ids, other_ids), block))
    assert len([size for size in sizes if size]) == (15 if large else 5)
    for theirs, ours in zip(ids, other_ids, strict=True):
        assert here.block(ours) == there.block(theirs)
    assert uploaded == [5, 5]
    uploaded.clear()
    buffer = torch.zeros(5 * block, dtype=torch.uint8)
    on_gpu(there).gather(ids, buffer)
    assert uploaded == [5]
    transport.close()


def test_large_blocks_cross_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lane or buffer holds a whole block of dozens of MiB."""
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(kv_memory, "LARGE_BLOCK_BYTES", 9000)
    there, here = Memory(shapes=SHAPES, seed=1), Memory("BLHNC", SHAPES, seed=2)
    source, destination = on_gpu(there), on_gpu(here)
    assert source.chunk_bytes == 9000 < there.blocks.bytes_per_block
    buffer = torch.zeros(2 * there.blocks.bytes_per_block, dtype=torch.uint8)
    source.gather([5, 0], buffer)
    destination.scatter([1, 30], buffer)
    assert [here.block(1), here.block(30)] == [there.block(5), there.block(0)]
    one_page = Memory(shapes=[(1, 20_000)], seed=1)
    assert on_gpu(one_page).chunk_bytes == 20_000, "a page at least"


def out_of(memory: str) -> Any:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate 200.00 MiB for {memory}.\n" + "More. " * 99
        )

    return full


@pytest.mark.parametrize("of", ["lanes", "trial", "local", "fingerprint", "embeddings"])
@pytest.mark.asyncio
async def test_without_gpu_memory_for_copying_a_worker_starts_without_moves(
    of: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says why. No backend is blamed for it."""
    match of:
        case "lanes":
            monkeypatch.setattr(kv_memory, "_Lane", out_of(of))
        case "trial":
            monkeypatch.setattr(torch, "empty_like", out_of(of))
        case "local":
            monkeypatch.setattr(data_plane, "LocalCudaTransport", out_of(of))
        case "fingerprint":
            monkeypatch.setattr(kv_fingerprint, "_sampled", out_of(of))
        case "embeddings":
            monkeypatch.setattr(kv_worker, "common_fingerprint", out_of(of))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    memory = Memory(shapes=SHAPES, seed=2)
    monkeypatch.setattr(data_plane, "share", lambda _: shared(memory))
    worker = FakeWorker(memory, device="cuda")
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("local", "tcp"))), type=MoverInfo)
    why = info.memory.unavailable or ""
    try:
        assert why.startswith(
            "no GPU memory for copying blocks; a lower --gpu-memory-utilization leaves some: CUDA out"
        )
        assert f"200.00 MiB for {of}." in why
        assert len(why) < 260
        assert info.passed_over == ()
        assert (info.memory.tcp, info.memory.cuda) == (None, None)
        assert f"KV blocks of this worker cannot be moved: {why}" in caplog.text
        client = MoverClient(info)
        with source_process(CAPABILITY, seed=1, shapes=SHAPES) as source:
            report = await client.pull(pull_of(source.peer, [3], [8], transport="tcp", capability=CAPABILITY))
            assert report.error == f"no transport 'tcp': {why}"
        client.close()
    finally:
        stop_mover(worker)


def test_local_says_why_not(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = Memory(shapes=SHAPES, seed=1), Memory(shapes=SHAPES, seed=2)
    monkeypatch.setattr(local_cuda, "mapped", lambda *_: torch.from_numpy(there.bytes))
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    with pytest.raises(TransportUnavailable, match="does not export"):
        transport.probe(peer(there))
    with source_process(cuda=True, seed=1, shapes=SHAPES) as source:
        source.kill()
        with pytest.raises((TransferFailed, TransportUnavailable)):
            transport.probe(source.peer)
    with pytest.raises(ValueError, match="named twice"):
        list(transport.pull(pull_of(peer(there, cuda=shared(there)), [0, 1], [3, 3]), 1))
    transport.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gpu": "x" * 65}, "the GPU's name"),
        ({"handle": bytes(63)}, "the handle"),
        ({"handle": bytes(65)}, "the handle"),
        ({"handle": b"\x03e" + bytes(64)}, "the handle"),
        ({"handle": b"c\x03c" + bytes(64)}, "the handle"),
        ({"num_bytes": 0}, "the size"),
        ({"num_bytes": 2**63}, "the size"),
        ({"offset": -1}, "the offset"),
        ({"offset": 2**63 - 1}, "the offset"),
        ({"counter": b"/psm_of_somebody_else"}, "the counter's name"),
        ({"counter": b"/torch_1_2_3"}, "the counter's name"),
        ({"counter": b"/torch_" + b"9" * 300}, "the counter's name"),
        ({"counter_offset": -1}, "the counter's place"),
        ({"counter_offset": 10_000}, "the counter's place"),
        ({"event": bytes(8)}, "the event"),
    ],
)
def test_impossible_copies_do_not_reach_the_device(
    change: dict[str, Any], complaint: str, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch believes all of it, and would read or write beyond what there is."""
    there, here = Memory(shapes=SHAPES, seed=1), Memory(shapes=SHAPES, seed=2)
    mapped: list[CudaShare] = []
    monkeypatch.setattr(local_cuda, "mapped", lambda share, _: mapped.append(share))
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    described = peer(there, cuda=msgspec.structs.replace(shared(there), **change))
    with pytest.raises(TransportUnavailable, match=f"cannot be: {complaint}"):
        transport.probe(described)
    with pytest.raises(TransportUnavailable, match=f"cannot be: {complaint}"):
        list(transport.pull(pull_of(described, [0], [0]), 1))
    assert not mapped
    transport.close()


@pytest.mark.parametrize("prefix", [b"", b"c", b"\x02c", b"\x03c"])
def test_handles_of_several_releases_of_torch(prefix: bytes) -> None:
    memory = Memory(shapes=SHAPES)
    share = msgspec.structs.replace(shared(memory), handle=prefix + bytes(64))
    require_plausible(share, os.getpid(), memory.bytes.nbytes)


def test_memory_is_mapped_as_its_process_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as somebody else says, who names a process that exists."""
    here = Memory(shapes=SHAPES, seed=2)
    mapped: list[CudaShare] = []
    monkeypatch.setattr(local_cuda, "mapped", lambda share, _: mapped.append(share))
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    with source_process(cuda=True, seed=1, shapes=SHAPES) as source:
        assert source.peer.cuda is not None
        for change in ({"offset": 4096}, {"handle": bytes(64)}):
            lie = msgspec.structs.replace(source.peer, cuda=msgspec.structs.replace(source.peer.cuda, **change))
            with pytest.raises(TransferFailed, match="is not what was advertised"):
                transport.probe(lie)
        assert not mapped
        transport.probe(source.peer)
        assert mapped == [source.peer.cuda]
    transport.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["idle", "asked"])
async def test_the_memory_of_who_has_ended_is_unmapped(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its GPU has no room for a successor."""
    monkeypatch.setattr(mover, "TIDY_SECONDS", 0.1 if when == "idle" else 60.0)
    here = Memory(shapes=SHAPES, seed=2)
    tensors: list[weakref.ref[torch.Tensor]] = []

    def fake_mapped(*_: Any) -> torch.Tensor:
        tensor = torch.from_numpy(here.bytes.copy())
        tensors.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(local_cuda, "mapped", fake_mapped)
    transport = LocalCudaTransport(torch.from_numpy(here.bytes), here.blocks)
    running = Mover(0, here.blocks, [transport], PrivateDirectory(str(tmp_path)))
    running.start()
    client = MoverClient(MoverInfo(0, running.endpoint, running.thread, describe(here, NoncePage()), "", "cuda", ""))
    try:
        with source_process(cuda=True, seed=1, shapes=SHAPES) as source:
            assert await client.probe(source.peer, "local") is None
            await asyncio.sleep(0.3)
            (tensor,) = tensors
            assert tensor() is not None
            source.kill()
            if when == "asked":
                assert "has ended" in (await client.probe(source.peer, "local") or "")
            await asyncio.to_thread(until, lambda: tensor() is None)
    finally:
        client.close()
        running.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("exported", [True, False])
async def test_a_worker_on_a_gpu(exported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(_: Any) -> CudaShare:
        if not exported:
            raise TransportUnavailable("sleep mode's allocator")
        return shared(memory)

    shapes = [(4, 4096)]
    memory = Memory(shapes=shapes, seed=2)
    monkeypatch.setattr(data_plane, "share", share)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    worker = FakeWorker(memory, device="cuda")
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("local", "tcp"))), type=MoverInfo)
    try:
        assert (info.isa, info.memory.unavailable) == ("cuda-9.0", None)
        assert info.memory.cuda == (shared(memory) if exported else None)
        assert info.memory.tcp is not None
        client = MoverClient(info)
        with source_process(CAPABILITY, seed=1, shapes=shapes) as source:
            # A source in main memory sends what it is asked for in the order of a GPU.
            report = await client.pull(pull_of(source.peer, [3, 4], [8, 9], transport="tcp", capability=CAPABILITY))
            assert report.error is None
            assert [memory.block(8), memory.block(9)] == [source.memory.block(3), source.memory.block(4)]
        report = await client.pull(pull_of(source.peer, [3], [8], job=2))
        assert (report.error or "").startswith("no transport 'local'") != exported
        client.close()
    finally:
        stop_mover(worker)
    assert np.array_equal(worker.storage.numpy(), memory.bytes)


@pytest.mark.asyncio
async def test_local_alone_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(_: Any) -> CudaShare:
        raise TransportUnavailable("sleep mode's allocator")

    monkeypatch.setattr(data_plane, "share", share)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    worker = FakeWorker(Memory(shapes=[(4, 4096)], seed=2), device="cuda")
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("local",))), type=MoverInfo)
    client = MoverClient(info)
    with source_process(CAPABILITY, seed=1, shapes=[(4, 4096)]) as source:
        found = await client.probe(source.peer, "local")
    assert found == "no transport 'local': sleep mode's allocator"
    client.close()
    stop_mover(worker)


class Sleeper(FakeWorker):
    """With vLLM's sleep mode: the KV memory is not to be touched while `gone`."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, device="cuda")
        self.gone = False

    def sleep(self, level: int = 1) -> None:
        self.gone = True

    def discard(self, tags: tuple[str, ...]) -> None:
        self.gone |= "kv_cache" in tags

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.gone &= tags is not None and "kv_cache" not in tags


@pytest.mark.parametrize("how", ["sleep", "discard"])
@pytest.mark.asyncio
async def test_sleep_mode(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end before the memory goes, none begins until it is back, and what was granted before is not any more."""
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    shapes = [(4, 4096)]
    memory, other = Memory(shapes=shapes, seed=2), Memory(shapes=shapes, seed=3)
    worker = Sleeper(memory)
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("tcp",))), type=MoverInfo)
    client, reader = MoverClient(info), TcpTransport(on_gpu(other))
    everything = list(range(memory.num_blocks))

    def read(blocks: list[int]) -> int:
        return sum(reader.pull(pull_of(info.memory, blocks, blocks, CAPABILITY), 1000))

    def pull(job: int, limit: Limit) -> Coroutine[Any, Any, PullReport]:
        ids = everything
        return client.pull(
            pull_of(source.peer, ids, ids, job=job, transport="tcp", deadline_s=20, capability=CAPABILITY, limit=limit)
        )

    try:
        with source_process(CAPABILITY, seed=1, shapes=shapes) as source:
            await client.grant(CAPABILITY, everything)
            assert await asyncio.to_thread(read, [1])
            before = memory.bytes.copy()
            slow = asyncio.create_task(pull(1, Limit(bytes_per_s=50_000)))
            await asyncio.to_thread(until, lambda: not np.array_equal(memory.bytes, before))
            if how == "sleep":
                worker.sleep(level=1)
            else:
                worker.discard(("weights",))
                assert not worker.gone
                worker.discard(("kv_cache",))
            assert worker.gone
            asleep = memory.bytes.copy()
            assert (await slow).error == ASLEEP
            assert (await pull(2, UNLIMITED)).error == ASLEEP
            with pytest.raises(TransferFailed, match=ASLEEP):
                await asyncio.to_thread(read, [1])
            await client.grant(CAPABILITY, everything)
            worker.wake_up(["weights"])
            assert (await pull(3, UNLIMITED)).error == ASLEEP
            assert np.array_equal(memory.bytes, asleep)
            worker.wake_up(["kv_cache"])
            with pytest.raises(TransferFailed, match="not granted"):
                await asyncio.to_thread(read, [1])
            assert (await pull(4, UNLIMITED)).error is None
            await client.grant(CAPABILITY, everything)
            assert await asyncio.to_thread(read, everything)
            assert np.array_equal(other.bytes, memory.bytes)
    finally:
        reader.close()
        client.close()
        stop_mover(worker)


@pytest.mark.asyncio
async def test_whoever_touches_the_gpu_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else pinned memory takes a context on the first GPU, from every worker of the others."""
    chosen: list[tuple[str, object]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    shapes = [(4, 4096)]
    worker = FakeWorker(Memory(shapes=shapes, seed=2), device="cuda:3")
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("tcp",))), type=MoverInfo)
    client, reader = MoverClient(info), TcpTransport(on_gpu(Memory(shapes=shapes, seed=3)))
    try:
        await client.grant(CAPABILITY, [1])
        assert await asyncio.to_thread(lambda: sum(reader.pull(pull_of(info.memory, [1], [1], CAPABILITY), 1000)))
        assert {device for _, device in chosen} == {torch.device("cuda:3")}
        mover_thread, server_thread = (name for name, _ in chosen)
        assert mover_thread == "llumnix-mover"
        assert server_thread.startswith("llumnix-blocks-")
    finally:
        reader.close()
        client.close()
        stop_mover(worker)


class Capturer(Sleeper):
    """Captures for as long as the test wants."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.captures, self.done = threading.Event(), threading.Event()

    def compile_or_warm_up_model(self) -> float:
        self.captures.set()
        assert self.done.wait(10.0)
        return 1.5


@pytest.mark.asyncio
async def test_a_capture_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end before it begins, and until it ends nothing is allocated, mapped or let go of."""
    monkeypatch.setattr(kv_memory, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(mover, "TIDY_SECONDS", 0.02)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    touched: list[str] = []
    transfer, tidy = CudaMemory.transfer, TcpTransport.tidy

    def spy(name: str, stock: Any) -> Any:
        def spied(*args: Any) -> Any:
            if threading.current_thread().name.startswith("llumnix"):
                touched.append(name)
            return stock(*args)

        return spied

    monkeypatch.setattr(CudaMemory, "transfer", spy("transfer", transfer))
    monkeypatch.setattr(TcpTransport, "tidy", spy("tidy", tidy))
    shapes = [(4, 4096)]
    memory, other = Memory(shapes=shapes, seed=2), Memory(shapes=shapes, seed=3)
    worker = Capturer(memory)
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=("tcp",))), type=MoverInfo)
    client, reader = MoverClient(info), TcpTransport(on_gpu(other))
    everything = list(range(memory.num_blocks))

    def read() -> int:
        return sum(reader.pull(pull_of(info.memory, everything, everything, CAPABILITY), 1000))

    def pull(job: int, limit: Limit = UNLIMITED) -> Coroutine[Any, Any, PullReport]:
        return client.pull(
            pull_of(
                source.peer,
                everything,
                everything,
                job=job,
                transport="tcp",
                deadline_s=20,
                capability=CAPABILITY,
                limit=limit,
            )
        )

    try:
        with source_process(CAPABILITY, seed=1, shapes=shapes) as source:
            before = memory.bytes.copy()
            slow = asyncio.create_task(pull(1, Limit(bytes_per_s=50_000)))
            await asyncio.to_thread(until, lambda: not np.array_equal(memory.bytes, before))
            capturing = asyncio.create_task(asyncio.to_thread(worker.compile_or_warm_up_model))
            assert await asyncio.to_thread(worker.captures.wait, 5.0)
            touched.clear()
            assert (await slow).error == CAPTURES
            assert (await pull(2)).error == CAPTURES
            assert await client.probe(source.peer, "tcp") == CAPTURES
            await client.grant(CAPABILITY, everything)
            with pytest.raises(TransferFailed, match=CAPTURES):
                await asyncio.to_thread(read)
            await asyncio.sleep(0.1)
            assert not touched
            worker.done.set()
            assert await capturing == 1.5
            assert (await pull(3)).error is None
            assert await client.probe(source.peer, "tcp") is None
            await client.grant(CAPABILITY, everything)
            assert await asyncio.to_thread(read)
            await asyncio.to_thread(until, lambda: "tidy" in touched)
            worker.sleep()
            await asyncio.to_thread(worker.compile_or_warm_up_model)
            assert (await pull(4)).error == ASLEEP, "what sleeps is not woken up by a capture"
            worker.wake_up()
            assert (await pull(5)).error is None
    finally:
        worker.done.set()
        reader.close()
        client.close()
        stop_mover(worker)
