# SPDX-License-Identifier: Apache-2.0
"""An engine that waits for a compiler is busy, and one whose compiler never ends hangs in the end."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from llumlet.protocol.wire import Health
from vllm_llumnix.engine.attach import _watch_scaling
from vllm_llumnix.engine.load.progress import COMPILING, PATIENCE_SECONDS, RESCUE_SECONDS, Progress
from vllm_llumnix.steps import compiles, step_record
from vllm_llumnix.steps.compiles import Compiles, compiling, write_down_compiles
from vllm_llumnix.steps.step_record import StepRecord

INCARNATION = "d" * 32


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    monkeypatch.setattr(compiles, "_ours", None)
    record = StepRecord(INCARNATION, capacity=4, depth=1, num_workers=2)
    yield record
    record.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Hanging:
    """A loop that has given its model a batch of some decodes, and waits."""

    def __init__(self, utility_seconds: float = 60.0) -> None:
        self.clock = Clock()
        self.compiled_at = -math.inf
        self.compiles = False
        self.progress = Progress(
            self.clock, utility_seconds, lambda: self.clock.now if self.compiles else self.compiled_at
        )
        self.progress.step()
        self.progress.execute(SimpleNamespace(), 4)

    def after(self, seconds: float) -> tuple[Health, str]:
        self.clock.now += seconds
        return self.progress.health, self.progress.busy_with

    def ends(self) -> None:
        self.compiles, self.compiled_at = False, self.clock.now


def test_a_step_that_compiles_is_no_hang() -> None:
    """Its engine gets nothing new, and its streams stay; behind the compiler, the step has its limit once again."""
    loop = Hanging()
    assert loop.after(1.0) == (Health.OK, "")
    loop.compiles = True
    assert loop.after(0.1) == (Health.OK, ""), "it is not even late"
    assert loop.after(10.0) == loop.after(40.0) == (Health.SUSPECT, COMPILING)
    loop.ends()
    assert loop.after(PATIENCE_SECONDS - 0.1) == (Health.SUSPECT, COMPILING)
    assert loop.after(0.2) == (Health.SUSPECT, "")
    assert loop.after(RESCUE_SECONDS) == (Health.HUNG, "")
    loop.progress.step()
    assert loop.after(1.0) == (Health.OK, "")


def test_a_compiler_that_never_ends_hangs() -> None:
    loop = Hanging(utility_seconds=60.0)
    loop.compiles = True
    assert loop.after(59.9) == (Health.SUSPECT, COMPILING)
    assert loop.after(0.2)[0] is Health.HUNG


def test_earlier_compilation_excuses_no_later_step() -> None:
    loop = Hanging()
    loop.ends()
    assert loop.after(PATIENCE_SECONDS + RESCUE_SECONDS + 0.1) == (Health.HUNG, "")


def test_the_engine_reads_what_its_workers_write(record: StepRecord) -> None:
    read, place = record.workers.compiled_at, record.place_of_workers
    assert read() == -math.inf, "no worker has said anything"
    one, other = (Compiles(place, rank) for rank in (6, 7))  # of a data-parallel rank of two workers
    began = time.monotonic()
    one.begin()
    one.begin()
    other.begin()
    one.end()
    assert read() >= began
    other.end()
    assert read() >= time.monotonic() - 0.1, "the first is at it still"
    one.end()
    ended = read()
    assert ended == read() >= began


def test_another_process_writes(record: StepRecord) -> None:
    place = record.place_of_workers
    worker = (
        "import sys; from vllm_llumnix.steps.compiles import *; place = RecordPlace(sys.argv[1], int(sys.argv[2]), 2)\n"
        "write_down_compiles(place, 0)\nwith compiling(): print('now', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", worker, place.path, str(place.offset)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "now\n"
        asked = time.monotonic()
        assert record.workers.compiled_at() >= asked
        process.stdin.close()
        process.wait()
    assert asked <= record.workers.compiled_at() <= time.monotonic()


def test_compilers_of_their_own_are_found_below_a_worker(
    record: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's, DeepGEMM's: nobody says that they begin."""
    monkeypatch.setattr(compiles, "LOOK_SECONDS", 0.0)
    Compiles(record.place_of_workers, 0)
    before = record.workers.compiled_at()
    nvcc = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "nvcc")
    with subprocess.Popen(["sh", "-c", f"echo began; {nvcc} 60; true"], stdout=subprocess.PIPE, text=True) as shell:
        try:
            assert shell.stdout is not None
            assert shell.stdout.readline() == "began\n"
            ends = time.monotonic() + 20
            while record.workers.compiled_at() == before:
                assert time.monotonic() < ends, "the compiler is not seen"
                time.sleep(0.01)
        finally:
            for child in psutil.Process(shell.pid).children():
                child.kill()
    record.workers._look.join()
    monkeypatch.setattr(compiles, "LOOK_SECONDS", math.inf)
    seen = record.workers.compiled_at()
    assert before < seen == record.workers.compiled_at()


