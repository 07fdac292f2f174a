# SPDX-License-Identifier: Apache-2.0
"""The GPU memory of another process: mapped, read, and its owner killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu_check.device import LAYERS, gb_s, layout_of, random_bytes
from benchmarks.gpu_check.verdicts import Part
from tests.support.source_process import offer, offered
from vllm_llumnix.errors import LlumnixError
from vllm_llumnix.kv.memory.cuda_share import share
from vllm_llumnix.kv.mover.messages import PeerMemory, Pull
from vllm_llumnix.kv.mover.process import NoncePage, allow_readers, describe_memory
from vllm_llumnix.kv.transport.local_cuda import LocalCudaTransport

PAGE = 16 << 10
BLOCKS = 256
CHUNK_BYTES = 8 << 20
KILLED_AFTER_S = 1.0
OUTLIVE_S = 120.0
ROOT = Path(__file__).parents[2]

When = Literal["before a copy", "during a copy", "after a copy"]
WHEN: tuple[When, ...] = ("before a copy", "during a copy", "after a copy")


def serve_memory() -> None:
    """A source process: GPU memory with a pattern, shared until its standard input ends."""
    allow_readers()
    storage = random_bytes(layout_of(PAGE, BLOCKS, False).storage_bytes, seed=1).to("cuda")
    torch.cuda.synchronize()
    layout, nonce = layout_of(PAGE, BLOCKS, False, storage.data_ptr()), NoncePage()
    memory = describe_memory(layout, nonce, "source", 0, cuda=share(storage.untyped_storage()))
    offer(memory)


def check_ipc() -> Part:
    """All blocks of another process, in another order, through `local`."""
    storage, transport = _destination()
    expected = random_bytes(storage.numel(), seed=1)
    source_ids = np.random.default_rng(1).permutation(BLOCKS).tolist()
    with offered(PeerMemory, "benchmarks.gpu_check", "--serve-memory") as peer:
        transport.probe(peer)
        everything = _pull_of(peer, source_ids)

        def pull() -> None:
            for _ in transport.pull(everything, CHUNK_BYTES):
                pass

        pull()
        theirs = expected.view(LAYERS, BLOCKS, PAGE)[:, source_ids]
        right = torch.equal(storage.cpu().view(BLOCKS, LAYERS, PAGE), theirs.transpose(0, 1))
        speed = gb_s(storage.numel(), pull, storage.device)
        transport.close()
    return {"verdict": "right" if right else "wrong", "gb_s": speed, "mib": storage.numel() >> 20}


def _destination() -> tuple[torch.Tensor, LocalCudaTransport]:
    """KV memory of this process, and what reads into it."""
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch.zeros(layout_of(PAGE, BLOCKS, True).storage_bytes, dtype=torch.uint8, device=device)
    return storage, LocalCudaTransport(storage, layout_of(PAGE, BLOCKS, True, storage.data_ptr()))


def _pull_of(peer: PeerMemory, source: list[int]) -> Pull:
    return Pull(job=1, peer=peer, src_blocks=source, dst_blocks=list(range(BLOCKS)), deadline_s=math.inf)


def outlive_source() -> None:
    """A destination process whose sources are killed, one for each of WHEN. Says what it noticed, and whether its GPU
    still computes."""
    storage, transport = _destination()
    found: list[dict[str, Any]] = []
    for when in WHEN:
        noticed = _killed(transport, when)
        transport.tidy()
        found.append({"when": when, **noticed, "why": why_it_does_not_compute(storage)})
    transport.close()
    print(json.dumps(found))


def _killed(transport: LocalCudaTransport, when: When) -> dict[str, Any]:
    pulls = 0
    with offered(PeerMemory, "benchmarks.gpu_check", "--serve-memory") as peer:
        everything = _pull_of(peer, list(range(BLOCKS)))
        transport.probe(peer)
        if when == "before a copy":
            os.kill(peer.pid, signal.SIGKILL)
        elif when == "during a copy":
            threading.Timer(KILLED_AFTER_S, os.kill, (peer.pid, signal.SIGKILL)).start()
        try:
            while True:
                for _ in transport.pull(everything, CHUNK_BYTES):
                    pass
                pulls += 1
                if when == "after a copy":
                    os.kill(peer.pid, signal.SIGKILL)
        except LlumnixError as error:
            return {"pulls": pulls, "noticed": str(error)}


def why_it_does_not_compute(storage: torch.Tensor) -> str | None:
    """A product of matrices in new memory, and a write to all of `storage`; None if both are right."""
    try:
        ones = torch.ones(256, 256, device=storage.device)
        product = (ones @ ones).cpu()
        storage.fill_(1)
        content = storage.cpu()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    if not (bool((product == 256).all()) and bool((content == 1).all())):
        return "it computes something else"
    return None


def check_killed_source() -> Part:
    """`kill -9` of a source, before, during and after a copy, fails that copy and nothing else of the destination."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--outlive-source"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=OUTLIVE_S, check=False)
    if run.returncode:
        return {"verdict": "wrong", "why": f"the destination ended with {run.returncode}: {run.stderr[-2000:]}"}
    return judged(json.loads(run.stdout.splitlines()[-1]))


def judged(found: list[dict[str, Any]]) -> Part:
    wrong = [f"killed {row['when']}: {row['why']}" for row in found if row["why"] is not None]
    idle = [f"killed {row['when']}: nothing was read before" for row in found if _read_nothing(row)]
    return {"verdict": "wrong" if wrong or idle else "right", "wrong": wrong + idle, "killed": found}


def _read_nothing(row: dict[str, Any]) -> bool:
    return not row["pulls"] and row["when"] != "before a copy"
