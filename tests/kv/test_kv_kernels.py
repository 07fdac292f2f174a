# SPDX-License-Identifier: Apache-2.0
"""Every form of the block copy against the formula of `BlockLayout.page_address`, byte by byte.

The memory around the pages is filled with noise, which must be there unchanged afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_llumnix.errors import ConfigError
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import gather, native, obstacle, plan, scatter
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut, Strip, TensorRegion

ROOT = Path(__file__).parents[2]
COMPILER = next(filter(None, map(shutil.which, ["c++", "g++", "clang++"])), None)
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

Bytes = npt.NDArray[np.uint8]
Shapes = list[tuple[int, int]]
"""(layers, bytes of a page) of each region."""


class Case(NamedTuple):
    """A copy and the memory it works on. The buffer starts `lead` bytes into an allocation."""

    to_buffer: bool
    layout: BlockLayout
    ids: list[int]
    storage: Bytes
    allocation: Bytes
    lead: int


Form = Callable[[Case], tuple[Bytes, Bytes]]
"""Carries a case out; returns what then is in the storage and in the buffer's allocation."""


def carry_out(case: Case, backend: str, device: str = "cpu", **options: Any) -> tuple[Bytes, Bytes]:
    storage, allocation = (torch.tensor(data, device=device) for data in (case.storage, case.allocation))
    copy = gather if case.to_buffer else scatter
    num_bytes = copy(storage, case.layout, case.ids, allocation[case.lead :], backend=backend, **options)
    assert num_bytes == len(case.ids) * case.layout.bytes_per_block
    return storage.cpu().numpy(), allocation.cpu().numpy()


def streaming(case: Case) -> tuple[Bytes, Bytes]:
    """`cpp`, with pages of every size written past the caches."""
    with mock.patch.multiple(native, SCATTER_STREAMING_FROM=0, GATHER_STREAMING_FROM=0):
        return carry_out(case, "cpp", num_threads=2)


def interpreted(case: Case) -> tuple[Bytes, Bytes]:
    """`triton` without a GPU, in a process of its own: the variable that this takes concerns all of a process."""
    return _interpreter().submit(carry_out, case, "triton", max_sms=3).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=_interpret)


def cuda_on_host(case: Case) -> tuple[Bytes, Bytes]:
    """The body of the CUDA kernel, lane after lane."""
    storage, allocation = torch.tensor(case.storage), torch.tensor(case.allocation)
    copy = plan.planned(storage, case.layout, case.ids, allocation[case.lead :], to_buffer=case.to_buffer)
    arguments = native.arguments(copy, copy.table.ctypes.data, copy.ids.ctypes.data)
    assert _on_host().walk(ctypes.byref(arguments), ctypes.c_int64(3), ctypes.c_int64(32)) == 0
    return storage.numpy(), allocation.numpy()


@functools.cache
def _on_host() -> ctypes.CDLL:
    return ctypes.CDLL(str(native.DIRECTORY / "cuda_on_host.so"))


FORMS: dict[str, Form] = {
    "torch": functools.partial(carry_out, backend="torch"),
    "triton, interpreted": interpreted,
}
if COMPILER:
    FORMS |= {
        "cpp": functools.partial(carry_out, backend="cpp", num_threads=3),
        "cpp, streaming": streaming,
        "cuda, on the host": cuda_on_host,
    }
if torch.cuda.is_available():
    on_gpu = functools.partial(carry_out, device="cuda", max_sms=3)
    FORMS |= {f"{name} on a GPU": functools.partial(on_gpu, backend=name) for name in ("torch", "triton")}
    if NVCC:
        FORMS["cuda on a GPU"] = functools.partial(on_gpu, backend="cuda")


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What setup.py makes of these sources now, in place of what was built when the package was installed."""
    lib = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", lib, "--build-temp", lib / "temp"]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"VLLM_TARGET_DEVICE": "cuda"})
    directory = lib / "vllm_llumnix" / "kv" / "kernels"
    if COMPILER:
        source = Path(__file__).with_name("cuda_on_host.cpp")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        subprocess.run([COMPILER, *flags, "-o", directory / "cuda_on_host.so", source], check=True)
    with mock.patch.object(native, "DIRECTORY", directory), nothing_remembered():
        yield directory
    if _interpreter.cache_info().currsize:
        _interpreter().shutdown()


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Which backends there are is found out anew, within and after."""
    caches = (native.cpu, native.cuda, kernels._chosen)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def layout_of(order: str, shapes: Shapes, num_blocks: int, gap: int = 0) -> BlockLayout:
    """Pages in vLLM's order, with `gap` bytes before each of them and at the end."""
    regions, offset = [], gap
    per_block = sum(layers * (page + gap) for layers, page in shapes)
    for layers, page in shapes:
        step = page + gap
        if order.startswith("L"):
            regions.append(TensorRegion(offset, layers, step * num_blocks, step, page))
            offset += layers * step * num_blocks
        else:
            regions.append(TensorRegion(offset, layers, step, per_block, page))
            offset += layers * step
    return BlockLayout(1 << 20, per_block * num_blocks + gap, num_blocks, tuple(regions), order)


