# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a block lie, against the formula written out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.fakes import FakeWorker, FullAttentionSpec, Memory, kv_cache_config
from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.memory.layout import BlockLayout, TensorRegion, pair_pieces
from vllm_llumnix.kv.memory.vllm_cache import has_states, layout_of

LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]

shapes = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([16, 48, 256])), min_size=1, max_size=3)


def copied(source: Memory, destination: Memory, source_ids: list[int], destination_ids: list[int]) -> Any:
    """Apply `pair_pieces` byte by byte to a copy of the destination."""
    result = destination.bytes.copy()
    pieces = pair_pieces(source.blocks, source_ids, destination.blocks, destination_ids)
    for from_address, to_address, length in zip(*(array.tolist() for array in pieces), strict=True):
        at, to = from_address - source.blocks.base, to_address - destination.blocks.base
        result[to : to + length] = source.bytes[at : at + length]
    return result, pieces


@settings(deadline=None)
@given(
    st.sampled_from([("LBHNC", "LBHNC"), ("BLHNC", "BLHNC"), ("LBNHC", "BLNHC"), ("BLHNC", "LBHNC")]),
    shapes,
    st.data(),
)
def test_pairs_copy_exactly_the_named_blocks(layouts: tuple[str, str], shapes: Any, data: Any) -> None:
    source = Memory(layouts[0], shapes, num_blocks=9, seed=1)
    destination = Memory(layouts[1], shapes, num_blocks=7, seed=2)
    source_ids = data.draw(st.lists(st.integers(0, 8), max_size=7))
    destination_ids = data.draw(st.permutations(range(7)))[: len(source_ids)]
    result, pieces = copied(source, destination, source_ids, destination_ids)

    expected = Memory(layouts[1], shapes, num_blocks=7, seed=2)
    moved = dict(zip(destination_ids, source_ids, strict=True))
    expected.bytes[:] = result
    for block in range(7):
        origin = source.block(moved[block]) if block in moved else destination.block(block)
        assert expected.block(block) == origin
    assert int(pieces.length.sum()) == len(source_ids) * source.blocks.bytes_per_block


@settings(deadline=None)
@given(st.sampled_from(LAYOUTS), shapes, st.lists(st.integers(0, 8)))
def test_pieces_cover_the_pages_of_the_blocks(layout: str, shapes: Any, ids: list[int]) -> None:
    memory = Memory(layout, shapes, num_blocks=9)
    addresses, lengths = memory.blocks.pieces(ids)
    found = [
        byte
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
        for byte in range(address, address + length)
    ]
    expected = [
        byte
        for block in ids
        for layer in range(memory.blocks.num_layers)
        for address, length in [memory.blocks.page_address(block, layer)]
        for byte in range(address, address + length)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("layout", "num_pieces"), [("LBHNC", 4), ("BLHNC", 1)])
def test_neighbours_are_merged(layout: str, num_pieces: int) -> None:
    source, destination = Memory(layout), Memory(layout)
    pieces = pair_pieces(source.blocks, [3, 4, 5], destination.blocks, [8, 9, 10])
    assert len(pieces.length) == num_pieces
    # Adjacent on one side only: nothing to merge.
    pieces = pair_pieces(source.blocks, [3, 4, 5], destination.blocks, [10, 9, 8])
    assert len(pieces.length) == (12 if layout == "LBHNC" else 3)


