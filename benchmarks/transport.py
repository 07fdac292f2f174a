# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks get from one process to another.

    python -m benchmarks.transport --blocks 8,32,128,512 --json transport.jsonl

Every path copies the same scattered pages between the same two processes, in turn, there and back through the list
(ABBA), so that drift of the machine meets all of them alike:

    memcpy     within one process, page by page: what memory allows
    cma        bare process_vm_readv, as many pages a call as the kernel takes
    tcp_raw    one stream over loopback, one contiguous buffer on both sides, nothing else
    mooncake_raw     one read of Mooncake's own, one contiguous buffer on both sides
    mooncake_pieces  Mooncake's own as well: a batch of reads, one for each page where it lies
    local      our transport of that name, checks included
    tcp        our transport of that name
    mooncake   our transport of that name

A line of JSON for each path and size; `of` is the median of the ratios to a path's baseline: memcpy for cma and local,
tcp_raw for tcp, mooncake_raw for mooncake. `cores` is how many cores both processes kept busy: a path that has them all
cannot go faster, whatever it waits for. Without Mooncake its three paths are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks import source_process
from benchmarks.progress import saying
from benchmarks.stats import median
from vllm_llumnix.kv.block_server import BlockServer
from vllm_llumnix.kv.grants import CAPABILITY_BYTES, Grants
from vllm_llumnix.kv.layout import BlockLayout, TensorRegion, pair_pieces
from vllm_llumnix.kv.memory import HostMemory
from vllm_llumnix.kv.messages import PeerMemory
from vllm_llumnix.kv.mooncake import MooncakeEngine, why_not_installed
from vllm_llumnix.kv.pace import CHUNK_BYTES
from vllm_llumnix.kv.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.staging import StagingArea
from vllm_llumnix.kv.transport.base import Transport
from vllm_llumnix.kv.transport.connections import Connections
from vllm_llumnix.kv.transport.local import LocalTransport, read_pieces
from vllm_llumnix.kv.transport.mooncake import MooncakeTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport

Bytes = npt.NDArray[np.uint8]

BASELINES = {"cma": "memcpy", "local": "memcpy", "tcp": "tcp_raw", "mooncake": "mooncake_raw"}
RAW_BYTES = 1 << 20
LOCAL = "127.0.0.1"
MOONCAKE_BATCH = 1024
"""Reads at a time; of 8,192 it takes none."""


class Offer(msgspec.Struct):
    """What the source process says when it is ready."""

    memory: PeerMemory
    capability: bytes
    raw_port: int
    raw_segment: str | None
    """Where all of the memory is registered with Mooncake, as nobody should."""


def kv_memory(num_blocks: int, num_layers: int, page_bytes: int, seed: int) -> tuple[Bytes, BlockLayout]:
    """A KV cache in vLLM's order on CPUs (LBHNC), its pages touched."""
    size = num_blocks * num_layers * page_bytes
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    region = TensorRegion(0, num_layers, num_blocks * page_bytes, page_bytes, page_bytes)
    return data, BlockLayout(data.ctypes.data, size, num_blocks, (region,), "LBHNC")


def serve(num_blocks: int, num_layers: int, page_bytes: int) -> None:
    """The source process: until its standard input ends."""
    allow_readers()
    data, layout = kv_memory(num_blocks, num_layers, page_bytes, seed=1)
    nonce, grants, capability = NoncePage(), Grants(), secrets.token_bytes(CAPABILITY_BYTES)
    grants.allow(capability, range(num_blocks))
    staging, engine, bare = None, None, None
    if why_not_installed() is None:
        staging, engine, bare = StagingArea(layout), MooncakeEngine(LOCAL, "tcp"), MooncakeEngine(LOCAL, "tcp")
        engine.register(staging.address, staging.num_bytes)
        bare.register(layout.base, layout.storage_bytes)
    server = BlockServer(HostMemory(layout), nonce.value, grants, LOCAL, staging=staging)
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_raw, args=(listener, memoryview(data)), daemon=True).start()
    segment = engine.segment if engine else None
    memory = describe_memory(layout, nonce, "source", rank=0, tcp=f"{LOCAL}:{server.port}", mooncake=segment)
    source_process.offer(Offer(memory, capability, listener.getsockname()[1], bare.segment if bare else None))


