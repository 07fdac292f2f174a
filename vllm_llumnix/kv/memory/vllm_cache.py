# SPDX-License-Identifier: Apache-2.0
"""The block layout of a vLLM worker's KV cache, or the reason why its blocks cannot be carried.

Reads vLLM's objects by attribute and class name: nothing of vLLM is imported.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.memory.layout import BlockLayout, StatePart, Strip, TensorRegion
from vllm_llumnix.kv.vllm_worker_types import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunner,
    StateSpec,
    Worker,
)

_CARRIED = {"FullAttentionSpec", "ChunkedLocalAttentionSpec", "SlidingWindowSpec", "MambaSpec", "CircularBufferSpec"}
_REFUSED = {"HiddenStateCacheSpec", "SinkFullAttentionSpec", "CrossAttentionSpec"}
_OF_HEADS = {"FullAttentionSpec", "ChunkedLocalAttentionSpec", "SlidingWindowSpec"}
_NOT_OF_HEADS = {"MLAAttentionSpec", "SlidingWindowMLASpec"}
_TRANSPOSED = {"vec", "vec16"}
"""Arrangements of CPU kernels that keep the keys of a head transposed."""
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


def arrangement_of(worker: Worker, device: str) -> str:
    """Packing of the inside of a page by the attention kernels."""
    if device == "cpu":
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return "+".join(sorted({isa for layer in layers if (isa := getattr(layer, "isa", None))})) or "none"
    if device == "cuda":
        return "cuda-{}.{}".format(*torch.cuda.get_device_capability(worker.device))
    return device


def layout_of(model_runner: ModelRunner, arrangement: str = "", layers: Mapping[str, Any] | None = None) -> BlockLayout:
    """The layout of a model runner's KV cache: `kv_cache_config`, and the storage of `kv_caches`. `arrangement`: as
    `arrangement_of` says it; without, tokens within a page are not told apart. `layers`: vLLM's attention layers by
    name, with what they know of the inside of their pages.

    Groups of layers share the memory: which of them a block belongs to is another matter for each block. A page of the
    layout is a place for one of any group.

    Raises TransportUnavailable with the reason if blocks of this cache cannot be carried one by
    one.
    """
    config = model_runner.kv_cache_config
    spec_of = carried_specs(config)
    layout = carried_layout(config)
    storage = storage_of(model_runner)
    regions: list[TensorRegion] = []
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
                element_bytes=min(_element_bytes(spec_of[layer]) for layer in tensor.layers),
            )
        )
    if len(config.kv_cache_groups) > 1:
        regions = _overlaid(regions, blocks_outside=layout.startswith("B"))
    specs = list(spec_of.values())
    split = any(_kernel_states(spec, (layers or {}).get(name), layout) for name, spec in spec_of.items())
    heads, tokens = (0, 0) if split else _heads_and_tokens(specs, layout)
    return BlockLayout(
        base=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        num_blocks=config.num_blocks,
        regions=tuple(regions),
        layout=layout,
        heads=heads,
        tokens=tokens,
        strips=_strips(specs, regions, heads * tokens, tokens if layout.endswith("NHC") else 1, arrangement),
        states=_state_parts(model_runner, regions, storage.data_ptr(), layers or {}),
    )


def _state_parts(
    model_runner: ModelRunner, regions: Sequence[TensorRegion], base: int, layers: Mapping[str, Any]
) -> tuple[StatePart, ...]:
    """Parts of a state's page beside which drafts are computed; empty if there is none. vLLM knows how it carries a
    state on from the last accepted draft: it is asked for the first and for the second.

    Raises TransportUnavailable where that is not so, or not the same in all pages.
    """
    found: dict[str, list[StatePart]] = {}
    for group in model_runner.kv_cache_config.kv_cache_groups:
        for layer, spec in _spec_of(group).items():
            if "MambaSpec" in _kinds_of(spec) and (num_drafts := cast(StateSpec, spec).num_speculative_blocks):
                found[layer] = _parts_of(model_runner, cast(StateSpec, spec), layers[layer].kv_cache, num_drafts)
    if not found:
        return ()
    (region, *others) = regions
    if others:
        raise TransportUnavailable("states beside drafts lie in pages of several kinds")
    parts = set()
    for of_layer in found.values():
        for part in of_layer:
            within = part.offset - base - region.offset
            within %= region.layer_stride or region.block_stride
            parts.add(msgspec.structs.replace(part, offset=within))
    if region.num_layers > 1 and len(parts) != len(next(iter(found.values()))):
        raise TransportUnavailable("states beside drafts have other places in other layers")
    return tuple(sorted(parts, key=lambda part: part.offset))


def _parts_of(
    model_runner: ModelRunner, spec: StateSpec, states: Sequence[torch.Tensor], num_drafts: int
) -> list[StatePart]:
    """Parts of one layer, with addresses in block 0."""
    try:
        model = cast(Any, model_runner.model)
        functions = model.get_mamba_state_copy_funcs({spec.mamba_type})[spec.mamba_type]
        parts = []
        for state, copied in zip(states, functions, strict=True):
            first, second = (copied(state, [0, 1], 0, accepted) for accepted in (1, 2))
            steps = second.start_addr - first.start_addr
            in_one_block = steps < state.stride(0) * state.element_size()
            step_elements = first.num_elements - second.num_elements
            num_elements = first.num_elements - num_drafts * step_elements
            if in_one_block is not bool(step_elements) or num_elements < 1:
                raise TransportUnavailable(f"a state of {first.num_elements} elements beside {num_drafts} drafts")
            num_bytes = num_elements * state.element_size()
            parts.append(StatePart(first.start_addr, num_bytes, steps if in_one_block else 0))
        return parts
    except (AttributeError, AssertionError, KeyError, ValueError) as error:
        raise TransportUnavailable(f"vLLM does not say how these states are carried on: {error}") from error


def _strips(
    specs: Sequence[KVCacheSpec], regions: Sequence[TensorRegion], num_vectors: int, num_rows: int, arrangement: str
) -> tuple[Strip, ...]:
    """Strips that the inside of all pages repeats; empty if they are not known, or not the same in all. `num_vectors`:
    of keys and values that a page has, one for each head and token. `num_rows`: pieces in which all heads follow each
    other.

    GPU kernels have a token's keys and values side by side. CPUs without AMX keep the keys of a head transposed, number
    by number, and its values behind them, token by token.
    """
    sizes = {region.page_bytes for region in regions}
    if not num_vectors or len(sizes) != 1:
        return ()
    (page_bytes,) = sizes
    vector = page_bytes // num_vectors
    if arrangement.startswith("cuda"):
        return (Strip(1, page_bytes // num_rows if num_rows > 1 else vector),)
    attention = [cast(AttentionSpec, spec) for spec in specs]
    of_keys = {(spec.head_size, int(spec.dtype.itemsize)) for spec in attention}
    if arrangement not in _TRANSPOSED or len(of_keys) != 1:
        return ()
    head_size, element_bytes = of_keys.pop()
    if vector != 2 * head_size * element_bytes:
        return ()
    return Strip(head_size, element_bytes), Strip(1, head_size * element_bytes)


def _heads_and_tokens(specs: Sequence[KVCacheSpec], layout: str) -> tuple[int, int]:
    """Numbers of heads and tokens of every page; nothing where they differ, pages have more in them than keys and
    values, layers of several groups are taken for one page, or the backend has slots of its own instead of one for each
    head: FlashInfer keeps all keys before all values in NVFP4, and B12X a plane of each."""
    shapes = set()
    for spec in specs:
        if _kinds_of(spec).isdisjoint(_OF_HEADS) or not _kinds_of(spec).isdisjoint(_NOT_OF_HEADS):
            return 0, 0
        attention = cast(AttentionSpec, spec)
        plain = attention.page_size_bytes == attention.unpadded_page_size_bytes and attention.num_head_slots is None
        shapes.add((attention.num_kv_heads, attention.block_size) if plain else (0, 0))
    mixed = len(shapes) != 1 or (layout.startswith("B") and len({*map(type, specs)}) > 1)
    return (0, 0) if mixed else shapes.pop()


def has_states(model_runner: ModelRunner) -> bool:
    """True if some layers keep a state that changes with every step."""
    specs = [spec for group in model_runner.kv_cache_config.kv_cache_groups for spec in _spec_of(group).values()]
    return any("MambaSpec" in _kinds_of(spec) for spec in specs)


def _kinds_of(spec: KVCacheSpec) -> set[str]:
    return {cls.__name__ for cls in type(spec).__mro__}


def _overlaid(regions: list[TensorRegion], *, blocks_outside: bool) -> list[TensorRegion]:
    """Regions of several groups, each of which begins at the same place, as one: where layers lie within a block, the
    longest block; where blocks lie within a layer, whose pages then are all of one size, the most layers."""
    element_bytes = min(region.element_bytes for region in regions)
    if blocks_outside:
        end = max(it.offset + (it.num_layers - 1) * it.layer_stride + it.page_bytes for it in regions)
        return [TensorRegion(0, 1, 0, regions[0].block_stride, end, element_bytes)]
    if len({(it.offset, it.layer_stride, it.block_stride, it.page_bytes) for it in regions}) != 1:
        raise TransportUnavailable("groups of layers with pages of several sizes share a memory of layers")
    widest = max(regions, key=lambda it: it.num_layers)
    return [msgspec.structs.replace(widest, element_bytes=element_bytes)]


def _element_bytes(spec: KVCacheSpec) -> int:
    """Element size in bytes; the smallest for a state, which has several tensors."""
    dtypes = getattr(spec, "dtypes", None) or (cast(AttentionSpec, spec).dtype,)
    return min(int(dtype.itemsize) for dtype in dtypes)


def _kernel_states(spec: KVCacheSpec, layer: Any, layout: str | None) -> int:
    """Tokens of a kernel block where a page has several and the heads of each lie behind those of the one before it; 0
    where the page's tokens follow each other as if it were one. `layer`: vLLM's, None if not known."""
    cache = getattr(layer, "kv_cache", None)
    if not isinstance(cache, torch.Tensor) or cache.ndim < 3 or not (layout or "").endswith("HNC"):
        return 0
    in_kernel_block: int = cache.shape[-2]
    return in_kernel_block if in_kernel_block != getattr(spec, "num_states", in_kernel_block) else 0


def caches_of(model_runner: ModelRunner, layers: Mapping[str, Any]) -> str:
    """Eight hex digits that tell caches apart whose pages have equal sizes, by what every layer keeps in them: kind,
    data type, quantisation and size, and of how many tokens; and by how its backend packs that. Blocks and shares of
    heads may differ where each head and token has a place of its own. `layers`: as in `layout_of`."""
    digest, config = 0, model_runner.kv_cache_config
    for group in config.kv_cache_groups:
        for name, spec in _spec_of(group).items():
            layer = layers.get(name)
            mode = getattr(spec, "kv_quant_mode", None)
            described = f"{type(spec).__name__} {getattr(spec, 'dtype', None)} {getattr(mode, 'name', mode)}"
            described += f" {getattr(spec, 'head_size', None)} of {getattr(spec, 'tokens_per_state', 1)}"
            packed = [getattr(spec, field, None) for field in ("head_size_v", "num_head_slots", "state_content_bytes")]
            described += f" {packed} {_kernel_states(spec, layer, config.kv_cache_layout)} {_backend_of(layer)}"
            digest = zlib.crc32(f"{name} {described}\n".encode(), digest)
    return f"{digest:08x}"


def backends_of(layers: Mapping[str, Any]) -> str:
    """vLLM's names of the attention backends of all layers."""
    return "+".join(sorted({_backend_of(layer) for layer in layers.values()} - {""}))