def test_wrong_blocks_are_refused() -> None:
    memory, other = Memory(num_blocks=8).blocks, Memory(num_blocks=4).blocks
    for source_ids, destination_ids, complaint in [
        ([8], [0], "block ids 8 to 8"),
        ([-1], [0], "block ids -1"),
        ([0], [4], "within 0 to 3"),
        ([0, 1], [0], "2 source blocks for 1"),
        ([0, 1], [2, 2], "named twice"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            pair_pieces(memory, source_ids, other, destination_ids)
    with pytest.raises(ValueError, match="block 8 "):
        memory.page_address(8, 0)
    with pytest.raises(ValueError, match="layer 4 "):
        memory.page_address(0, 4)


def _of_bytes(layout: BlockLayout) -> BlockLayout:
    regions = tuple(msgspec.structs.replace(region, element_bytes=1) for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


def test_different_pages_are_refused() -> None:
    memory = Memory()
    for other, complaint in [
        (Memory(layout="LBNHC").blocks, "layouts differ: LBHNC and LBNHC"),
        (Memory(shapes=[(4, 512)]).blocks, "pages differ"),
        (Memory(shapes=[(2, 256), (2, 256)]).blocks, "pages differ"),
        (_of_bytes(memory.blocks), r"\(4, 256, 2\).* and .*\(4, 256, 1\)"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            pair_pieces(memory.blocks, [0], other, [0])


@pytest.mark.parametrize(
    "change",
    [
        {"storage_bytes": 4 * 256 * 32 - 1},
        {"num_blocks": 33},
        {"base": 2**63 - 10},
        {"base": -1},
        {"heads": 1},
        {"tokens": 1},
        {"heads": -2, "tokens": -2},
        {"heads": 3, "tokens": 1},
        {"layout": "LBNHC", "heads": 1, "tokens": 0},
        {"regions": (TensorRegion(0, 1, 1, 1, 1, element_bytes=0),)},
        {"regions": (TensorRegion(-1, 1, 1, 1, 1),)},
        {"regions": (TensorRegion(0, 1, 1, -256, 256),)},
        {"regions": (TensorRegion(0, 0, 1, 1, 1),)},
        {"regions": (TensorRegion(0, 2**40, 2**40, 1, 1),)},
    ],
)
def test_an_impossible_layout_cannot_be_decoded(change: dict[str, Any]) -> None:
    fields = msgspec.structs.asdict(Memory().blocks) | change
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=BlockLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", [[(4, 4096)], [(3, 1024), (2, 2048)]])
def test_layout_of_a_model_runner(layout: str, shapes: list[tuple[int, int]]) -> None:
    memory = Memory(layout, shapes, num_blocks=5)
    assert layout_of(FakeWorker(memory).model_runner) == memory.blocks


def _change(config: Any, what: str) -> None:
    group, tensor = config.kv_cache_groups[0], config.kv_cache_tensors[0]
    match what:
        case "transfer":
            group.enable_kv_transfer = False
        case "host":
            tensor.host_resident = True
        case "layout":
            config.kv_cache_layout = "LHBNC"
        case "kind":
            group.kv_cache_spec = SimpleNamespace(page_size_bytes=256)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("transfer", "not transferable"),
        ("host", "host pool"),
        ("layout", "LHBNC scatters a page"),
        ("kind", "kind SimpleNamespace"),
    ],
)
def test_caches_that_cannot_be_carried(what: str, complaint: str) -> None:
    worker = FakeWorker(Memory())
    _change(worker.model_runner.kv_cache_config, what)
    with pytest.raises(TransportUnavailable, match=complaint):
        layout_of(worker.model_runner)


def test_a_cache_of_mixed_element_types() -> None:
    """As of DeepSeek V3.2: latents in bfloat16, the indexer's keys in bytes."""
    memory = Memory(shapes=[(2, 1024), (2, 512)])
    worker = FakeWorker(memory)
    specs = worker.model_runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    specs |= {f"1.{layer}": FullAttentionSpec(512, np.uint8) for layer in range(2)}
    found = layout_of(worker.model_runner)
    assert [region.element_bytes for region in found.regions] == [2, 1]
    assert pair_pieces(found, [1], found, [2]).length.sum() == found.bytes_per_block
    with pytest.raises(ValueError, match="pages differ"):
        pair_pieces(found, [1], memory.blocks, [2])


def test_a_cache_in_two_allocations_is_refused() -> None:
    worker = FakeWorker(Memory())
    worker.model_runner.kv_caches.append(worker.storage.clone())
    with pytest.raises(TransportUnavailable, match="2 allocations"):
        layout_of(worker.model_runner)


def test_names_that_vllm_uses() -> None:
    """The fakes above have the shape of vLLM's own classes."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm_names

    memory = Memory(shapes=[(2, 4096)], num_blocks=3, heads=1, tokens=32)
    fake = kv_cache_config(memory)
    spec = vllm_names.FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    tensors = [
        vllm_names.KVCacheTensor(
            size=memory.blocks.storage_bytes,
            layers=tensor.layers,
            layer_stride=tensor.layer_stride,
            block_stride=tensor.block_stride,
            offset=tensor.offset,
        )
        for tensor in fake.kv_cache_tensors
    ]
    config = vllm_names.KVCacheConfig(
        num_blocks=3,
        kv_cache_tensors=tensors,
        kv_cache_groups=[vllm_names.KVCacheGroupSpec(fake.kv_cache_groups[0].layer_names, spec)],
        kv_cache_layout="LBHNC",
    )
    runner = SimpleNamespace(kv_cache_config=config, kv_caches=[torch.from_numpy(memory.bytes)])
    assert layout_of(runner) == memory.blocks
    config.kv_cache_groups[0].kv_cache_spec = vllm_names.SinkFullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sink_len=32
    )
    with pytest.raises(TransportUnavailable, match="kind SinkFullAttentionSpec"):
        layout_of(runner)


def _grouped(layout: str, sizes: Sequence[Sequence[int]], num_blocks: int = 5) -> Any:
    """A runner of vLLM's own configuration: of each group, the page sizes of its layers; the last keeps a state."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm_names
    from vllm.v1.kv_cache_layout import KVCacheLayout

    widest = max(sum(pages) for pages in sizes)
    tensors, groups = [], []
    for number, pages in enumerate(sizes):
        names = [f"{number}.{layer}" for layer in range(len(pages))]
        if number < len(sizes) - 1:
            heads = pages[0] // (2 * 4 * 8 * 2)
            spec: Any = vllm_names.FullAttentionSpec(
                block_size=4, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16
            )
        else:
            spec = vllm_names.MambaSpec(block_size=4, shapes=((pages[0] // 4,),), dtypes=(torch.float32,))
        assert spec.page_size_bytes == pages[0]
        groups.append(vllm_names.KVCacheGroupSpec(names, spec))
        blocks_outside = KVCacheLayout[layout].is_block_outermost
        tensors.append(
            vllm_names.KVCacheTensor(
                size=widest * num_blocks,
                layers=names,
                layer_stride=pages[0] if blocks_outside else pages[0] * num_blocks,
                block_stride=widest if blocks_outside else pages[0],
            )
        )
    config = vllm_names.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout=layout
    )
    storage = torch.zeros(widest * num_blocks, dtype=torch.uint8)
    return SimpleNamespace(kv_cache_config=config, kv_caches=[storage[:256], [storage[256:512], storage[512:]]])


@pytest.mark.parametrize(
    ("layout", "sizes", "regions"),
    [
        # Groups begin at the same place; a layer of one is a layer of another, or of the other nothing.
        ("LBHNC", [[256] * 3, [256] * 4, [256] * 2], [(4, 5 * 256, 256, 256)]),
        ("BLHNC", [[256] * 3, [256] * 4, [256] * 2], [(1, 0, 1024, 1024)]),
        # Pages of several sizes, in a block of the longest.
        ("BLHNC", [[256] * 3, [512] * 2, [1536]], [(1, 0, 1536, 1536)]),
    ],
)
def test_groups_that_share_a_memory(
    layout: str, sizes: list[list[int]], regions: list[tuple[int, int, int, int]]
) -> None:
    runner = _grouped(layout, sizes)
    found = layout_of(runner)
    described = [(it.num_layers, it.layer_stride, it.block_stride, it.page_bytes) for it in found.regions]
    assert described == regions
    assert [it.element_bytes for it in found.regions] == [2]
    assert has_states(runner)


def test_layers_of_several_sizes_share_no_memory_of_layers() -> None:
    with pytest.raises(TransportUnavailable, match="several sizes"):
        layout_of(_grouped("LBHNC", [[256] * 2, [512]]))
