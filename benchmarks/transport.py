# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks get from one process to another.

    python -m benchmarks.transport --blocks 8,32,128,512 --page-bytes 4096,16384,32768 --json transport.jsonl

Every path copies the same scattered pages between the same two processes, in turn, there and back through the list
(ABBA), so that drift of the machine meets all of them alike:

    memcpy     within one process, page by page in C, planned beforehand: what memory allows
    cma        bare process_vm_readv, as many pages a call as the kernel takes, planned beforehand
    tcp_raw    one stream over loopback, one contiguous buffer on both sides, nothing else
    mooncake_raw     one read of Mooncake's own, one contiguous buffer on both sides
    mooncake_pieces  Mooncake's own as well: a batch of reads, one for each page where it lies
    nixl_raw   one read of NIXL's own, one contiguous buffer on both sides
    local      our transport of that name, planning and checks included
    tcp        our transport of that name
    mooncake   our transport of that name
    nixl       our transport of that name

A line of JSON for each path and size. `of_X` is the speed of a path as a share of that of its baseline X, the median of
the rounds with 95 % bootstrap bounds; the baseline has two turns in each round, and `aa_X` compares them: the control.
`X_verdict` says whether the share reaches its target, by its lower bound or because the control spreads as far; the
exit status is 0 if no target is missed. `cores` is how many cores both processes kept busy, and NIXL's beside them: a
path that has them all cannot go faster, whatever it waits for. Without Mooncake its three paths are left out, without
NIXL its two. Between two processes of one host UCX has the kernel copy; with `UCX_TLS=tcp` in the environment it does
what it does between two hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tests.support import source_process
from tests.support.progress import saying
from tests.support.stats import compare, median
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.memory.layout import BlockLayout, Pieces, TensorRegion, pair_pieces
from vllm_llumnix.kv.mover.messages import NetworkName, PeerMemory, Pull
from vllm_llumnix.kv.mover.pace import CHUNK_BYTES
from vllm_llumnix.kv.mover.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.networks import mooncake as mooncake_engine
from vllm_llumnix.kv.networks import nixl_process
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine, MooncakeNetwork
from vllm_llumnix.kv.networks.nixl import NixlEngine, NixlNetwork
from vllm_llumnix.kv.networks.nixl_process import Agent, ReadOrder, address_of
from vllm_llumnix.kv.networks.staging import SharedStagingArea, StagingArea
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, Grants
from vllm_llumnix.kv.transport.base import Transport
from vllm_llumnix.kv.transport.connections import Connections
from vllm_llumnix.kv.transport.local import LocalTransport, read_pieces
from vllm_llumnix.kv.transport.staged import POLL_SECONDS, StagedTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport

Bytes = npt.NDArray[np.uint8]

BASELINES = {
    "cma": ("memcpy",),
    "local": ("memcpy", "cma"),
    "tcp": ("tcp_raw",),
    "mooncake": ("mooncake_raw", "mooncake_pieces"),
    "nixl": ("nixl_raw",),
}
AGAIN = " again"
"""Behind the name of a baseline: its second turn in a round, the control."""
TARGETS = {
    ("local", "memcpy"): 0.85,
    ("tcp", "tcp_raw"): 0.8,
    ("mooncake", "mooncake_raw"): 0.9,
    ("mooncake", "mooncake_pieces"): 2.5,
}
"""Shares to be reached from TARGET_BYTES on, with pages of TARGET_PAGE_BYTES."""
TARGET_BYTES = 8 << 20
TARGET_PAGE_BYTES = 16 << 10
MIN_ROUNDS = 5
ONE_BUFFER = ("tcp_raw", "mooncake_raw", "nixl_raw")
"""Paths that do not bring blocks to their places."""
RAW_BYTES = 1 << 20
LOCAL = "127.0.0.1"
DEVICE = "lo"
MOONCAKE_BATCH = 1024
"""Reads at a time; of 8,192 it takes none."""


