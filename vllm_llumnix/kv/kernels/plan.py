# SPDX-License-Identifier: Apache-2.0
"""Plans for backends: copies whose every address has been checked.

Backends check nothing: `planned` must check every argument.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from vllm_llumnix.kv.memory.layout import BlockLayout, Ids, TensorRegion


class Uploaded:
    """Block ids, and the same on a device, for copies that name some of them each: a slice uploads nothing.

    Its owner keeps it until the copies are over.
    """

    def __init__(self, ids: Ids, there: torch.Tensor) -> None:
        self.ids = ids
        self.there = there

    @classmethod
    def to(cls, device: torch.device, block_ids: Sequence[int] | Ids) -> Uploaded:
        """Enqueued on the current stream: others wait for that."""
        ids = np.array(block_ids, np.int64)
        return cls(ids, on_device(ids, device))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Uploaded:
        return Uploaded(self.ids[part], self.there[part])


BlockIds: TypeAlias = Sequence[int] | Ids | Uploaded


class Chunk(NamedTuple):
    """Blocks, or one block's pages in part: what is copied at a time."""

    layout: BlockLayout
    ids: Uploaded | Sequence[int]

    @property
    def num_bytes(self) -> int:
        return len(self.ids) * self.layout.bytes_per_block


def in_chunks(layout: BlockLayout, ids: Uploaded | Sequence[int], max_bytes: int) -> Iterator[Chunk]:
    """The blocks in turn, `max_bytes` at a time: several blocks, or some pages of one, a page at least. Buffers of the
    chunks, one behind the other, are a buffer of all."""
    parts = layout.split(max_bytes)
    step = max(1, max_bytes // max(1, layout.bytes_per_block))
    for at in range(0, len(ids), step):
        yield from (Chunk(part, ids[at : at + step]) for part in parts)


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Blocks `ids` of `storage`, to or from the first `num_bytes` bytes of `buffer`.

    Both are 1-D and uint8 on one device, and do not overlap. All ids are within the layout, all pages within the
    storage; if the storage is written, no id comes twice and no two pages share a byte. `uploaded`: the ids on that
    device, if they are there already.
    """

    storage: torch.Tensor
    buffer: torch.Tensor
    layout: BlockLayout
    ids: Ids
    to_buffer: bool
    uploaded: torch.Tensor | None = None

    @property
    def ids_there(self) -> torch.Tensor:
        """The ids on the device of the storage, for a copy on the current stream."""
        if self.uploaded is None:
            return on_device(self.ids, self.storage.device)
        _read_on_this_stream(self.uploaded)
        return self.uploaded

    @property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every address and length."""
        return math.gcd(alignment_of(self.layout), self.storage.data_ptr(), self.buffer.data_ptr())

    @property
    def num_bytes(self) -> int:
        return len(self.ids) * self.layout.bytes_per_block

    @property
    def num_pages(self) -> int:
        return len(self.ids) * self.layout.num_layers

    @property
    def table(self) -> Ids:
        """See `region_table`."""
        return region_table(self.layout)


@functools.lru_cache(maxsize=64)
def region_table(layout: BlockLayout) -> Ids:
    """Table with a row for each region: `struct Region` of csrc/block_pages.h.

    Columns: number of its first layer, offset, layer stride, block stride and page size in the storage, and the
    position of its first page among the bytes of a block in the buffer.
    """
    rows, first_layer, packed_offset = [], 0, 0
    for region in layout.regions:
        rows.append(
            (
                *(first_layer, region.offset, region.layer_stride, region.block_stride, region.page_bytes),
                packed_offset,
            )
        )
        first_layer += region.num_layers
        packed_offset += region.num_layers * region.page_bytes
    table = np.array(rows, np.int64).reshape(-1, 6)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=64)
def alignment_of(layout: BlockLayout) -> int:
    """The largest power of two up to 16 that divides the place of every page in the storage and in a buffer."""
    return math.gcd(16, *map(int, np.unique(region_table(layout)[:, 1:])))


def table_on(layout: BlockLayout, device: torch.device, width: int = 1) -> torch.Tensor:
    """The region table on `device`, its sizes in words of `width` bytes; uploaded once."""
    table = _table_on(layout, device, width)
    _read_on_this_stream(table)
    return table


def _read_on_this_stream(words: torch.Tensor) -> None:
    """Keeps the memory from being used again, once the tensor is forgotten, while another stream than that of its
    upload still reads it."""
    if words.is_cuda:
        words.record_stream(torch.cuda.current_stream(words.device))


