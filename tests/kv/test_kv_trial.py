# SPDX-License-Identifier: Apache-2.0
"""A backend that does not copy is found out when a worker starts, and nothing of it reaches a move.

The GPU is main memory, and its backends are fakes with the faults of real ones: no GPU is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.kv.fakes import FakeWorker, Memory, packed, pull_of, source_process
from vllm_llumnix import doctor
from vllm_llumnix.engine.attach import what_copies
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import native, reference, trial
from vllm_llumnix.kv.kernels.plan import PlannedCopy, alignment_of
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.worker import start_mover, stop_mover

CAPABILITY = bytes(CAPABILITY_BYTES)
CPU = torch.device("cpu")
SHAPES = [(3, 4096), (1, 512)]
Fault = Callable[[PlannedCopy], None]


def launch_fails(copy: PlannedCopy) -> None:
    """A library that is newer than the driver: cudaErrorInsufficientDriver."""
    raise RuntimeError("the block copy was not launched: CUDA error 35\nsecond line")


def wrong_byte(copy: PlannedCopy) -> None:
    reference.copy_blocks(copy)
    row = copy.buffer if copy.to_buffer else copy.storage
    row[-1 if copy.to_buffer else 0] ^= 1


def wrong_alone(copy: PlannedCopy) -> None:
    """Right for several blocks, not for one."""
    if len(copy.ids) > 1:
        reference.copy_blocks(copy)


def never_compiles(copy: PlannedCopy) -> None:
    raise FileNotFoundError("Failed to find C compiler")


FAULTS: list[tuple[Fault, str]] = [
    (launch_fails, "gather of 2 blocks: RuntimeError: the block copy was not launched: CUDA error 35"),
    (wrong_byte, "gather of 2 blocks: wrong bytes"),
    (wrong_alone, "gather of 1 block: wrong bytes"),
    (never_compiles, "gather of 2 blocks: FileNotFoundError: Failed to find C compiler"),
]


@pytest.fixture(params=FAULTS, ids=lambda fault: fault[0].__name__)
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[PlannedCopy]]:
    """`cpp` with a fault: what is said of it, and the copies that were asked of it."""
    fault, complaint = request.param
    asked: list[PlannedCopy] = []

    def copy_blocks(copy: PlannedCopy, _: int) -> None:
        asked.append(copy)
        fault(copy)

    monkeypatch.setattr(native, "copy_blocks_cpu", copy_blocks)
    monkeypatch.setattr(kernels, "obstacle", lambda *_: None)
    return complaint, asked


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_correct_backend_is_chosen(order: str) -> None:
    """A machine that tests this has built it: where it is missing, that is the failure."""
    assert kernels.settle(Memory(order, SHAPES).blocks, CPU) == ("cpp", ())


@pytest.mark.parametrize("where", ["before", "in a copy"])
def test_a_device_without_memory_for_the_trial_blames_no_backend(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the slowest one would copy for as long as the engine lives, for a moment's lack."""

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB")

    if where == "before":
        monkeypatch.setattr(torch, "empty_like", full)
    else:
        monkeypatch.setattr(native, "copy_blocks_cpu", full)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.settle(Memory(shapes=SHAPES).blocks, CPU)
    assert not kernels._settled


def test_the_next_one_is_taken(broken: tuple[str, list[PlannedCopy]], caplog: pytest.LogCaptureFixture) -> None:
    complaint, asked = broken
    memory, buffer = Memory(shapes=SHAPES), torch.zeros(1 << 16, dtype=torch.uint8)
    choice = kernels.settle(memory.blocks, CPU)
    assert choice == ("torch", (f"cpp: {complaint}",))
    tried = len(asked)
    assert tried
    storage = torch.from_numpy(memory.bytes)
    size = kernels.gather(storage, memory.blocks, [5], buffer)
    assert bytes(buffer[:size].numpy()) == b"".join(memory.block(5))
    assert len(asked) == tried
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"KV blocks on cpu are copied by torch (cpp: {complaint})"


