# SPDX-License-Identifier: Apache-2.0
"""Protocols of vLLM's workers, with the attributes that are read, called or wrapped; nothing of vLLM is imported.

vLLM's own classes satisfy these (`tests/kv/test_kv_vllm_types.py`). `seams` lists the attributes wrapped at run time.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


class KVCacheSpec(Protocol):
    """The form of the cache of a layer, or, with `UniformSpecs`, of all layers of a group."""

    block_size: int
    """Tokens of a block; of a state, those between two that are kept."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, of one layer."""
        ...

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens behind a cached prefix that are computed again, for a window that is not cached."""
        ...


class AttentionSpec(KVCacheSpec, Protocol):
    """Spec of a layer with keys and values for each token."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def kv_quant_mode(self) -> enum.Enum: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_size(self) -> int: ...

    @property
    def num_head_slots(self) -> int | None:
        """Where its backend does not keep one for each KV head."""
        ...

    @property
    def unpadded_page_size_bytes(self) -> int: ...


class StateSpec(KVCacheSpec, Protocol):
    """Spec of a layer with a state instead."""

    mamba_type: enum.Enum
    num_speculative_blocks: int
    """Drafts that may be computed behind it, each of which has a block."""


class UniformSpecs(KVCacheSpec, Protocol):
    """Specs of layers that differ and have one block table nevertheless."""

    @property
    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """By the layer's name."""
        ...


class KVCacheGroup(Protocol):
    """Layers with one block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    enable_kv_transfer: bool


class KVCacheTensor(Protocol):
    """The place of layers of one shape in the memory. Offset and strides are in bytes."""

    layers: list[str]
    offset: int
    layer_stride: int
    block_stride: int
    host_resident: bool


class KVCacheConfig(Protocol):
    num_blocks: int
    kv_cache_layout: str | None
    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroup]


class ModelRunner(Protocol):
    """`GPUModelRunner` of either version, and what is derived from it for CPUs. `kv_caches` are views of the memory."""

    model: torch.nn.Module
    kv_cache_config: KVCacheConfig
    kv_caches: Sequence[Any]
    """KV caches by layer: a tensor each, or several."""


class CompilationConfig(Protocol):
    static_forward_context: Mapping[str, object]
    """Layers by name. Those with attention have a backend and a view of the KV memory; on a CPU, `isa`."""


class ModelConfig(Protocol):
    hf_text_config: Any
    """Hugging Face's, of the part of the model that has to do with text."""

    def get_vocab_size(self) -> int: ...


class ParallelConfig(Protocol):
    tensor_parallel_size: int


class VllmConfig(Protocol):
    compilation_config: CompilationConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig


class NewRequest(Protocol):
    """A request that the workers do not know yet."""

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: Sequence[Any]
    num_computed_tokens: int


class KnownRequests(Protocol):
    """Requests that the workers know already."""

    req_ids: list[str]
    num_computed_tokens: list[int]
    """Computed tokens of each request before the step."""
    resumed_req_ids: Collection[str]
    """Ids of those that had been preempted."""


class SchedulerOutput(Protocol):
    """A batch, as the scheduler makes it and the workers get it."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: KnownRequests
    num_scheduled_tokens: dict[str, int]
    """Tokens to be computed, by request."""
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Drafts among them."""
    total_num_scheduled_tokens: int


class Sleeper(Protocol):
    """A worker, or an executor, in vLLM's sleep mode."""

    def sleep(self, level: int = 1) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None: ...


class Worker(Sleeper, Protocol):
    """`vllm.v1.worker.gpu_worker.Worker`, and what is derived from it for CPUs."""

    rank: int
    device: torch.device
    vllm_config: VllmConfig
    model_runner: ModelRunner

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> object: ...

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> object: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


@runtime_checkable
class WorkerWrapper(Protocol):
    """The worker as `collective_rpc` gives it to a function: what is set on this would not be seen by the worker."""

    worker: Worker