class RawNixl(msgspec.Struct):
    """An agent in the source's own process, with which all of the memory is registered."""

    agent: str
    metadata: bytes
    address: int


class Offer(msgspec.Struct):
    """What the source process says when it is ready."""

    memory: PeerMemory
    capability: bytes
    raw_port: int
    raw_segment: str | None
    """The segment in which all of the memory is registered with Mooncake, as nobody should."""
    raw_nixl: RawNixl | None
    pids: list[int]
    """Whose time counts: the process and those beside it."""


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
    staging: dict[NetworkName, StagingArea] = {}
    engine, bare, beside, raw_nixl = None, None, None, None
    if mooncake_engine.why_not_installed() is None:
        area, engine, bare = StagingArea(layout), MooncakeEngine(LOCAL, "tcp"), MooncakeEngine(LOCAL, "tcp")
        engine.register(area.address, area.num_bytes)
        bare.register(layout.base, layout.storage_bytes)
        staging["mooncake"] = area
    if nixl_process.why_not_installed() is None:
        outgoing, _, beside = _nixl(layout)
        staging["nixl"] = outgoing
        agent = _bare_nixl()
        raw_nixl = RawNixl(agent.name, agent.metadata(agent.register(memoryview(data))), layout.base)
    server = BlockServer(HostMemory(layout), nonce.value, grants, LOCAL, staging=staging)
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_raw, args=(listener, memoryview(data)), daemon=True).start()
    segment = engine.segment if engine else None
    told: dict[str, Any] = {"tcp": f"{LOCAL}:{server.port}", "mooncake": segment, "nixl": beside and beside.memory}
    memory = describe_memory(layout, nonce, "source", rank=0, **told)
    raw_port, raw_segment = listener.getsockname()[1], bare.segment if bare else None
    pids = [os.getpid(), *([beside.pid] if beside else [])]
    source_process.offer(Offer(memory, capability, raw_port, raw_segment, raw_nixl, pids))


def _nixl(layout: BlockLayout) -> tuple[SharedStagingArea, SharedStagingArea, NixlEngine]:
    """What peers read, what is read into, and the process that has both."""
    outgoing, incoming = SharedStagingArea(layout), SharedStagingArea(layout)
    return outgoing, incoming, NixlEngine(DEVICE, outgoing, incoming)


def _bare_nixl() -> Agent:
    os.environ["UCX_NET_DEVICES"] = DEVICE
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    return Agent(f"bare-{os.getpid()}")


def _send_raw(listener: socket.socket, data: memoryview) -> None:
    connection, _ = listener.accept()
    while request := connection.recv(8, socket.MSG_WAITALL):
        connection.sendall(data[: struct.unpack(">Q", request)[0]])


Path_ = Callable[[list[int], list[int]], Callable[[], None]]
"""Plans a copy of blocks of the source's to blocks of ours; what it returns copies them."""


class Paths(NamedTuple):
    by_name: dict[str, Path_]
    """Baselines before what is compared with them."""
    verify: Callable[[list[int], list[int]], None]
    """Raises AssertionError unless the first of these blocks holds what it should."""
    pids: list[int]
    """Of this process and those beside it."""