def _send_raw(listener: socket.socket, data: memoryview) -> None:
    connection, _ = listener.accept()
    while request := connection.recv(8, socket.MSG_WAITALL):
        connection.sendall(data[: struct.unpack(">Q", request)[0]])


Path_ = Callable[[list[int], list[int]], None]


@contextlib.contextmanager
def paths(offer: Offer, num_blocks: int, num_layers: int, page_bytes: int) -> Iterator[dict[str, Path_]]:
    """By name: a function that copies blocks of the source's to blocks of ours."""
    theirs = offer.memory.layout
    data, ours = kv_memory(num_blocks, num_layers, page_bytes, seed=2)
    other, others = kv_memory(num_blocks, num_layers, page_bytes, seed=1)
    buffer = memoryview(np.ones(len(data), np.uint8))
    raw = socket.create_connection(("127.0.0.1", offer.raw_port))
    local, tcp = LocalTransport(ours), TcpTransport(HostMemory(ours))
    mooncake, bare = None, None
    if offer.raw_segment is not None:
        bare = _bare_mooncake(data, buffer)
        mooncake = MooncakeTransport(
            HostMemory(ours), MooncakeEngine(LOCAL, "tcp"), StagingArea(ours), Connections(None)
        )

    def memcpy(source_ids: list[int], destination_ids: list[int]) -> None:
        copy = ctypes.memmove
        for source, destination, length in zip(
            *(array.tolist() for array in pair_pieces(others, source_ids, ours, destination_ids)), strict=True
        ):
            copy(destination, source, length)

    def cma(source_ids: list[int], destination_ids: list[int]) -> None:
        pieces = pair_pieces(theirs, source_ids, ours, destination_ids)
        for _ in read_pieces(offer.memory.pid, pieces, 1 << 40):
            pass

    def tcp_raw(source_ids: list[int], _: list[int]) -> None:
        size = len(source_ids) * ours.bytes_per_block
        raw.sendall(struct.pack(">Q", size))
        done = 0
        while done < size:
            done += raw.recv_into(buffer[done : min(size, done + RAW_BYTES)])

    def mooncake_raw(source_ids: list[int], _: list[int]) -> None:
        address, size = np.frombuffer(buffer, np.uint8).ctypes.data, len(source_ids) * ours.bytes_per_block
        assert bare.transfer_sync_read(offer.raw_segment, address, theirs.base, size) == 0

    def mooncake_pieces(source_ids: list[int], destination_ids: list[int]) -> None:
        pieces = pair_pieces(theirs, source_ids, ours, destination_ids)
        source, destination, length = (array.tolist() for array in pieces)
        for at in range(0, len(length), MOONCAKE_BATCH):
            part = slice(at, at + MOONCAKE_BATCH)
            assert bare.batch_transfer_sync_read(offer.raw_segment, destination[part], source[part], length[part]) == 0

    def pull(transport: Transport) -> Path_:
        def run(source_ids: list[int], destination_ids: list[int]) -> None:
            for _ in transport.pull(offer.memory, source_ids, destination_ids, CHUNK_BYTES, offer.capability):
                pass
            assert np.array_equal(*(_block(*side) for side in _first(source_ids, destination_ids)))

        def _first(source_ids: list[int], destination_ids: list[int]) -> Iterator[tuple[Bytes, BlockLayout, int]]:
            yield other, others, source_ids[0]
            yield data, ours, destination_ids[0]

        return run

    functions = {"memcpy": memcpy, "cma": cma, "tcp_raw": tcp_raw, "local": pull(local), "tcp": pull(tcp)}
    transports: list[Transport] = [local, tcp]
    if mooncake is not None:
        functions |= {
            "mooncake_raw": mooncake_raw,
            "mooncake_pieces": mooncake_pieces,
            "mooncake": pull(mooncake),
        }
        transports.append(mooncake)
    for transport in transports:
        transport.probe(offer.memory)
    try:
        yield functions
    finally:
        raw.close()
        for transport in transports:
            transport.close()


