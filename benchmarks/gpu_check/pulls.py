# SPDX-License-Identifier: Apache-2.0
"""Blocks of a real model pulled from another process by all that a worker has for it, beside a model that computes.

The model is a CUDA graph that is replayed by the worker's main thread, as an engine's is. Its replays without and
beside pulls say what a move costs the neighbours of the request: on the GPU, and by Python's lock, which the mover has
in common with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.gpu_check.device import HEADS, REAL_LAYERS, TOKENS, VECTOR_BYTES
from benchmarks.gpu_check.verdicts import Part
from tests.kv.fakes import FakeWorker, Memory, packed
from tests.support.source_process import offer, offered
from tests.support.stats import quantile
from vllm_llumnix.kv.mover.messages import MoverInfo, PeerMemory, Pull, PullReport
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.worker import start_mover, stop_mover

BLOCKS = 128
"""288 MiB."""
SECONDS = 2.0
"""Number of replays without pulls, and the least number beside them."""
MIN_PULLS = 3
PULL_S = 60.0
WIDTH, DEPTH = 1024, 40
"""Products of matrices in a graph: some milliseconds."""
CAPABILITY = bytes(CAPABILITY_BYTES)
TRANSPORTS = ("local", "tcp")

Step = Callable[[], object]


def memory_of(seed: int, num_blocks: int) -> Memory:
    page = HEADS * TOKENS * VECTOR_BYTES
    return Memory("LBNHC", [(REAL_LAYERS, page)], num_blocks=num_blocks, seed=seed)


@contextmanager
def worker_on(device: torch.device, memory: Memory) -> Iterator[tuple[torch.Tensor, MoverInfo]]:
    """KV memory on `device` and the data plane of a worker that has it, started as vLLM's workers start theirs."""
    storage = torch.from_numpy(memory.bytes).to(device)
    worker: Any = FakeWorker(memory, str(device), storage)
    worker.model.to(device)
    info = msgspec.msgpack.decode(start_mover(worker, packed(transports=TRANSPORTS)), type=MoverInfo)
    if info.memory.unavailable is not None:
        raise RuntimeError(info.memory.unavailable)
    try:
        yield storage, info
    finally:
        stop_mover(worker)


def serve_worker(device: torch.device, num_blocks: int) -> None:
    """A source process: its blocks may be pulled until its standard input ends."""

    async def grant(info: MoverInfo) -> None:
        client = MoverClient(info)
        await client.grant(CAPABILITY, list(range(num_blocks)))
        await client.stop(0)  # answered behind the grant
        client.close()

    with worker_on(device, memory_of(1, num_blocks)) as (_, info):
        asyncio.run(grant(info))
        offer(info.memory)


def model_on(device: torch.device) -> Step:
    """A step of a model, which returns when it is computed: a graph's replay on a GPU."""
    weights = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device, dtype=torch.bfloat16)
    state = torch.ones(16, WIDTH, device=device, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(DEPTH):
            state.copy_(state @ weights)

    if device.type != "cuda":
        return compute
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        compute()  # what cuBLAS allocates at its first call is not to be captured
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        compute()

    def replay() -> None:
        graph.replay()
        torch.cuda.current_stream(device).synchronize()

    return replay


def steps(step: Step, enough: Callable[[], bool]) -> list[float]:
    """Seconds of each step, until it is enough."""
    taken = []
    while not enough():
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return taken


def check_pull(device: torch.device, transport: str) -> Part:
    """All blocks, in another order, over and over; p50 and p99 of a model's steps without and beside that."""
    step = model_on(device)
    step()
    source_ids = np.random.default_rng(1).permutation(BLOCKS).tolist()
    with (
        offered(PeerMemory, "benchmarks.gpu_check", "--serve-worker", str(device), str(BLOCKS)) as peer,
        worker_on(device, memory_of(2, BLOCKS)) as (storage, info),
    ):
        until = time.monotonic() + SECONDS
        quiet = steps(step, lambda: time.monotonic() > until)
        pulling = _Pulling(info, peer, transport, source_ids)
        beside = steps(step, pulling.ended.is_set)
        reports = pulling.reports()
        found = storage.cpu().view(REAL_LAYERS, BLOCKS, -1)
    theirs = torch.from_numpy(memory_of(1, BLOCKS).bytes).view(REAL_LAYERS, BLOCKS, -1)
    right = torch.equal(found, theirs[:, source_ids])
    rates = [report.bytes / report.seconds / 1e9 for report in reports]
    return {
        "verdict": "right" if right else "wrong",
        "copied_by": info.copied_by,
        "pulls": len(reports),
        "mib": reports[0].bytes >> 20,
        "gb_s_p50": round(quantile(rates, 0.5), 3),
        "steps": {"quiet": _figures(quiet), "beside_pulls": _figures(beside)},
    }


def _figures(seconds: list[float]) -> Part:
    if not seconds:
        return {"steps": 0}
    figures = {f"p{round(100 * q)}_ms": round(1e3 * quantile(seconds, q), 3) for q in (0.5, 0.99)}
    return {"steps": len(seconds), **figures}


class _Pulling:
    """Pulls that a thread asks the mover for, as an engine's thread does. `ended`: whether it asks for no more."""

    def __init__(self, info: MoverInfo, peer: PeerMemory, transport: str, source_ids: list[int]) -> None:
        self._reports: list[PullReport] = []
        self._error: Exception | None = None
        self.ended = threading.Event()

        async def ask() -> None:
            client = MoverClient(info)
            try:
                if why := await client.probe(peer, transport):
                    raise RuntimeError(f"no {transport}: {why}")
                until = time.monotonic() + SECONDS
                while time.monotonic() < until or len(self._reports) < MIN_PULLS:
                    pull = Pull(
                        job=len(self._reports),
                        peer=peer,
                        src_blocks=source_ids,
                        dst_blocks=list(range(BLOCKS)),
                        capability=CAPABILITY,
                        transport=transport,
                        deadline_s=PULL_S,
                    )
                    report = await client.pull(pull)
                    if report.error is not None:
                        raise RuntimeError(report.error)
                    self._reports.append(report)
            finally:
                client.close()

        def run() -> None:
            try:
                asyncio.run(ask())
            except Exception as error:  # noqa: BLE001 - raised where the reports are asked for
                self._error = error
            finally:
                self.ended.set()

        self._thread = threading.Thread(target=run, name="asks-for-pulls")
        self._thread.start()

    def reports(self) -> list[PullReport]:
        """All of them, when no more are to come. Raises what kept it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reports
