# SPDX-License-Identifier: Apache-2.0
"""What needs no engine: the kernels that copy blocks, seals, and the GPU memory of another process.

Each part is `right`, `wrong` (a wrong byte, or it broke) or `unrun`, with the reason.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.verdicts import Part
from tests.support.source_process import offer, offered
from tests.support.stats import median
from vllm_llumnix.errors import LlumnixError
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.cuda_share import share
from vllm_llumnix.kv.kernels import Backend
from vllm_llumnix.kv.layout import BlockLayout, TensorRegion
from vllm_llumnix.kv.messages import PeerMemory, Pull
from vllm_llumnix.kv.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.seal import Multilinear, new_key
from vllm_llumnix.kv.staging import SLOT_BYTES
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport

LAYERS = 16
PAGES = (4096, 16 << 10, 9216)
"""Bytes; the last with the scales of fp8 inside."""
BLOCKS = 256
TIMES = 10
SMS = (4, 8, 16, 32)
KILLED_AFTER_S = 1.0
OUTLIVE_S = 120.0
ROOT = Path(__file__).parents[2]
SEALED = (300_001, SLOT_BYTES)


def layout_of(page_bytes: int, num_blocks: int, blocks_outermost: bool, base: int = 0) -> BlockLayout:
    layer, block = (page_bytes, LAYERS * page_bytes) if blocks_outermost else (num_blocks * page_bytes, page_bytes)
    region = TensorRegion(0, LAYERS, layer, block, page_bytes)
    name = "BLHNC" if blocks_outermost else "LBHNC"
    return BlockLayout(base, num_blocks * LAYERS * page_bytes, num_blocks, (region,), name)


def random_bytes(size: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)


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


def self_test(device: torch.device) -> Part:
    """What a worker does at its start: the first backend that copies a few blocks rightly, and why not those before."""
    choices = [kernels.settle(layout_of(page, BLOCKS, outer), device) for page in PAGES for outer in (False, True)]
    copied_by = sorted({choice.backend for choice in choices})
    passed_over = sorted({why for choice in choices for why in choice.passed_over})
    return {"verdict": "right", "copied_by": copied_by, "passed_over": passed_over}


def check_kernels(device: torch.device, backends: tuple[Backend, ...]) -> Part:
    """Every backend that can be had, both ways, on two layouts; speeds by the number of SMs on pages of 16 KiB."""
    wrong, speeds = [], []
    missing = {name: why for name in backends if (why := kernels.obstacle(name, device.type))}
    present = [name for name in backends if name not in missing]
    for page_bytes in PAGES:
        for blocks_outermost in (False, True):
            layout = layout_of(page_bytes, 2 * BLOCKS, blocks_outermost)
            ids = np.random.default_rng(page_bytes).permutation(2 * BLOCKS)[:BLOCKS]
            storage = random_bytes(layout.storage_bytes, device, seed=1)
            size = BLOCKS * layout.bytes_per_block
            expected = torch.zeros(size, dtype=torch.uint8, device=device)
            kernels.gather(storage, layout, ids, expected, backend="torch")
            for backend in present:
                buffer, target = torch.zeros_like(expected), random_bytes(layout.storage_bytes, device, seed=2)
                scattered = target.clone()
                kernels.gather(storage, layout, ids, buffer, backend=backend)
                kernels.scatter(target, layout, ids, buffer, backend=backend)
                kernels.scatter(scattered, layout, ids, expected, backend="torch")
                if not (torch.equal(buffer, expected) and torch.equal(target, scattered)):
                    wrong.append(f"{backend}, {layout.layout}, pages of {page_bytes} bytes")
                if page_bytes == 16 << 10 and not blocks_outermost:
                    for max_sms in SMS if device.type == "cuda" and backend != "torch" else SMS[:1]:
                        copy = functools.partial(
                            kernels.gather, storage, layout, ids, buffer, backend=backend, max_sms=max_sms
                        )
                        row = {"backend": backend, "max_sms": max_sms, "mib": size >> 20}
                        speeds.append(row | {"gb_s": gb_s(size, copy, device)})
    return {"verdict": "wrong" if wrong else "right", "wrong": wrong, "missing": missing, "speeds": speeds}


def check_seals(device: torch.device) -> Part:
    """`GpuStagingArea` has the GPU seal what lies in a buffer."""
    wrong, speeds = [], []
    key = new_key()
    for size in SEALED:
        data = random_bytes(size, device, seed=size)
        one, other = Multilinear(key), Multilinear(key)
        seal = one.seal(size, data)
        if seal != other.seal(size, data.cpu()):
            wrong.append(f"{size} bytes")
        data[size // 2] ^= 1
        if one.is_intact(size, data, seal):
            wrong.append(f"{size} bytes, one of them changed")
        speeds.append({"bytes": size, "gb_s": gb_s(size, functools.partial(one.seal, 0, data), device)})
    return {"verdict": "wrong" if wrong else "right", "wrong": wrong, "speeds": speeds}


def serve_memory() -> None:
    """A source process: GPU memory with a pattern, shared until its standard input ends."""
    allow_readers()
    storage = random_bytes(layout_of(PAGES[1], BLOCKS, False).storage_bytes, torch.device("cuda"), seed=1)
    torch.cuda.synchronize()
    layout, nonce = layout_of(PAGES[1], BLOCKS, False, storage.data_ptr()), NoncePage()
    memory = describe_memory(layout, nonce, "source", 0, cuda=share(storage.untyped_storage()))
    offer(memory)


def check_ipc() -> Part:
    """All blocks of another process, in another order, through `local`."""
    device = torch.device("cuda", torch.cuda.current_device())
    ours = layout_of(PAGES[1], BLOCKS, True)
    storage = torch.zeros(ours.storage_bytes, dtype=torch.uint8, device=device)
    expected = random_bytes(ours.storage_bytes, device, seed=1)
    source_ids = np.random.default_rng(1).permutation(BLOCKS).tolist()
    with offered(PeerMemory, "benchmarks.gpu_check", "--serve-memory") as peer:
        transport = LocalCudaTransport(storage, layout_of(PAGES[1], BLOCKS, True, storage.data_ptr()))
        transport.probe(peer)
        everything = _pull_of(peer, source_ids, list(range(BLOCKS)))

        def pull() -> None:
            for _ in transport.pull(everything, 8 << 20):
                pass

        pull()
        theirs = expected.view(LAYERS, BLOCKS, PAGES[1])[:, source_ids]
        right = torch.equal(storage.view(BLOCKS, LAYERS, PAGES[1]), theirs.transpose(0, 1))
        speed = gb_s(ours.storage_bytes, pull, device)
        transport.close()
    return {"verdict": "right" if right else "wrong", "gb_s": speed, "mib": ours.storage_bytes >> 20}


def _pull_of(peer: PeerMemory, source: list[int], destination: list[int]) -> Pull:
    return Pull(job=1, peer=peer, src_blocks=source, dst_blocks=destination, deadline_s=math.inf)


def outlive_source() -> None:
    """A destination process: reads all blocks of a source over and over while that is killed, then uses its GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    ours = layout_of(PAGES[1], BLOCKS, True)
    storage = torch.zeros(ours.storage_bytes, dtype=torch.uint8, device=device)
    transport = LocalCudaTransport(storage, layout_of(PAGES[1], BLOCKS, True, storage.data_ptr()))
    with offered(PeerMemory, "benchmarks.gpu_check", "--serve-memory") as peer:
        threading.Timer(KILLED_AFTER_S, os.kill, (peer.pid, signal.SIGKILL)).start()
        everything, pulls = _pull_of(peer, list(range(BLOCKS)), list(range(BLOCKS))), 0
        try:
            while True:
                for _ in transport.pull(everything, 8 << 20):
                    pass
                pulls += 1
        except LlumnixError as error:
            why = str(error)
    transport.tidy()
    transport.close()
    storage.fill_(1)
    print(json.dumps({"pulls": pulls, "noticed": why, "intact": int(storage.sum()) == storage.numel()}))


def check_killed_source() -> Part:
    """`kill -9` of a source in the middle of a copy fails that copy, and nothing else of the destination."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--outlive-source"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=OUTLIVE_S, check=False)
    if run.returncode:
        return {"verdict": "wrong", "why": f"the destination ended with {run.returncode}: {run.stderr[-2000:]}"}
    found: Part = json.loads(run.stdout.splitlines()[-1])
    return {"verdict": "right" if found["intact"] and found["pulls"] else "wrong", **found}


def carried_out(check: Callable[[], Part], obstacle: str | None) -> Part:
    """The part, or why it did not come to an end."""
    if obstacle is not None:
        return {"verdict": "unrun", "why": obstacle}
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a report about what does not work
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {error}"}