def test_scan_for_compilers_serves_all_workers_without_blocking(
    record: StepRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The llumlet asks on its event loop. A machine with thousands of processes takes long to go through."""
    looks, going = [], threading.Event()

    def process_iter(*_: Any) -> Iterator[psutil.Process]:
        looks.append(threading.current_thread())
        assert going.wait(20.0)
        return iter(())

    monkeypatch.setattr(psutil, "process_iter", process_iter)
    monkeypatch.setattr(compiles, "LOOK_SECONDS", 0.0)
    for rank in range(2):
        Compiles(record.place_of_workers, rank)
    for _ in range(3):
        record.workers.compiled_at()
    going.set()
    record.workers._look.join()
    assert len(looks) == 1
    assert looks[0] is not threading.current_thread()


def test_without_a_record_in_shared_memory_nothing_is_watched(
    record: StepRecord, llumlet_log: pytest.LogCaptureFixture
) -> None:
    write_down_compiles(compiles.RecordPlace("/no/such/file", 0, 1), 0)
    assert "counts as hung" in llumlet_log.text
    with compiling():
        assert record.workers.compiled_at() == -math.inf


class Gpu:
    """The part of a driver that Triton asks before it compiles for an absent GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def one_more(numbers, count: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, count)
    tl.store(numbers + places, tl.load(numbers + places) + 1)


@triton.jit
def impossible(numbers, count: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(count < 0)


@pytest.fixture
def watched(record: StepRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    """Triton, Dynamo and CuTe as this process has them, watched; and unwatched again."""
    import torch._dynamo.callback as dynamo
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "_do_compile", JITFunction._do_compile)
    cute = ModuleType("cutlass.cute")
    cute.compile = SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    callbacks = (dynamo.callback_handler.start_callbacks, dynamo.callback_handler.end_callbacks)
    before = [list(each) for each in callbacks]
    write_down_compiles(record.place_of_workers, 0)
    yield record
    for each, stock in zip(callbacks, before, strict=True):
        each[:] = stock


def under_way(record: StepRecord) -> bool:
    """True if a worker says that it compiles: then the answer is now, whenever it is asked."""
    first = record.workers.compiled_at()
    time.sleep(0.001)
    return record.workers.compiled_at() > first


def test_triton_is_watched(watched: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for a GPU from source to machine code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(driver, "_active", Gpu())
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: seen.append(under_way(watched)))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: seen.append(under_way(watched)))
    kernel = one_more.warmup(torch.float32, 64, grid=(1,))
    assert "cubin" in kernel.asm
    assert seen == [True, True]
    assert not under_way(watched)
    with pytest.raises(triton.CompilationError):
        impossible.warmup(torch.float32, 64, grid=(1,))
    assert seen == [True, True, True], "what fails to compile is begun and has no end, by Triton's own hooks"
    assert not under_way(watched)


def test_dynamo_is_watched(watched: StepRecord) -> None:
    seen = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(under_way(watched))
        return graph.forward

    compiled = torch.compile(lambda numbers: numbers + 1, backend=backend)
    assert not under_way(watched)
    compiled(torch.zeros(2))
    assert seen == [True]
    assert not under_way(watched)


def test_cute_is_watched(watched: StepRecord) -> None:
    cute: Any = sys.modules["cutlass.cute"]

    class Compile:
        opt_level = 3

        def __getitem__(self, options: Any) -> Any:
            return Compile()

        def __call__(self, kernel: str) -> tuple[str, bool]:
            return kernel, under_way(watched)

    cute.compile._stock = Compile()
    assert cute.compile("kernel") == cute.compile["fast"]("kernel") == ("kernel", True)
    assert cute.compile.opt_level == 3
    assert not under_way(watched)


def test_elastic_expert_parallelism_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.elastic_ep.elastic_state import ElasticEPScalingState as Scaling

    clock, seen = Clock(), []
    progress = Progress(clock, utility_seconds=60.0)

    def part(_self: Scaling) -> bool:
        clock.now += 30.0
        seen.append((progress.health, progress.busy_with))
        return True

    monkeypatch.setattr(Scaling, "progress", part)
    _watch_scaling(progress)
    assert Scaling.progress(object.__new__(Scaling)) is True
    assert seen == [(Health.SUSPECT, "elastic expert parallelism")]
    assert progress.health is Health.OK
