# SPDX-License-Identifier: Apache-2.0
"""Workers write down when they compile a kernel, so that an engine that waits for one is not taken for hung.

Kernels are compiled when a shape, a type or a divisor is met for the first time: for seconds, within a step, and by
every engine that computes the request. Each worker has a place at the end of the record of its engine's steps
(`step_record`), which is memory that the engine and its workers share:

    when it last began or ended to compile, whether it does, its process

Triton, TorchDynamo and CuTe compile within the process and are watched there. FlashInfer, DeepGEMM and TileLang start
compilers as processes of their own; the engine looks for these when a step takes too long.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

logger = logging.getLogger("vllm.llumnix")

PLACE: Final = struct.Struct("<dII")
"""Seconds of the machine's monotonic clock, `under way`, process id. Nothing of a worker that has said nothing yet."""
COMPILERS: Final = frozenset({"nvcc", "cicc", "ptxas", "hipcc", "ninja", "c++", "cc1plus", "g++", "gcc", "clang++"})
LOOK_SECONDS: Final = 0.5
"""Time between two looks at the processes of the machine. Each reads a file of every process."""


class RecordPlace(msgspec.Struct, frozen=True):
    """The places of an engine's workers: in which file, from where on, how many."""

    path: str
    offset: int
    count: int


class Compiles:
    """Written by one worker, whichever of its threads compile."""

    def __init__(self, place: RecordPlace, rank: int) -> None:
        """Raises OSError if the file is not on this machine."""
        with Path(place.path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._offset = place.offset + rank % place.count * PLACE.size
        self._lock = threading.Lock()
        self._depth = 0
        self._write()

    def begin(self) -> None:
        with self._lock:
            self._depth += 1
            self._write()

    def end(self) -> None:
        with self._lock:
            self._depth -= 1
            self._write()

    def _write(self) -> None:
        PLACE.pack_into(self._map, self._offset, time.monotonic(), self._depth > 0, os.getpid())


class Workers:
    """Reader of what the workers of an engine have written. `memory`: the record; `offsets`: their places."""

    def __init__(self, memory: mmap.mmap, offsets: range) -> None:
        self._memory, self._offsets = memory, offsets
        self._looked_at = -math.inf
        self._seen_at = -math.inf
        self._look = threading.Thread()

    def compiled_at(self) -> float:
        """When one of them last compiled anything, by the monotonic clock: now, if one does. A thread looks for
        compilers that are processes of their own, so the first answer does not know of them yet."""
        now = time.monotonic()
        if self._memory.closed:
            return -math.inf
        places = [PLACE.unpack_from(self._memory, offset) for offset in self._offsets]
        if any(under_way for _, under_way, _ in places):
            return now
        workers = {process for _, _, process in places if process}
        if workers and now - self._looked_at > LOOK_SECONDS and not self._look.is_alive():
            self._looked_at = now
            self._look = threading.Thread(target=self._look_below, args=(workers, now), daemon=True)
            self._look.start()
        return max([self._seen_at, *(float(at) for at, _, process in places if process)])

    def _look_below(self, workers: set[int], now: float) -> None:
        if _have_compilers(workers):
            self._seen_at = now


def _have_compilers(workers: set[int]) -> bool:
    """True if a compiler runs below any of these processes. Goes through the machine's processes once for all of
    them: those of Ray are no children of the engine."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in COMPILERS:
            with contextlib.suppress(psutil.Error):
                if not workers.isdisjoint(parent.pid for parent in process.parents()):
                    return True
    return False


_ours: Compiles | None = None
"""Where this process writes."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Something is compiled within."""
    ours = _ours
    if ours is not None:
        ours.begin()
    try:
        yield
    finally:
        if ours is not None:
            ours.end()


def write_down_compiles(place: RecordPlace, rank: int) -> None:
    """Runs in the worker: from now on, what the compilers in this process do is written to its place."""
    global _ours
    watched = _ours is not None
    try:
        _ours = Compiles(place, rank)
    except OSError as error:
        logger.warning("llumlet: an engine that waits for a kernel to be compiled counts as hung: %s", error)
        return
    if not watched:
        _watch_triton()
        _watch_dynamo()
        _watch_cute()


def _watched(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile(*args: Any, **kwargs: Any) -> Any:
        with compiling():
            return stock(*args, **kwargs)

    return compile


def _watch_triton() -> None:
    """Not by `knobs.runtime.jit_cache_hook` and `jit_post_compile_hook`: the latter is not called where compiling
    fails, as autotuners let it."""
    kernel: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if hasattr(kernel, "_do_compile"):
        kernel._do_compile = _watched(kernel._do_compile)


def _watch_dynamo() -> None:
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is not None:
        entered = contextlib.ExitStack()
        dynamo.callback_handler.register_start_callback(lambda _: entered.enter_context(compiling()))
        dynamo.callback_handler.register_end_callback(lambda _: entered.close())


class _WatchedCute:
    """Wraps `cute.compile`, including `cute.compile[options]`, as vLLM's `jit_monitor` does."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getitem__(self, options: Any) -> _WatchedCute:
        return _WatchedCute(self._stock[options])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with compiling():
            return self._stock(*args, **kwargs)


def _watch_cute() -> None:
    cute: Any = sys.modules.get("cutlass.cute")
    if hasattr(cute, "compile"):
        cute.compile = _WatchedCute(cute.compile)