@pytest.mark.asyncio
@pytest.mark.usefixtures("gpu_in_main_memory")
async def test_no_move_meets_a_backend_that_failed(
    broken: tuple[str, list[PlannedCopy]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a GPU (its memory and its backend are the CPU's) says what copies, and its first pull uses that."""
    complaint, asked = broken
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    memory = Memory(shapes=SHAPES, seed=2)
    worker = FakeWorker(memory, device="cuda")
    settings = packed(transports=("tcp",), directory=str(tmp_path))
    info = msgspec.msgpack.decode(await asyncio.to_thread(start_mover, worker, settings), type=MoverInfo)
    client = MoverClient(info)
    try:
        assert (info.copied_by, info.passed_over) == ("torch", (f"cpp: {complaint}",))
        assert what_copies([info, info]) == f"torch (not by cpp: {complaint})"
        tried = len(asked)
        with source_process(CAPABILITY, seed=1, shapes=SHAPES) as source:
            report = await client.pull(pull_of(source.peer, [3], [8], transport="tcp", capability=CAPABILITY))
            assert report.error is None
            assert memory.block(8) == source.memory.block(3)
        assert len(asked) == tried
    finally:
        client.close()
        stop_mover(worker)


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_the_trial_has_the_pages_and_the_alignment_of_the_worker(order: str) -> None:
    layout = Memory(order, [(3, 4104), (1, 520), (2, 16)], num_blocks=33).blocks
    small = trial.few_blocks(layout)
    assert small.storage_bytes <= 3 * layout.bytes_per_block
    for ours, theirs in zip(small.regions, layout.regions, strict=True):
        assert (ours.num_layers, ours.page_bytes) == (min(2, theirs.num_layers), theirs.page_bytes)
        for field in ("offset", "layer_stride", "block_stride"):
            assert getattr(ours, field) % 16 == getattr(theirs, field) % 16


def test_the_trial_of_a_large_block_is_small() -> None:
    """A hybrid's block has dozens of MiB, of which the model has left next to none."""
    for order in ("LBNHC", "BLNHC"):
        layout = Memory(order, [(24, 65536)], num_blocks=3).blocks
        assert trial.few_blocks(layout).storage_bytes <= 4 * 65536 < layout.bytes_per_block


def inside(order: str, vector: int) -> BlockLayout:
    """Pages of 4 heads and 8 tokens, on a GPU."""
    heads, tokens = 4, 8
    strips = ((1, vector * heads if order.endswith("NHC") else vector),)
    memory = Memory(order, [(3, heads * tokens * vector)], num_blocks=5, heads=heads, tokens=tokens, strips=strips)
    return memory.blocks


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("vector", [512, 68, 6])
def test_the_trial_has_all_that_a_move_may_ask_for(order: str, vector: int) -> None:
    """Triton compiles for each alignment, and a GPU faults at a wrong one: parts of pages have others than pages."""
    layout = inside(order, vector)
    tried = {(alignment_of(form), len(form.regions) > 1) for form in trial.forms(trial.few_blocks(layout))}
    heads, tokens = ([count for count in range(1, number + 1) if number % count == 0] for number in (4, 8))
    for of, counts in {"heads": heads, "vectors": heads, "tokens": tokens}.items():
        for count in counts:
            for index in range(count):
                cut = layout.cut(Cut(index, count, of))  # type: ignore[arg-type]
                assert (alignment_of(cut), len(cut.regions) > 1) in tried, (of, count, index)
    assert (alignment_of(layout), False) in tried


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("last", [8200, 4, 65536])
def test_the_trial_has_the_alignments_of_parts_of_large_blocks(order: str, last: int) -> None:
    """Pages of two sizes: a part with those of one size alone may be aligned better than a whole block."""
    layout = Memory(order, [(24, 65536), (6, last)], num_blocks=5).blocks
    tried = {alignment_of(form) for form in trial.forms(trial.few_blocks(layout))}
    for max_bytes in (1, 65536, 1 << 18, 1 << 20, 1 << 30):
        assert {alignment_of(part) for part in layout.split(max_bytes)} <= tried, max_bytes


def test_parts_of_pages_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_pages_only(copy: PlannedCopy, _: int) -> None:
        if len(copy.layout.regions) > 1:
            raise RuntimeError("no kernel image for this one")
        reference.copy_blocks(copy)

    monkeypatch.setattr(native, "copy_blocks_cpu", whole_pages_only)
    choice = kernels.settle(inside("LBNHC", 512), CPU)
    why = "cpp: gather of 2 blocks in 8 regions: RuntimeError: no kernel image for this one"
    assert choice == ("torch", (why,))


def test_triton_compiles_one_form_for_all_sizes() -> None:
    """Without this, a count of 1 or one that 16 divides is another kernel, compiled in the middle of a move. So is a
    number of regions that is a constant."""
    from vllm_llumnix.kv.kernels import triton_copy

    sizes = {param.name: param.do_not_specialize for param in triton_copy._copy_pages.params}
    assert all(sizes[name] for name in ("num_pages", "num_layers", "block_words", "num_regions"))
    anywhere = {param.name for param in triton_copy._copy_pages.params if param.do_not_specialize_on_alignment}
    assert "ids" in anywhere, "a slice of uploaded ids begins at a multiple of 8 bytes, not of 16"
    constants = {param.name for param in triton_copy._copy_pages.params if param.is_constexpr}
    assert constants == {"TO_BUFFER", "VECTOR", "CHUNK"}, "which the trial goes through"


@pytest.mark.parametrize(
    ("there", "visible", "said"),
    [
        ([], None, "no GPU"),
        (["a", "b"], None, "all 2 GPUs of this host are seen"),
        (["a", "b"], "1,0", "all 2 GPUs of this host are seen"),
        (["a", "b"], "1", "only among 1 of 2 GPUs"),
    ],
)
def test_doctor_says_between_which_gpus_blocks_are_mapped(
    there: list[str], visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert doctor.local_between_gpus().result.startswith(said)


def test_doctor_tries_the_backends() -> None:
    check = doctor.block_copy()
    assert check.result.startswith("by ")
    assert not check.problem