@contextlib.contextmanager
def paths(offer: Offer, num_blocks: int, num_layers: int, page_bytes: int) -> Iterator[Paths]:
    theirs = offer.memory.layout
    data, ours = kv_memory(num_blocks, num_layers, page_bytes, seed=2)
    other, others = kv_memory(num_blocks, num_layers, page_bytes, seed=1)
    buffer = memoryview(np.ones(len(data), np.uint8))
    raw = socket.create_connection(("127.0.0.1", offer.raw_port))
    local, tcp = LocalTransport(ours), TcpTransport(HostMemory(ours))
    mooncake, bare, nixl, beside = None, None, None, None
    if offer.raw_segment is not None:
        bare = _bare_mooncake(data, buffer)
        network = MooncakeNetwork(MooncakeEngine(LOCAL, "tcp"))
        mooncake = StagedTransport(HostMemory(ours), network, StagingArea(ours), Connections(None))
    if offer.raw_nixl is not None:
        agent = _bare_nixl()
        agent.register(buffer)
        _, incoming, beside = _nixl(ours)
        nixl = StagedTransport(
            HostMemory(ours), NixlNetwork(beside, incoming), incoming, Connections(None), exposed=True
        )

    def memcpy(source_ids: list[int], destination_ids: list[int]) -> Callable[[], None]:
        return functools.partial(copy_pieces, pair_pieces(others, source_ids, ours, destination_ids))

    def cma(source_ids: list[int], destination_ids: list[int]) -> Callable[[], None]:
        pieces = pair_pieces(theirs, source_ids, ours, destination_ids)
        return lambda: _exhaust(read_pieces(offer.memory.pid, pieces, 1 << 40))

    def tcp_raw(source_ids: list[int], _: list[int]) -> Callable[[], None]:
        size = len(source_ids) * ours.bytes_per_block

        def copy() -> None:
            raw.sendall(struct.pack(">Q", size))
            done = 0
            while done < size:
                done += raw.recv_into(buffer[done : min(size, done + RAW_BYTES)])

        return copy

    def mooncake_raw(source_ids: list[int], _: list[int]) -> Callable[[], None]:
        address, size = np.frombuffer(buffer, np.uint8).ctypes.data, len(source_ids) * ours.bytes_per_block

        def copy() -> None:
            assert bare.transfer_sync_read(offer.raw_segment, address, theirs.base, size) == 0

        return copy

    def mooncake_pieces(source_ids: list[int], destination_ids: list[int]) -> Callable[[], None]:
        pieces = pair_pieces(theirs, source_ids, ours, destination_ids)
        source, destination, length = (array.tolist() for array in pieces)

        def copy() -> None:
            for at in range(0, len(length), MOONCAKE_BATCH):
                part = slice(at, at + MOONCAKE_BATCH)
                batch = destination[part], source[part], length[part]
                assert bare.batch_transfer_sync_read(offer.raw_segment, *batch) == 0

        return copy

    def nixl_raw(source_ids: list[int], _: list[int]) -> Callable[[], None]:
        theirs, size = offer.raw_nixl, len(source_ids) * ours.bytes_per_block
        assert theirs is not None
        order = ReadOrder(0, theirs.agent, theirs.metadata, theirs.address, 0, size)

        def copy() -> None:
            agent.begin(order, address_of(buffer))
            while not (ended := agent.ended()):
                time.sleep(POLL_SECONDS)
            assert ended[0].error is None

        return copy

    def pull(transport: Transport) -> Path_:
        def plan(source_ids: list[int], destination_ids: list[int]) -> Callable[[], None]:
            wanted = Pull(
                job=1,
                peer=offer.memory,
                src_blocks=source_ids,
                dst_blocks=destination_ids,
                deadline_s=math.inf,
                capability=offer.capability,
            )
            return lambda: _exhaust(transport.pull(wanted, CHUNK_BYTES))

        return plan

    def verify(source_ids: list[int], destination_ids: list[int]) -> None:
        expected, found = _block(other, others, source_ids[0]), _block(data, ours, destination_ids[0])
        assert np.array_equal(expected, found)

    raws: dict[str, Path_] = {"memcpy": memcpy, "cma": cma, "tcp_raw": tcp_raw}
    transports: dict[str, Transport] = {"local": local, "tcp": tcp}
    if mooncake is not None:
        raws |= {"mooncake_raw": mooncake_raw, "mooncake_pieces": mooncake_pieces}
        transports["mooncake"] = mooncake
    if nixl is not None:
        raws["nixl_raw"] = nixl_raw
        transports["nixl"] = nixl
    by_name = {}
    for name, path in raws.items():
        by_name |= {name: path, name + AGAIN: path}
    for name, transport in transports.items():
        transport.probe(offer.memory)
        by_name[name] = pull(transport)
    try:
        yield Paths(by_name, verify, [os.getpid(), *([beside.pid] if beside else [])])
    finally:
        if beside is not None:
            beside.close()
        raw.close()
        for transport in transports.values():
            transport.close()