def case_of(layout: BlockLayout, ids: list[int], *, to_buffer: bool, lead: int = 0, tail: int = 24) -> Case:
    noise = np.random.default_rng(len(ids) + lead)
    allocation = noise.integers(0, 256, lead + len(ids) * layout.bytes_per_block + tail, np.uint8)
    return Case(to_buffer, layout, ids, noise.integers(0, 256, layout.storage_bytes, np.uint8), allocation, lead)


def expected(case: Case) -> tuple[Bytes, Bytes]:
    storage, allocation, at = case.storage.copy(), case.allocation.copy(), case.lead
    for block in case.ids:
        for layer in range(case.layout.num_layers):
            address, length = case.layout.page_address(block, layer)
            page = slice(address - case.layout.base, address - case.layout.base + length)
            if case.to_buffer:
                allocation[at : at + length] = storage[page]
            else:
                storage[page] = allocation[at : at + length]
            at += length
    return storage, allocation


def check(form: Form, case: Case) -> None:
    for found, wanted in zip(form(case), expected(case), strict=True):
        np.testing.assert_array_equal(found, wanted)


SHAPES = {
    "bf16, 16 tokens of 2 heads of 64": [(3, 16 * 2 * 2 * 64 * 2)],
    "fp8 with a scale for each token and head": [(3, 16 * 2 * 2 * (64 + 4))],
    "fp8 MLA, 656 bytes a token": [(2, 16 * 656)],
    "4-byte words": [(2, 1028)],
    "odd": [(3, 1025)],
    "tiny": [(5, 1)],
    "below a vector": [(2, 15)],
    "mixed": [(3, 2048), (1, 1040), (2, 33)],
}
PATTERNS = {
    "none": [],
    "single": [4],
    "all": list(range(9)),
    "contiguous": [2, 3, 4, 5],
    "random": [7, 0, 8, 3, 5],
    "backwards": [8, 7, 6],
}


# What is left to `make test-rest` and `make test-full` differs within a page only, or in the gap between regions.
@pytest.mark.parametrize("to_buffer", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize(
    "gap",
    [pytest.param(0, marks=pytest.mark.rest), 7, pytest.param(16, marks=pytest.mark.full)],
    ids=lambda gap: f"gap {gap}",
)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "order",
    ["LBHNC", "BLNHC", *(pytest.param(order, marks=pytest.mark.full) for order in ("LBNHC", "BLHNC"))],
)
def test_exactly_the_named_blocks_are_copied(form: Form, order: str, shapes: Shapes, gap: int, to_buffer: bool) -> None:
    layout = layout_of(order, shapes, 9, gap)
    for ids in PATTERNS.values():
        check(form, case_of(layout, ids, to_buffer=to_buffer))