def _bare_mooncake(*memories: Any) -> Any:
    """Mooncake's own engine, with everything registered."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(LOCAL, "P2PHANDSHAKE", "tcp", "") == 0
    for memory in memories:
        view = np.frombuffer(memory, np.uint8)
        assert engine.register_memory(view.ctypes.data, view.nbytes) == 0
    return engine


def _block(data: Bytes, layout: BlockLayout, block: int) -> Bytes:
    """The first layer's page of a block: the same on both sides after a copy."""
    address, page_bytes = layout.page_address(block, 0)
    return data[address - layout.base :][:page_bytes]


def measure(num_blocks: int, num_layers: int, page_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """One row a path. A round is ABBA: every path once in order and once in reverse."""
    room = 2 * num_blocks
    random = np.random.default_rng(3)
    shape = (room, num_layers, page_bytes)
    process = source_process.offered(Offer, "benchmarks.transport", "--serve", *map(str, shape))
    with process as offer, paths(offer, *shape) as functions:
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        cpu_seconds: dict[str, float] = dict.fromkeys(functions, 0.0)
        clocks = [_cpu_clock(pid) for pid in (os.getpid(), offer.memory.pid)]
        for _ in range(rounds + 1):
            taken: dict[str, float] = dict.fromkeys(functions, 0.0)
            for name in [*functions, *reversed(functions)]:
                source_ids = random.permutation(room)[:num_blocks].tolist()
                destination_ids = random.permutation(room)[:num_blocks].tolist()
                began, cpu_began = time.perf_counter(), sum(map(time.clock_gettime, clocks))
                functions[name](source_ids, destination_ids)
                taken[name] += (time.perf_counter() - began) / 2
                cpu_seconds[name] += sum(map(time.clock_gettime, clocks)) - cpu_began
            for name, time_taken in taken.items():
                seconds[name].append(time_taken)
    size = num_blocks * num_layers * page_bytes
    rows = []
    for name, times in seconds.items():
        baseline = BASELINES.get(name)
        times = times[1:]  # the first round warms up
        row = {
            "bench": "transport",
            "path": name,
            "blocks": num_blocks,
            "block_bytes": num_layers * page_bytes,
            "gb_s": round(size / median(times) / 1e9, 3),
            "p50_ms": round(median(times) * 1e3, 3),
            "cores": round(cpu_seconds[name] / 2 / sum(seconds[name]), 2),
        }
        if baseline is not None:
            ratios = [b / t for b, t in zip(seconds[baseline][1:], times, strict=True)]
            row |= {"baseline": baseline, "of": round(median(ratios), 3)}
        rows.append(row)
    return rows


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, for `time.clock_gettime`: clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport", description="How fast do KV blocks travel, by transport and size?"
    )
    parser.add_argument("--blocks", default="8,32,128,512", help="blocks a copy, e.g. 8,32")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--page-bytes", type=int, default=16 << 10, help="of one block in one layer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the JSON lines to this file")
    parser.add_argument("--serve", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve(*arguments.serve)
        return 0
    table = Table("blocks", "MiB", "path", "GB/s", "p50 ms", "cores", "of baseline", title="Copying KV blocks")
    rows = []
    with saying("copying") as say:
        for count in (int(part) for part in arguments.blocks.split(",")):
            say(f"{count} blocks")
            rows += measure(count, arguments.layers, arguments.page_bytes, arguments.rounds)
    for row in rows:
        size = f"{row['blocks'] * row['block_bytes'] / (1 << 20):.1f}"
        of = f"{row['of']:.2f} of {row['baseline']}" if "of" in row else ""
        table.add_row(
            str(row["blocks"]),
            size,
            row["path"],
            f"{row['gb_s']:.2f}",
            f"{row['p50_ms']:.2f}",
            f"{row['cores']:.1f}",
            of,
        )
    Console(stderr=True).print(table)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if arguments.json:
        arguments.json.write_text(lines)
    print(lines, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