def _exhaust(copied: Iterable[int]) -> None:
    for _ in copied:
        pass


def copy_pieces(pieces: Pieces) -> None:
    """memcpy, one piece after the other."""
    source, destination, length = (array.ctypes.data for array in pieces)
    _compiled()(source, destination, length, len(pieces.length))


@functools.cache
def _compiled() -> Callable[[int, int, int, int], None]:
    """A loop of memcpy in C: that of an interpreter would be a slow one to be compared with."""
    code = """
        #include <stdint.h>
        #include <string.h>
        void copy_pieces(const uint64_t *from, const uint64_t *to, const uint64_t *bytes, uint64_t pieces) {
            for (uint64_t i = 0; i < pieces; i++) memcpy((void *)to[i], (const void *)from[i], bytes[i]);
        }
    """
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "copy_pieces.so")
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=code, text=True, check=True
        )
        copy = ctypes.CDLL(str(library)).copy_pieces
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    copy.restype = None
    return copy


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


@dataclasses.dataclass(slots=True)
class Taken:
    """What the copies of one path took, in seconds. A round is `(in order, in reverse)`."""

    rounds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def seconds(self) -> list[float]:
        return [seconds for turn in self.rounds for seconds in turn]


def measure(
    num_blocks: int, num_layers: int, page_bytes: int, rounds: int, until: float = math.inf
) -> list[dict[str, Any]]:
    """One row a path. A round is ABBA: every path once in order and once in reverse. There are at most `rounds`, and at
    least MIN_ROUNDS if the clock gets to `until`."""
    room = 2 * num_blocks
    random = np.random.default_rng(3)
    shape = (room, num_layers, page_bytes)
    process = source_process.offered(Offer, "benchmarks.transport", "--serve", *map(str, shape))
    with process as offer, paths(offer, *shape) as (by_name, verify, pids):
        taken = {name: Taken() for name in by_name}
        clocks = [_cpu_clock(pid) for pid in (*pids, *offer.pids)]

        def once(name: str) -> float:
            source_ids = random.permutation(room)[:num_blocks].tolist()
            destination_ids = random.permutation(room)[:num_blocks].tolist()
            copy = by_name[name](source_ids, destination_ids)
            cpu_began, began = sum(map(time.clock_gettime, clocks)), time.perf_counter()
            copy()
            seconds = time.perf_counter() - began
            taken[name].cpu_seconds += sum(map(time.clock_gettime, clocks)) - cpu_began
            if name.removesuffix(AGAIN) not in ONE_BUFFER:
                verify(source_ids, destination_ids)
            return seconds

        for name in by_name:
            once(name)
        taken = {name: Taken() for name in by_name}  # that was to warm up
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.monotonic() > until:
                break
            first = {name: once(name) for name in by_name}
            second = {name: once(name) for name in reversed(by_name)}
            for name, one in taken.items():
                one.rounds.append((first[name], second[name]))
    return [row(name, num_blocks, num_layers, page_bytes, taken) for name in taken if not name.endswith(AGAIN)]