@functools.lru_cache(maxsize=16)
def _table_on(layout: BlockLayout, device: torch.device, width: int) -> torch.Tensor:
    words = region_table(layout).copy()
    words[:, 1:] //= width
    table = on_device(words, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams read it
    return table


def on_device(words: Ids, device: torch.device) -> torch.Tensor:
    """A copy of them there. On a GPU it is enqueued like what reads it, from memory that need not be waited for: from
    other memory torch copies when all is done that the stream has to do before.
    """
    # `torch.tensor(words, pin_memory=True)` refuses every array of numpy's.
    here = torch.empty(words.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    here.numpy()[...] = words
    return here.to(device, non_blocking=True)


def planned(
    storage: torch.Tensor, layout: BlockLayout, block_ids: BlockIds, buffer: torch.Tensor, *, to_buffer: bool
) -> PlannedCopy:
    """The copy, or ValueError with what is wrong with it."""
    if storage.device != buffer.device:
        raise ValueError(f"the storage is on {storage.device}, the buffer on {buffer.device}")
    _require_bytes("storage", storage)
    _require_bytes("buffer", buffer)
    if storage.numel() != layout.storage_bytes:
        raise ValueError(f"a storage of {storage.numel()} bytes; the layout is that of {layout.storage_bytes}")
    uploaded = None
    if isinstance(block_ids, Uploaded):
        uploaded, block_ids = block_ids.there, block_ids.ids
        if uploaded.device != storage.device:
            raise ValueError(f"the storage is on {storage.device}, the ids on {uploaded.device}")
    ids = _checked_ids(layout, block_ids)
    if not to_buffer:
        if len(np.unique(ids)) != len(ids):
            raise ValueError("a block that is written is named twice")
        if not _pages_are_disjoint(layout):
            raise ValueError("pages of the layout overlap")
    copy = PlannedCopy(storage, buffer, layout, ids, to_buffer, uploaded)
    if buffer.numel() < copy.num_bytes:
        raise ValueError(f"a buffer of {buffer.numel()} bytes for {copy.num_bytes}")
    if _overlap(storage, buffer):
        raise ValueError("the buffer is part of the storage")
    return copy


def _require_bytes(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(f"the {name} has no memory of its own: {tensor.layout} on {tensor.device}")
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"the {name} is not a row of bytes: {tensor.dtype}, shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )


def _checked_ids(layout: BlockLayout, block_ids: Sequence[int] | Ids) -> Ids:
    ids = np.asarray(block_ids)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"block ids are a list of integers, not {ids.dtype} of shape {ids.shape}")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= layout.num_blocks:
        raise ValueError(f"block ids {lowest} to {highest} are not all within 0 to {layout.num_blocks - 1}")
    return np.array(ids, np.int64)  # a copy: what was checked is what is used


@functools.lru_cache(maxsize=64)
def _pages_are_disjoint(layout: BlockLayout) -> bool:
    """True if no byte belongs to two pages, as in every layout that vLLM makes, and in every cut of one.

    It reads only the two outermost dimensions: True is always right, an interlaced layout may be called overlapping.
    """
    regions = _with_rows_joined(layout.regions)
    if not all(_steps_clear(region, layout.num_blocks) for region in regions):
        return False
    whole = [(r.offset, r.offset + _extent(r) + (layout.num_blocks - 1) * r.block_stride) for r in regions]
    if _follow_each_other(whole):
        return True
    # Regions side by side within each block: it is enough to look at the first block.
    first = [(r.offset, r.offset + _extent(r)) for r in regions]
    strides = {r.block_stride for r in regions}
    span = max(end for _, end in first) - min(start for start, _ in first)
    return _follow_each_other(first) and len(strides) == 1 and span <= strides.pop()


def _with_rows_joined(regions: Sequence[TensorRegion]) -> list[TensorRegion]:
    """Regions that lie behind each other in the same pages, as of a cut: as one, gaps included."""
    joined: list[TensorRegion] = []
    # A cut of vectors has them head by head, in whatever order they lie.
    for region in sorted(regions, key=lambda region: region.offset):
        before = joined[-1] if joined else region
        end = region.offset + region.page_bytes
        rest = msgspec.structs.replace(region, offset=before.offset, page_bytes=before.page_bytes)
        behind = before.offset + before.page_bytes <= region.offset
        room = region.block_stride if region.num_layers == 1 else min(region.layer_stride, region.block_stride)
        if behind and rest == before and end - before.offset <= room:
            joined[-1] = msgspec.structs.replace(before, page_bytes=end - before.offset)
        else:
            joined.append(region)
    return joined


def _extent(region: TensorRegion) -> int:
    """The bytes from the first byte of a block's first layer to the last one of its last."""
    return (region.num_layers - 1) * region.layer_stride + region.page_bytes


def _steps_clear(region: TensorRegion, num_blocks: int) -> bool:
    steps = [(region.layer_stride, region.num_layers), (region.block_stride, num_blocks)]
    reach = region.page_bytes
    for stride, count in sorted(step for step in steps if step[1] > 1):
        if stride < reach:
            return False
        reach += (count - 1) * stride
    return True


def _follow_each_other(ranges: list[tuple[int, int]]) -> bool:
    ordered = sorted(ranges)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    starts, ends = zip(*((t.data_ptr(), t.data_ptr() + t.numel()) for t in (a, b)), strict=True)
    return bool(max(starts) < min(ends))
