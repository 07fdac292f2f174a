# SPDX-License-Identifier: Apache-2.0
"""The block layout of a vLLM worker's KV cache, or the reason why its blocks cannot be carried.

Reads vLLM's objects by attribute and class name: nothing of vLLM is imported.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import cast

import torch

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.layout import BlockLayout, TensorRegion
from vllm_llumnix.kv.vllm_types import AttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, ModelRunner

_CARRIED = {"FullAttentionSpec", "ChunkedLocalAttentionSpec"}
_REFUSED = {"HiddenStateCacheSpec", "SinkFullAttentionSpec", "RSWASpec", "CrossAttentionSpec"}
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


def layout_of(model_runner: ModelRunner) -> BlockLayout:
    """The layout of a model runner's KV cache: `kv_cache_config`, and the storage of `kv_caches`.

    Raises TransportUnavailable with the reason if blocks of this cache cannot be carried one by
    one.
    """
    config = model_runner.kv_cache_config
    spec_of = _attention_specs(config)
    if config.kv_cache_layout not in _LAYOUTS:
        raise TransportUnavailable(
            f"KV cache layout {config.kv_cache_layout} scatters a page; "
            f"set VLLM_KV_CACHE_LAYOUT to one of {', '.join(_LAYOUTS)}"
        )
    storage = storage_of(model_runner)
    regions = []
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            raise TransportUnavailable("part of the KV cache lives in a host pool of its own")
        page_bytes = spec_of[tensor.layers[0]].page_size_bytes
        regions.append(
            TensorRegion(
                offset=tensor.offset,
                num_layers=len(tensor.layers),
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                page_bytes=page_bytes,
                element_bytes=min(int(spec_of[layer].dtype.itemsize) for layer in tensor.layers),
            )
        )
    return BlockLayout(
        base=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        num_blocks=config.num_blocks,
        regions=tuple(regions),
        layout=config.kv_cache_layout,
    )


def caches_of(model_runner: ModelRunner) -> str:
    """Eight hex digits that tell caches apart whose pages have equal sizes: kind, data type and quantisation of every
    layer, in their order."""
    digest = 0
    for group in model_runner.kv_cache_config.kv_cache_groups:
        for layer, spec in _spec_of(group).items():
            mode = getattr(spec, "kv_quant_mode", None)
            described = f"{type(spec).__name__} {getattr(spec, 'dtype', None)} {getattr(mode, 'name', mode)}"
            digest = zlib.crc32(f"{layer} {described}\n".encode(), digest)
    return f"{digest:08x}"


def _spec_of(group: KVCacheGroup) -> dict[str, KVCacheSpec]:
    """Layer name -> cache specification: the group's, unless it has one for each."""
    inner: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {layer: inner[layer] if inner else group.kv_cache_spec for layer in group.layer_names}


def _attention_specs(config: KVCacheConfig) -> dict[str, AttentionSpec]:
    """Layer name -> cache specification; TransportUnavailable unless all have plain pages."""
    if len(config.kv_cache_groups) != 1:
        raise TransportUnavailable(f"the model has {len(config.kv_cache_groups)} kinds of KV cache; one is supported")
    group = config.kv_cache_groups[0]
    if not group.enable_kv_transfer:
        raise TransportUnavailable("vLLM marks the KV cache of this model as not transferable")
    spec_of = _spec_of(group)
    for spec in spec_of.values():
        kinds = {cls.__name__ for cls in type(spec).__mro__}
        if not kinds & _CARRIED or kinds & _REFUSED:
            raise TransportUnavailable(f"caches of kind {type(spec).__name__} are not carried")
    return cast(dict[str, AttentionSpec], spec_of)


def storage_of(model_runner: ModelRunner) -> torch.UntypedStorage:
    """The one storage behind all cache tensors. Raises TransportUnavailable."""
    caches = (tensor.untyped_storage() for tensor in model_runner.kv_caches)
    storages = {storage.data_ptr(): storage for storage in caches}
    if len(storages) != 1:
        raise TransportUnavailable(f"the KV cache is spread over {len(storages)} allocations")
    return storages.popitem()[1]
