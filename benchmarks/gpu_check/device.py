# SPDX-License-Identifier: Apache-2.0
"""The kernels that copy blocks, and seals: against what the processor computes, and timed.

A part is `right`, `wrong` (a wrong byte, or it broke) or `unrun`, with the reason.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_check.verdicts import Part
from tests.support.stats import median
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import Backend
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut, Strip, TensorRegion
from vllm_llumnix.kv.networks.seal import Multilinear, new_key
from vllm_llumnix.kv.networks.staging import SLOT_BYTES

LAYERS = 16
PAGES = (4096, 16 << 10, 9216)
"""Bytes; the last with the scales of fp8 inside."""
BLOCKS = 256
REAL_LAYERS, HEADS, TOKENS, VECTOR_BYTES = 36, 8, 16, 512
"""A model of 8 billion parameters: 64 KiB a page, 2.25 MiB a block."""
REAL_BLOCKS = 24
TIMES = 10
SMS = (4, 8, 16, 32)
SEALED = (300_001, SLOT_BYTES)


class Case(NamedTuple):
    """A layout of twice `num_blocks` blocks; `cut`: of its pages, what is copied."""

    name: str
    whole: BlockLayout
    num_blocks: int
    cut: Cut | None = None

    @property
    def layout(self) -> BlockLayout:
        return self.whole.cut(self.cut)


def layout_of(page_bytes: int, num_blocks: int, blocks_outermost: bool, base: int = 0) -> BlockLayout:
    return _layout(LAYERS, page_bytes, num_blocks, "BLHNC" if blocks_outermost else "LBHNC", base)


def real_layout(num_blocks: int, order: str = "LBNHC", heads: int = HEADS, tokens: int = TOKENS) -> BlockLayout:
    """The KV cache of a real model, or of one of its ranks: keys and values of a token side by side, as on GPUs."""
    rows = tokens if order.endswith("NHC") else 1
    strips = (Strip(1, VECTOR_BYTES * (heads if rows > 1 else 1)),)
    return _layout(REAL_LAYERS, heads * tokens * VECTOR_BYTES, num_blocks, order, 0, heads, tokens, strips)


def _layout(layers: int, page: int, num_blocks: int, order: str, base: int, *inside: Any) -> BlockLayout:
    layer, block = (page, layers * page) if order.startswith("B") else (num_blocks * page, page)
    region = TensorRegion(0, layers, layer, block, page)
    return BlockLayout(base, num_blocks * layers * page, num_blocks, (region,), order, *inside)


def cases() -> Iterator[Case]:
    for page in PAGES:
        for outermost in (False, True):
            layout = layout_of(page, 2 * BLOCKS, outermost)
            yield Case(f"{layout.layout}, pages of {page} bytes", layout, BLOCKS)
    for order in ("LBNHC", "BLHNC"):
        yield Case(f"{order}, a real model's block", real_layout(2 * REAL_BLOCKS, order), REAL_BLOCKS)
    few = max(2, REAL_BLOCKS // 4)
    for order in ("LBNHC", "LBHNC"):
        # The destination of a move from two ranks to one, and from blocks of 16 tokens to blocks of 64.
        yield Case(f"{order}, half of the heads", real_layout(2 * few, order), few, Cut(1, 2, "heads"))
        large = real_layout(2 * few, order, tokens=4 * TOKENS)
        yield Case(f"{order}, a quarter of the tokens", large, few, Cut(2, 4, "tokens"))
        # Both ends of a move between heads within tokens and tokens within heads.
        yield Case(f"{order}, vector by vector", real_layout(2 * few, order), few, Cut(0, 1, "vectors"))


def random_bytes(size: int, seed: int) -> torch.Tensor:
    """In main memory: every machine has the same ones, and whoever compares does not rely on the GPU."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def gb_s(num_bytes: int, action: Callable[[], Any], device: torch.device) -> float:
    """Rate by the median of some repetitions, each waited for."""
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return round(num_bytes / median(seconds) / 1e9, 3)


