# SPDX-License-Identifier: Apache-2.0
"""What vLLM's KV connectors need of an engine on a CPU, for tests, with `ENVIRONMENT`.

vLLM's CPU offloading copies with a GPU's engines, and refuses to start without. Here the same connector has a worker
that copies with the CPU, in a thread of its own and not at once, so that copies are on their way while steps go on.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
}
DELAY_S = 0.02
"""Some steps of a small model."""


class OwnConnector(ExampleConnector):
    """One of somebody's own."""


class OffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks)


class CopyingWorker(OffloadingWorker):
    """Copies one job after the other. A chunk is a block."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._blocks = [cache.tensor for cache in kv_caches.tensors]
        self._chunks = [torch.empty((num_chunks, *blocks.shape[1:]), dtype=torch.int8) for blocks in self._blocks]
        self._thread = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[None]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._blocks, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._chunks, src_spec, self._blocks, dst_spec)

    def _submit(self, job_id: int, there: list[torch.Tensor], of: Any, here: list[torch.Tensor], to: Any) -> bool:
        def copy() -> None:
            time.sleep(DELAY_S)
            for source, destination in zip(there, here, strict=True):
                destination[torch.as_tensor(to.block_ids)] = source[torch.as_tensor(of.block_ids)]

        self._jobs[job_id] = self._thread.submit(copy)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished = [job_id for job_id, job in self._jobs.items() if job.done()]
        for job_id in finished:
            self._jobs.pop(job_id).result()
        return [TransferResult(job_id, success=True) for job_id in finished]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown()
