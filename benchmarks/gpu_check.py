# SPDX-License-Identifier: Apache-2.0
"""Does all of it work on this GPU, and how fast?

    python -m benchmarks.gpu_check --json gpu.json

Four parts, each with what it needs: the block copy kernels against the torch reference (a GPU), the seal of what RDMA
brings against that of a processor (a GPU), KV memory of another process mapped and read (a GPU), and two real engines
on this one GPU between which streams move, exactness and downtime (vLLM for CUDA as well). A part that cannot run says
why and is `unrun`; one that gives a wrong byte or token, or breaks, is `wrong`. The report is one JSON object; exit
code 0 only if every part ran and was right.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.client import Client, Stream
from benchmarks.downtime import prompt_of
from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.model import PRESETS, build
from benchmarks.moves import Move, move_stream, stall_of_move
from benchmarks.progress import Say, saying
from benchmarks.source_process import offer, offered
from benchmarks.stats import median
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.cuda_share import share
from vllm_llumnix.kv.kernels import Backend
from vllm_llumnix.kv.layout import BlockLayout, TensorRegion
from vllm_llumnix.kv.messages import PeerMemory
from vllm_llumnix.kv.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.seal import Multilinear, new_key
from vllm_llumnix.kv.staging import SLOT_BYTES
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport

Part = dict[str, Any]

LAYERS = 16
PAGES = (4096, 16 << 10, 9216)
"""Bytes; the last with the scales of fp8 inside."""
BLOCKS = 256
TIMES = 10
SMS = (4, 8, 16, 32)
LENGTHS = (256, 2048, 7000)
MOVES = 6
SEALED = (300_001, SLOT_BYTES)
PARTS = ("kernels", "seals", "ipc", "engines")


def layout_of(page_bytes: int, num_blocks: int, blocks_outermost: bool, base: int = 0) -> BlockLayout:
    layer, block = (page_bytes, LAYERS * page_bytes) if blocks_outermost else (num_blocks * page_bytes, page_bytes)
    region = TensorRegion(0, LAYERS, layer, block, page_bytes)
    name = "BLHNC" if blocks_outermost else "LBHNC"
    return BlockLayout(base, num_blocks * LAYERS * page_bytes, num_blocks, (region,), name)


def random_bytes(size: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)


def gb_s(num_bytes: int, action: Callable[[], Any], device: torch.device) -> float:
    """Of the median of some repetitions, each waited for."""
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return round(num_bytes / median(seconds) / 1e9, 3)


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

        def pull() -> None:
            for _ in transport.pull(peer, source_ids, list(range(BLOCKS)), 8 << 20):
                pass

        pull()
        theirs = expected.view(LAYERS, BLOCKS, PAGES[1])[:, source_ids]
        right = torch.equal(storage.view(BLOCKS, LAYERS, PAGES[1]), theirs.transpose(0, 1))
        speed = gb_s(ours.storage_bytes, pull, device)
        transport.close()
    return {"verdict": "right" if right else "wrong", "gb_s": speed, "mib": ours.storage_bytes >> 20}


async def moved_stream(one: Server, other: Server, length: int, seed: int) -> tuple[Stream, list[Move]]:
    async with Client(one.base_url) as client:
        salt = uuid.uuid4().hex
        stream = await client.complete(prompt_of(length, seed), 400, ignore_eos=True, cache_salt=salt)
        moves = []
        pair = (one, other)
        for _ in range(MOVES):
            await stream.wait_for(len(stream.token_ids) + 40)
            moves.append(await move_stream(*pair, stream))
            pair = pair[::-1]
        return await stream.result(), moves


async def unmoved_stream(server: Server, length: int, seed: int) -> Stream:
    async with Client(server.base_url) as client:
        stream = await client.complete(prompt_of(length, seed), 400, ignore_eos=True, cache_salt=uuid.uuid4().hex)
        return await stream.result()


def check_engines(say: Say, logs: Path | None) -> Part:
    """Two engines on one GPU: the same tokens as without moves (and two unmoved runs alike), and the stalls."""
    rows: list[Part] = []
    with Fleet(logs) as fleet:
        flags = ("--gpu-memory-utilization", "0.3", "--no-enable-prefix-caching")
        spec = ServerSpec(build(PRESETS["bench"]), max_num_seqs=4, flags=flags)
        # One after the other: vLLM measures what the whole GPU uses while it starts.
        one, other = (fleet.start(dataclasses.replace(spec, name=name, instance_id=name))[0] for name in "ab")
        for length in LENGTHS:
            say(f"engines: {length} tokens")
            unmoved, again = (asyncio.run(unmoved_stream(server, length, 1)) for server in (one, other))
            moved, moves = asyncio.run(moved_stream(one, other, length, 1))
            stalls = [stall_of_move(moved, move) for move in moves if move.moved]
            rows.append(
                {
                    "context_tokens": length,
                    "control_identical": unmoved.token_ids == again.token_ids,
                    "tokens_identical": moved.token_ids == unmoved.token_ids,
                    "live": [move.live for move in moves],
                    "transports": sorted({move.transport for move in moves}),
                    "reasons": sorted({f"{move.reason} {move.detail}" for move in moves if not move.moved}),
                    "stall_ms_p50": round(1e3 * median(stall.stall for stall in stalls), 3) if stalls else None,
                    "itl_ms_p50": round(1e3 * median(stall.itl for stall in stalls), 3) if stalls else None,
                    "copied_bytes": int(median(move.copied_bytes for move in moves)),
                }
            )
    right = all(row["control_identical"] and row["tokens_identical"] and all(row["live"]) for row in rows)
    return {"verdict": "right" if right else "wrong", "lengths": rows}


def carried_out(check: Callable[[], Part], obstacle: str | None) -> Part:
    """The part, or why it did not come to an end."""
    if obstacle is not None:
        return {"verdict": "unrun", "why": obstacle}
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a report about what does not work
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {error}"}


def why_no_engines() -> str | None:
    import vllm
    from vllm.platforms import current_platform

    return None if current_platform.is_cuda() else f"vLLM {vllm.__version__} is not built for CUDA"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    parser.add_argument("--serve-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve_memory:
        serve_memory()
        return 0
    no_gpu = None if torch.cuda.is_available() else "torch sees no GPU"
    report: Part = {
        "bench": "gpu_check",
        "gpu": None if no_gpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    with saying("kernels") as say:
        backends: tuple[Backend, ...] = ("cuda", "triton", "torch")
        report["kernels"] = carried_out(lambda: check_kernels(torch.device("cuda"), backends), no_gpu)
        say("seals")
        report["seals"] = carried_out(lambda: check_seals(torch.device("cuda")), no_gpu)
        say("memory of another process")
        report["ipc"] = carried_out(check_ipc, no_gpu)
        say("engines")
        report["engines"] = carried_out(lambda: check_engines(say, options.logs), no_gpu or why_no_engines())
    Console(stderr=True).print_json(data=report)
    line = json.dumps(report)
    print(line)
    if options.json is not None:
        options.json.write_text(f"{line}\n")
    return 0 if all(report[part]["verdict"] == "right" for part in PARTS) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