@pytest.mark.parametrize("lead", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("to_buffer", [True, False], ids=["gather", "scatter"])
def test_the_buffer_may_start_anywhere(form: Form, lead: int, to_buffer: bool) -> None:
    for page in (2048, 2052, 2049):
        layout = layout_of("LBHNC", [(2, page)], 5)
        check(form, case_of(layout, [3, 1], to_buffer=to_buffer, lead=lead))
    # At an odd address on both sides; at 5 both are equally far from a vector's, at 1 from a word's.
    check(form, case_of(layout_of("LBHNC", [(1, 2049)], 3, gap=5), [0], to_buffer=to_buffer, lead=lead))


def test_a_block_may_be_gathered_twice(form: Form) -> None:
    check(form, case_of(layout_of("LBHNC", [(2, 100)], 4), [1, 1, 3, 1], to_buffer=True))


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("of", ["heads", "tokens", "vectors"])
def test_parts_of_pages(form: Form, order: str, of: Any) -> None:
    """As moves between engines of other sizes copy them. A cut of vectors names them head by head, however they lie."""
    heads, tokens, vector = 2, 4, 48
    whole = layout_of(order, [(3, heads * tokens * vector)], 5)
    inside = (Strip(1, vector * (heads if order.endswith("NHC") else 1)),)
    whole = msgspec.structs.replace(whole, heads=heads, tokens=tokens, strips=inside)
    cut = Cut(0, 1, of) if of == "vectors" else Cut(1, 2, of)
    for to_buffer in (True, False):
        check(form, case_of(whole.cut(cut), [4, 0, 2], to_buffer=to_buffer))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_page_is_found_among_thousands_of_regions() -> None:
    """Pages that are copied vector by vector have up to 16,384; a search through all of them takes 60 times as long a
    page as among 128, and here less than 20 times."""
    seconds = []
    for heads, tokens in ((8, 16), (128, 128)):
        whole = layout_of("LBNHC", [(1, heads * tokens * 16)], 1)
        whole = msgspec.structs.replace(whole, heads=heads, tokens=tokens, strips=(Strip(1, 16 * heads),))
        layout = whole.cut(Cut(0, 1, "vectors"))
        assert len(layout.regions) == heads * tokens
        storage, buffer = row(whole.storage_bytes), row(whole.storage_bytes)
        copy = plan.planned(storage, layout, [0], buffer, to_buffer=True)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            for _ in range(16384 // len(layout.regions)):
                native.copy_blocks_cpu(copy, 1)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
    assert seconds[1] < 20 * seconds[0]


def test_large_pages(form: Form) -> None:
    for to_buffer in (True, False):
        layout = layout_of("LBHNC", [(2, 128 * 1024), (1, 70_001)], 4)
        check(form, case_of(layout, [3, 0, 1], to_buffer=to_buffer, lead=2))


def test_part_of_the_blocks_is_a_range_of_the_buffer(form: Form) -> None:
    layout = layout_of("BLHNC", [(2, 64), (1, 33)], 8)
    whole = case_of(layout, [6, 1, 5, 2], to_buffer=True, tail=0)
    _, buffer = form(whole)
    for first in range(4):
        _, part = form(whole._replace(ids=whole.ids[first : first + 2]))
        cut = slice(first * layout.bytes_per_block, (first + 2) * layout.bytes_per_block)
        stop = len(buffer[cut])
        np.testing.assert_array_equal(part[:stop], buffer[cut])


@settings(deadline=None, max_examples=40)
@given(
    orders=st.tuples(st.sampled_from(["LBHNC", "BLHNC"]), st.sampled_from(["LBHNC", "BLHNC"])),
    gaps=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 300)), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_form_scatters_what_any_form_gathered(orders: Any, gaps: Any, shapes: Shapes, data: Any) -> None:
    """Into a layout with the same pages, with other ids, other gaps and another outermost dimension."""
    source, destination = (layout_of(order, shapes, 6, gap) for order, gap in zip(orders, gaps, strict=True))
    from_ids = data.draw(st.lists(st.integers(0, 5), max_size=6))
    to_ids = data.draw(st.permutations(range(6)))[: len(from_ids)]
    gathering, scattering = (data.draw(st.sampled_from(sorted(FORMS))) for _ in range(2))
    sent = case_of(source, from_ids, to_buffer=True)
    _, buffer = FORMS[gathering](sent)
    received = case_of(destination, to_ids, to_buffer=False)._replace(allocation=buffer)
    storage, _ = FORMS[scattering](received)

    wanted = received.storage.copy()
    for from_id, to_id in zip(from_ids, to_ids, strict=True):
        for layer in range(source.num_layers):
            (source_at, length), (at, _) = source.page_address(from_id, layer), destination.page_address(to_id, layer)
            page = sent.storage[source_at - source.base :][:length]
            wanted[at - destination.base :][:length] = page
    np.testing.assert_array_equal(storage, wanted)


LAYOUT = layout_of("LBHNC", [(2, 64)], 4)
"""512 bytes, 128 a block."""


def test_words_reach_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: only the allocation and the last step are replaced. torch refuses to pin an array of numpy's."""
    stock, pinned = torch.empty, list[torch.Tensor]()

    def empty(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        tensor = stock(*size, **options)
        pinned.extend([tensor] * pin_memory)
        return tensor

    def to(words: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert (device.type, non_blocking) == ("cuda", True)
        assert words is pinned[-1], "the host waits for what the stream has to do"
        return words

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    for words in (plan.region_table(LAYOUT), np.arange(3)):
        found = plan.on_device(words, torch.device("cuda"))
        np.testing.assert_array_equal(found.numpy(), words)
        assert not np.shares_memory(found.numpy(), words)


def row(num_bytes: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, **kwargs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "id too high": ({"block_ids": [0, 4]}, "block ids 0 to 4 are not all within 0 to 3"),
    "id negative": ({"block_ids": [-1, 2]}, "block ids -1 to 2"),
    "id beyond 64 bits": ({"block_ids": [2**63]}, "block ids 9223372036854775808"),
    "ids of floats": ({"block_ids": [1.0]}, "a list of integers, not float64"),
    "ids of two dimensions": ({"block_ids": [[1, 2]]}, "of shape"),
    "storage of halves": ({"storage": torch.zeros(512, dtype=torch.float16)}, "storage is not a row of bytes"),
    "storage of two dimensions": ({"storage": row(512).view(4, 128)}, "storage is not a row of bytes"),
    "storage with gaps": ({"storage": row(1024)[::2]}, "storage is not a row of bytes"),
    "storage too small": ({"storage": row(511)}, "a storage of 511 bytes; the layout is that of 512"),
    "storage of something else": ({"storage": row(513)}, "a storage of 513 bytes"),
    "buffer of signed bytes": ({"buffer": torch.zeros(256, dtype=torch.int8)}, "buffer is not a row of bytes"),
    "buffer of two dimensions": ({"buffer": row(256).view(2, 128)}, "buffer is not a row of bytes"),
    "buffer with gaps": ({"buffer": row(512)[::2]}, "buffer is not a row of bytes"),
    "buffer too small": ({"buffer": row(255)}, "a buffer of 255 bytes for 256"),
    "buffer elsewhere": ({"buffer": row(256, device="meta")}, "the storage is on cpu, the buffer on meta"),
    "no memory": ({"storage": row(512, device="meta"), "buffer": row(256, device="meta")}, "storage has no memory"),
    "sparse buffer": ({"buffer": row(256).to_sparse()}, "the buffer has no memory"),
}


@pytest.mark.parametrize("copy", [gather, scatter])
@pytest.mark.parametrize("why", REFUSED)
def test_misfit_is_refused_before_any_copy(copy: Callable[..., int], why: str) -> None:
    change, complaint = REFUSED[why]
    sound = {"storage": torch.ones(512, dtype=torch.uint8), "layout": LAYOUT, "block_ids": [2, 0], "buffer": row(256)}
    with pytest.raises(ValueError, match=complaint):
        copy(**(sound | change))
    assert sound["storage"].eq(1).all()
    assert sound["buffer"].eq(0).all()
    assert copy(**sound) == 256


def test_the_buffer_is_not_part_of_the_storage() -> None:
    memory = row(512 + 128)
    for start in (384, 511):
        with pytest.raises(ValueError, match="part of the storage"):
            gather(memory[:512], LAYOUT, [0], memory[start:])
    assert gather(memory[:512], LAYOUT, [0], memory[512:]) == 128


def test_a_block_is_written_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        scatter(row(512), LAYOUT, [1, 2, 1], row(384))


@pytest.mark.parametrize(
    "regions",
    [
        (TensorRegion(0, 2, 255, 64, 64),),
        (TensorRegion(0, 2, 256, 63, 64),),
        (TensorRegion(0, 2, 0, 64, 64),),
        (TensorRegion(0, 2, 100, 100, 64),),
        (TensorRegion(0, 2, 64, 128, 64), TensorRegion(63, 1, 64, 128, 1)),
        (TensorRegion(0, 1, 0, 64, 64), TensorRegion(255, 1, 0, 64, 64)),
        (TensorRegion(0, 1, 0, 100, 64), TensorRegion(64, 1, 0, 100, 64)),
    ],
)
def test_pages_that_overlap_are_read_but_not_written(regions: tuple[TensorRegion, ...]) -> None:
    layout = BlockLayout(0, 512, 4, regions, "LBHNC")
    buffer = row(2 * layout.bytes_per_block)
    assert gather(row(512), layout, [0, 3], buffer) > 0
    with pytest.raises(ValueError, match="overlap"):
        scatter(row(512), layout, [0, 3], buffer)


def test_pages_beyond_the_storage_are_no_layout() -> None:
    with pytest.raises(ValueError, match="beyond the storage"):
        BlockLayout(0, 511, 4, LAYOUT.regions, "LBHNC")


def test_no_threads_and_no_sms_are_refused() -> None:
    for options in ({"num_threads": 0}, {"max_sms": 0}):
        with pytest.raises(ValueError, match="at least one"):
            gather(row(512), LAYOUT, [0], row(128), **options)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none of the block copy backends"):
        gather(row(512), LAYOUT, [0], row(128), backend="fortran")


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [("cuda", "cuda on cpu: it copies on CUDA devices only"), ("triton", "triton on cpu: it copies on GPUs only")],
)
def test_a_backend_for_other_devices_is_an_error(backend: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        gather(row(512), LAYOUT, [0], row(128), backend=backend)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_cpu_takes_the_compiled_form(caplog: pytest.LogCaptureFixture) -> None:
    assert kernels._chosen("cpu") == "cpp"
    assert not caplog.records


@pytest.mark.parametrize("what", ["nothing", "rubbish", "another version"])
def test_without_a_compiled_form_torch_copies_after_one_line_in_the_log(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "rubbish":
        (tmp_path / "_cpu.so").write_bytes(b"rubbish")
    elif what == "another version":  # any library without our entry
        (tmp_path / "_cpu.so").symlink_to(_libc())
    with mock.patch.object(native, "DIRECTORY", tmp_path), nothing_remembered():
        for _ in range(2):
            assert gather(row(512), LAYOUT, [0], row(128)) == 128
        with pytest.raises(ConfigError, match="block copy backend cpp on cpu: _cpu"):
            gather(row(512), LAYOUT, [0], row(128), backend="cpp")
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("KV blocks on cpu are copied by torch (cpp: _cpu.so ")


def _libc() -> str:
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "libc.so" in line or "libc-" in line)


@pytest.mark.parametrize(
    ("there", "chosen"), [({"cuda", "triton"}, "cuda"), ({"triton"}, "triton"), (set(), "torch"), ({"cuda"}, "cuda")]
)
def test_gpu_gets_valid_arguments(there: set[str], chosen: str) -> None:
    def missing(backend: str, device: str) -> str | None:
        return None if backend in there | {"torch"} else "not here"

    with mock.patch.object(kernels, "obstacle", missing), nothing_remembered():
        assert kernels._chosen("cuda") == chosen


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_other_threads_run_during_a_copy() -> None:
    layout = layout_of("LBHNC", [(1, 1 << 20)], 128)
    storage, buffer = row(layout.storage_bytes), row(layout.storage_bytes)
    copy = plan.planned(storage, layout, range(128), buffer, to_buffer=True)
    turns: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.0005):
            turns.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        most = 0
        for _ in range(20):
            started = time.monotonic()
            native.copy_blocks_cpu(copy, 1)
            stopped = time.monotonic()
            # One or two could fall between taking the time and the call.
            most = max(most, sum(started < turn < stopped for turn in turns))
    finally:
        done.set()
        ticking.join()
    assert most >= 5


def test_ids_that_cannot_be_written_are_as_good_as_others() -> None:
    ids = np.array([2, 0])
    ids.flags.writeable = False
    buffer = row(256)
    for backend in ("torch", "auto"):
        assert gather(torch.arange(512).to(torch.uint8), LAYOUT, ids, buffer, backend=backend) == 256
        assert buffer[:64].tolist() == list(range(128, 192))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_cuda_copies_in_vectors_of_sixteen_bytes(built: Path, tmp_path: Path) -> None:
    assert obstacle("cuda", "cuda") is None, "setup.py has built it, and its entry is there"
    source = ROOT / "csrc" / "cuda" / "block_copy.cu"
    for arch in ("sm_80", "sm_90"):
        ptx = tmp_path / f"{arch}.ptx"
        subprocess.run([NVCC, "-std=c++17", "-O3", "-ptx", f"-arch={arch}", "-o", ptx, source], check=True)
        text = ptx.read_text()
        assert "ld.global.cs.v4.u32" in text
        assert "st.global.cs.v4.u32" in text


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from vllm_llumnix.kv.kernels.triton_copy import CHUNK_BYTES, NUM_WARPS, _copy_pages

types = {"storage": "*i64", "buffer": "*i64", "table": "*i64", "ids": "*i64"}
types |= {"num_pages": "i32", "num_layers": "i32", "block_words": "i64", "num_regions": "i32"}
constants = {"TO_BUFFER": True, "VECTOR": 2, "CHUNK": CHUNK_BYTES // 8}
aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(4)}
source = ASTSource(_copy_pages, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
for capability in (80, 90):
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": NUM_WARPS})
    assert made.asm["cubin"]
    assert "ld.global.v2.b64" in made.asm["ptx"] and "st.global.v2.b64" in made.asm["ptx"]
"""


def test_triton_compiles_to_vectors_of_sixteen_bytes(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], cwd=ROOT, check=True, env=environment)