def self_test(device: torch.device, backends: tuple[Backend, ...]) -> Part:
    """Every backend is tried as a worker tries it at its start. A GPU on which one of them does not copy is wrong: a
    worker would take the next one, which is slower, and go on."""
    layouts = [*(layout_of(page, BLOCKS, outer) for page in PAGES for outer in (False, True)), real_layout(BLOCKS)]
    passed_over = {}
    for backend in backends:
        reasons = {why for layout in layouts if (why := kernels.why_not(backend, layout, device))}
        if reasons:
            passed_over[backend] = "; ".join(sorted(reasons))
    copied_by = sorted({kernels.settle(layout, device).backend for layout in layouts})
    return {"verdict": "wrong" if passed_over else "right", "copied_by": copied_by, "passed_over": passed_over}


def check_kernels(device: torch.device, backends: tuple[Backend, ...]) -> Part:
    """Every backend that can be had, both ways, on whole pages and on parts of them; speeds by the number of SMs on
    pages of 16 KiB and on a real model's blocks."""
    wrong, speeds = [], []
    missing = {name: why for name in backends if (why := kernels.obstacle(name, device.type))}
    present = [name for name in backends if name not in missing]
    for case in cases():
        layout, ids = case.layout, np.random.default_rng(1).permutation(2 * case.num_blocks)[: case.num_blocks]
        size = case.num_blocks * layout.bytes_per_block
        stored, packed = random_bytes(layout.storage_bytes, seed=1), random_bytes(size, seed=2)
        gathered, scattered = torch.zeros_like(packed), stored.clone()
        kernels.gather(stored, layout, ids, gathered, backend="torch")
        kernels.scatter(scattered, layout, ids, packed, backend="torch")
        storage, buffer = (torch.empty_like(part, device=device) for part in (stored, packed))
        for backend in present:
            storage.copy_(stored)
            kernels.gather(storage, layout, ids, buffer, backend=backend)
            is_right = torch.equal(buffer.cpu(), gathered)
            buffer.copy_(packed)
            kernels.scatter(storage, layout, ids, buffer, backend=backend)
            if not (is_right and torch.equal(storage.cpu(), scattered)):
                wrong.append(f"{backend}, {case.name}")
            for max_sms in _sms(case, backend, device):
                row = {"backend": backend, "pages": case.name, "max_sms": max_sms, "mib": round(size / (1 << 20), 1)}
                for copy in (kernels.gather, kernels.scatter):
                    copying = functools.partial(copy, storage, layout, ids, buffer, backend=backend, max_sms=max_sms)
                    row[f"{copy.__name__}_gb_s"] = gb_s(size, copying, device)
                speeds.append(row)
    return {"verdict": "wrong" if wrong else "right", "wrong": wrong, "missing": missing, "speeds": speeds}


def _sms(case: Case, backend: Backend, device: torch.device) -> tuple[int, ...]:
    """How many SMs each timed copy of a case may occupy; those of vLLM's usual order are timed, and parts of pages."""
    page = case.whole.regions[0].page_bytes
    if case.cut is not None:
        return () if backend == "torch" else (kernels.MAX_SMS,)
    if case.whole.layout.startswith("B") or page not in (16 << 10, HEADS * TOKENS * VECTOR_BYTES):
        return ()
    return SMS if device.type == "cuda" and backend != "torch" else (kernels.MAX_SMS,)


def check_seals(device: torch.device) -> Part:
    """`GpuStagingArea` has the GPU seal what lies in a buffer."""
    wrong, speeds = [], []
    key = new_key()
    for size in SEALED:
        data = random_bytes(size, seed=size).to(device)
        one, other = Multilinear(key), Multilinear(key)
        seal = one.seal(size, data)
        if seal != other.seal(size, data.cpu()):
            wrong.append(f"{size} bytes")
        data[size // 2] ^= 1
        if one.is_intact(size, data, seal):
            wrong.append(f"{size} bytes, one of them changed")
        speeds.append({"bytes": size, "gb_s": gb_s(size, functools.partial(one.seal, 0, data), device)})
    return {"verdict": "wrong" if wrong else "right", "wrong": wrong, "speeds": speeds}
