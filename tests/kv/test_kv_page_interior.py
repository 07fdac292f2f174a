# SPDX-License-Identifier: Apache-2.0
"""A part of a page holds the heads and tokens that vLLM's own views of the KV memory put there, or there are no parts.

Backends decide what a page looks like inside: several kernel blocks in one block of the manager, slots of their own
instead of one for each KV head. Pages of equal sizes say nothing of that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_llumnix.kv.memory.layout import Cut
from vllm_llumnix.kv.memory.vllm_cache import backends_of, caches_of, layout_of

HEADS, HEAD_SIZE, BLOCKS = 4, 16, 4
FLASH_ATTN, FLASHINFER, B12X = "FLASH_ATTN", "FLASHINFER", "B12X"
DENSE = FullAttentionSpec(block_size=128, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
PLANES = replace(DENSE, num_head_slots=2, state_content_bytes=HEADS * HEAD_SIZE * 2)
"""Keys of all heads, then values of all heads: as B12X publishes it."""


@dataclass
class Kept:
    """The KV memory of two layers, as a worker of vLLM has it."""

    spec: FullAttentionSpec
    memory: torch.Tensor
    runner: Any
    layers: dict[str, Any]

    @property
    def views(self) -> list[torch.Tensor]:
        """[kernel blocks, head slots, tokens, numbers] of each layer."""
        return [layer.kv_cache for layer in self.layers.values()]

    @property
    def caches(self) -> str:
        return caches_of(self.runner, self.layers)

    def part(self, index: int, of: Any) -> set[float]:
        """The numbers that half of block 1 has, in all layers."""
        half = layout_of(self.runner, "cuda-9.0", self.layers).cut(Cut(index, 2, of))
        found: set[float] = set()
        for region in half.regions:
            for layer in range(region.num_layers):
                at = region.offset + layer * region.layer_stride + region.block_stride
                found |= {*self.memory[at : at + region.page_bytes].view(torch.bfloat16).float().tolist()}
        return found


def kept(
    layout: str = "LBHNC",
    spec: FullAttentionSpec = DENSE,
    kernel_block: int | None = None,
    backend: str = FLASH_ATTN,
) -> Kept:
    names, page = ["layers.0", "layers.1"], spec.page_size_bytes
    memory = torch.zeros(len(names) * BLOCKS * page, dtype=torch.int8)
    tensor = KVCacheTensor(size=memory.numel(), layers=names, offset=0, layer_stride=BLOCKS * page, block_stride=page)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout=layout,
    )
    views = create_kv_cache_views(
        memory, spec, BLOCKS, KVCacheLayout[layout], tensor, kernel_block_size=kernel_block or spec.block_size
    )
    as_named = SimpleNamespace(get_name=lambda: backend)
    layers = {
        name: SimpleNamespace(kv_cache=view, get_attn_backend=lambda: as_named)
        for name, view in zip(names, views, strict=True)
    }
    return Kept(spec, memory, SimpleNamespace(kv_cache_config=config, kv_caches=views), layers)


@pytest.mark.parametrize(("layout", "kernel_block"), [("LBHNC", 128), ("LBNHC", 128), ("LBNHC", 64), ("LBNHC", 16)])
def test_parts_hold_the_heads_and_tokens_that_they_name(layout: str, kernel_block: int) -> None:
    cache = kept(layout, kernel_block=kernel_block)
    for view in cache.views:
        for head in range(HEADS):
            view[:, head] = float(head)
    assert (cache.part(0, "heads"), cache.part(1, "heads")) == ({0, 1}, {2, 3})
    for view in cache.views:
        for row in range(view.shape[0]):
            for token in range(kernel_block):
                view[row, :, token] = float(row * kernel_block % 128 + token)
    assert (cache.part(0, "tokens"), cache.part(1, "tokens")) == ({*range(64)}, {*range(64, 128)})


@pytest.mark.parametrize(
    ("layout", "spec", "kernel_block"),
    [
        ("LBHNC", DENSE, 64),
        ("LBHNC", replace(DENSE, num_head_slots=2 * HEADS, state_content_bytes=HEAD_SIZE), 128),
        ("LBNHC", replace(DENSE, num_head_slots=2 * HEADS, state_content_bytes=HEAD_SIZE), 128),
        ("LBNHC", PLANES, 128),
        ("LBNHC", replace(PLANES, num_kv_heads=2, state_content_bytes=2 * HEAD_SIZE * 2), 128),
    ],
    ids=["kernel blocks of heads", "NVFP4", "NVFP4, tokens outside", "planes", "as many planes as heads"],
)
def test_pages_whose_heads_do_not_follow_each_other_have_no_parts(
    layout: str, spec: FullAttentionSpec, kernel_block: int
) -> None:
    cache = kept(layout, spec, kernel_block)
    found = layout_of(cache.runner, "cuda-9.0", cache.layers)
    assert (found.heads, found.tokens, found.strips) == (0, 0, ())
    assert found.bytes_per_block == 2 * spec.page_size_bytes, "whole pages are there all the same"


def test_equal_pages_are_alike_only_where_their_insides_are() -> None:
    insides = [
        kept(),
        kept(kernel_block=64),
        kept(kernel_block=32),
        kept(backend=FLASHINFER),
        kept(spec=PLANES, backend=FLASHINFER),
        kept(spec=PLANES, backend=B12X),
    ]
    assert len({one.spec.page_size_bytes for one in insides}) == 1
    assert len({one.caches for one in insides}) == len(insides)
    assert kept().caches == kept().caches


def test_kernel_blocks_do_not_matter_where_tokens_follow_each_other() -> None:
    """Nor does the number of heads or tokens in a block, as parts of such pages are copied."""
    smaller = replace(DENSE, block_size=64)
    fewer = replace(DENSE, num_kv_heads=2)
    alike = [kept("LBNHC"), kept("LBNHC", kernel_block=64), kept("LBNHC", smaller), kept("LBNHC", fewer), kept()]
    assert len({one.caches for one in alike}) == 1


def test_backends_are_named() -> None:
    assert backends_of({**kept().layers, "other": kept(backend=FLASHINFER).layers["layers.0"], "linear": object()}) == (
        "FLASHINFER+FLASH_ATTN"
    )
    assert backends_of({}) == ""