def _backend_of(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name()) if hasattr(layer, "get_attn_backend") else ""


def _spec_of(group: KVCacheGroup) -> dict[str, KVCacheSpec]:
    """Layer name -> cache specification: the group's, unless it has one for each."""
    inner: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {layer: inner[layer] if inner else group.kv_cache_spec for layer in group.layer_names}


def carried_layout(config: KVCacheConfig) -> str:
    """The name of vLLM's layout; TransportUnavailable unless each page lies in one place."""
    if config.kv_cache_layout not in _LAYOUTS:
        raise TransportUnavailable(
            f"KV cache layout {config.kv_cache_layout} scatters a page; "
            f"set VLLM_KV_CACHE_LAYOUT to one of {', '.join(_LAYOUTS)}"
        )
    return config.kv_cache_layout


def carried_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Layer name -> cache specification; TransportUnavailable unless all have plain pages."""
    spec_of: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        if not group.enable_kv_transfer:
            raise TransportUnavailable("vLLM marks the KV cache of this model as not transferable")
        spec_of |= _spec_of(group)
    for spec in spec_of.values():
        kinds = _kinds_of(spec)
        if not kinds & _CARRIED or kinds & _REFUSED:
            raise TransportUnavailable(f"caches of kind {type(spec).__name__} are not carried")
    return spec_of


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors of all layers; a state has several."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def storage_of(model_runner: ModelRunner) -> torch.UntypedStorage:
    """The one storage behind all cache tensors. Raises TransportUnavailable."""
    caches = (tensor.untyped_storage() for tensor in _tensors(model_runner.kv_caches))
    storages = {storage.data_ptr(): storage for storage in caches}
    if len(storages) != 1:
        raise TransportUnavailable(f"the KV cache is spread over {len(storages)} allocations")
    return storages.popitem()[1]
