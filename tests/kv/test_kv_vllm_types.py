# SPDX-License-Identifier: Apache-2.0
"""The types that stand for vLLM's worker ask for nothing that vLLM's worker does not have."""

from __future__ import annotations

import pytest
from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.kv.fakes import FakeWorker, Memory
from tests.support.protocols import missing, protocols_of
from vllm_llumnix.kv import vllm_worker_types as ours
from vllm_llumnix.kv.worker import worker_of

FOUND = [
    (ours.Worker, Worker),
    (ours.Worker, CPUWorker),
    (ours.Sleeper, Executor),
    (ours.WorkerWrapper, WorkerWrapperBase),
    (ours.ModelRunner, GPUModelRunner),
    (ours.ModelRunner, GPUModelRunnerV2),
    (ours.ModelRunner, CPUModelRunner),
    (ours.KVCacheConfig, interface.KVCacheConfig),
    (ours.KVCacheGroup, interface.KVCacheGroupSpec),
    (ours.KVCacheTensor, interface.KVCacheTensor),
    (ours.KVCacheSpec, interface.KVCacheSpec),
    (ours.AttentionSpec, interface.FullAttentionSpec),
    (ours.AttentionSpec, interface.ChunkedLocalAttentionSpec),
    (ours.StateSpec, interface.MambaSpec),
    (ours.UniformSpecs, interface.UniformTypeKVCacheSpecs),
    (ours.VllmConfig, VllmConfig),
    (ours.CompilationConfig, CompilationConfig),
    (ours.ParallelConfig, ParallelConfig),
    (ours.ModelConfig, ModelConfig),
    (ours.SchedulerOutput, SchedulerOutput),
    (ours.NewRequest, NewRequestData),
    (ours.KnownRequests, CachedRequestData),
]


@pytest.mark.parametrize(("protocol", "found"), FOUND, ids=lambda one: f"{one.__module__}.{one.__name__}")
def test_vllm_has_what_is_asked_of_it(protocol: type, found: type) -> None:
    assert not missing(protocol, found)


def test_every_protocol_is_held_against_vllm() -> None:
    assert protocols_of(ours) == {protocol for protocol, _ in FOUND}


def test_calls_reach_the_worker_behind_its_wrapper() -> None:
    wrapper, worker = WorkerWrapperBase(), FakeWorker(Memory())
    wrapper.worker = worker
    assert worker_of(wrapper) is worker
    assert worker_of(worker) is worker