def row(name: str, num_blocks: int, num_layers: int, page_bytes: int, taken: Mapping[str, Taken]) -> dict[str, Any]:
    """The JSON object of a path."""
    size, seconds = num_blocks * num_layers * page_bytes, taken[name].seconds
    fields: dict[str, Any] = {
        "bench": "transport",
        "path": name,
        "blocks": num_blocks,
        "block_bytes": num_layers * page_bytes,
        "page_bytes": page_bytes,
        "gb_s": round(size / median(seconds) / 1e9, 3),
        "p50_ms": round(median(seconds) * 1e3, 3),
        "cores": round(taken[name].cpu_seconds / sum(seconds), 2),
        "rounds": len(taken[name].rounds),
    }
    for baseline in BASELINES.get(name, ()):
        found = compare(_abba(taken, baseline, name), _abba(taken, baseline, baseline + AGAIN), statistic=median)
        share, control = found.ratio.inverse(), found.control.inverse()
        fields |= {
            f"of_{baseline}": round(share.value, 3),
            f"of_{baseline}_bounds": [round(share.low, 3), round(share.high, 3)],
            f"aa_{baseline}": round(control.value, 3),
            f"aa_{baseline}_bounds": [round(control.low, 3), round(control.high, 3)],
        }
        target = TARGETS.get((name, baseline))
        if target is not None and size >= TARGET_BYTES and page_bytes == TARGET_PAGE_BYTES:
            fields |= {f"{baseline}_target": target, f"{baseline}_verdict": found.against(1 / target)}
    return fields


def _abba(taken: Mapping[str, Taken], baseline: str, path: str) -> list[tuple[float, float, float, float]]:
    return [
        (a, b, b_again, a_again)
        for (a, a_again), (b, b_again) in zip(taken[baseline].rounds, taken[path].rounds, strict=True)
    ]


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, for `time.clock_gettime`: clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "blocks", "of KiB", "path", "GB/s", "p50 ms", "cores", "share", "95 %", "A/A", "", title="Copying KV blocks"
    )
    for row in rows:
        cells = [str(row["blocks"]), f"{row['block_bytes'] / 1024:.0f}", row["path"]]
        cells += [f"{row['gb_s']:.2f}", f"{row['p50_ms']:.2f}", f"{row['cores']:.1f}"]
        for baseline in BASELINES.get(row["path"], ("",)):
            if baseline:
                low, high = row[f"of_{baseline}_bounds"]
                control_low, control_high = row[f"aa_{baseline}_bounds"]
                cells += [f"{row[f'of_{baseline}']:.2f} of {baseline}", f"{low:.2f} to {high:.2f}"]
                cells += [f"{control_low:.2f} to {control_high:.2f}"]
            if f"{baseline}_target" in row:
                cells += [f"target {row[f'{baseline}_target']}: {row[f'{baseline}_verdict']}"]
            table.add_row(*cells)
            cells = [""] * 6
    return table


def is_good(row: dict[str, Any]) -> bool:
    """Whether no target is missed."""
    return all(row.get(f"{baseline}_verdict") != "outside" for baseline in BASELINES.get(row["path"], ()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    add = parser.add_argument
    add("--blocks", type=counts, default=counts("8,32,128,512"), metavar="N,N,…", help="blocks a copy")
    add("--layers", type=int, default=16)
    add(
        "--page-bytes",
        type=counts,
        default=counts("4096,16384,32768"),
        metavar="N,N,…",
        help="of one block in one layer",
    )
    add("--rounds", type=int, default=20, help="of a size, at most")
    add("--minutes", type=float, default=3.5, help=f"for all sizes, but each gets {MIN_ROUNDS} rounds")
    add("--json", type=Path, metavar="FILE", help="also write the JSON lines to this file")
    add("--serve", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(*options.serve)
        return 0
    ends = time.monotonic() + 60 * options.minutes
    sizes = list(itertools.product(options.page_bytes, options.blocks))
    rows = []
    with saying("copying") as say:
        for number, (page_bytes, num_blocks) in enumerate(sizes):
            say(f"{num_blocks} blocks, {options.layers} pages of {page_bytes} bytes each")
            now = time.monotonic()
            until = now + (ends - now) / (len(sizes) - number)
            rows += measure(num_blocks, options.layers, page_bytes, options.rounds, until)
    Console(stderr=True, width=160, markup=False).print(table_of(rows))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if options.json:
        options.json.write_text(lines)
    print(lines, end="")
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
