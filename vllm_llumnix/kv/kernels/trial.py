# SPDX-License-Identifier: Apache-2.0
"""Trial of a backend before anybody waits for it.

A library that loads may still fail: a kernel compiled for another GPU, or by a newer CUDA than the driver's, fails at
its launch, and Triton compiles at its first. So each form of copy that moves need is carried out once: both ways, of
two blocks and of one alone, with the pages of this worker at addresses aligned as its own, whole and cut as for an
engine with another number of ranks, another block size or another order within pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import torch

from vllm_llumnix.kv.kernels import reference
from vllm_llumnix.kv.kernels.plan import PlannedCopy, alignment_of, planned
from vllm_llumnix.kv.memory.layout import BlockLayout, TensorRegion

NUM_BLOCKS: Final = 2
NUM_LAYERS: Final = 2
"""Most layers of each region that are tried."""
TRIALS: Final = ((1, 0), (1,))
"""Blocks, in the order of their copy."""
_ALIGNMENT: Final = 16
"""Bytes: kernels are compiled for the power of two up to it that divides all addresses."""

Carry = Callable[[PlannedCopy], None]


def why_not(carry: Carry, layout: BlockLayout, device: torch.device) -> str | None:
    """Describes what is wrong with the copies that `carry` makes of pages like the layout's; None if nothing is.

    Takes the memory of a few pages of each kind meanwhile. Raises `torch.OutOfMemoryError`.
    """
    few = few_blocks(layout)
    before = _noise(few.storage_bytes, seed=1), _noise(NUM_BLOCKS * few.bytes_per_block, seed=2)
    storage, buffer = (torch.empty_like(part, device=device) for part in before)
    for form in forms(few):
        for ids in TRIALS:
            for to_buffer in (True, False):
                name = f"{'gather' if to_buffer else 'scatter'} of {len(ids)} block{'s' * (len(ids) > 1)}"
                name += f" in {len(form.regions)} regions" * (form != few)
                expected = [part.clone() for part in before]
                reference.copy_blocks(planned(expected[0], form, ids, expected[1], to_buffer=to_buffer))
                storage.copy_(before[0])
                buffer.copy_(before[1])
                try:
                    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                        carry(planned(storage, form, ids, buffer, to_buffer=to_buffer))
                        found = storage.cpu(), buffer.cpu()
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - a compiler's, a linker's, a driver's: there is no list of them
                    return f"{name}: {type(error).__name__}: {_first_line(error)}"
                if not all(map(torch.equal, found, expected)):
                    return f"{name}: wrong bytes"
    return None


def forms(layout: BlockLayout) -> Iterator[BlockLayout]:
    """The layout, and one of each kind of the cuts that moves ask for (`BlockLayout.cuts`) and of the parts in which
    large blocks are copied (`BlockLayout.split`). Kernels tell them apart by their alignment, and search among regions
    if there are several. A part is aligned as one of its pages, so parts of one page have all alignments."""
    found = set()
    for cut in (None, *layout.cuts()):
        whole = layout.cut(cut)
        for form in (whole, *whole.split(1)):
            kind = alignment_of(form), len(form.regions) > 1
            if kind not in found:
                found.add(kind)
                yield form


def few_blocks(layout: BlockLayout) -> BlockLayout:
    """A small layout with the same pages, of few layers, every address of which has the alignment that it has in
    `layout`."""
    # Regions side by side within each block stay so; others are moved together.
    side_by_side = all(
        region.offset + (region.num_layers - 1) * region.layer_stride + region.page_bytes <= region.block_stride
        for region in layout.regions
    )
    shrunk = [
        msgspec.structs.replace(region, num_layers=min(NUM_LAYERS, region.num_layers)) for region in layout.regions
    ]
    span = max((_extent(region) for region in shrunk), default=0)
    regions, end = [], 0
    for region in shrunk:
        offset, layer_stride, block_stride = region.offset, region.layer_stride, region.block_stride
        if side_by_side:
            block_stride = _aligned_as(block_stride, span)
        else:
            offset = _aligned_as(offset, end)
        if layer_stride > block_stride:
            layer_stride = _aligned_as(layer_stride, (NUM_BLOCKS - 1) * block_stride + region.page_bytes)
        small = msgspec.structs.replace(region, offset=offset, layer_stride=layer_stride, block_stride=block_stride)
        regions.append(small)
        end = max(end, _extent(small) + (NUM_BLOCKS - 1) * block_stride)
    return msgspec.structs.replace(layout, base=0, storage_bytes=end, num_blocks=NUM_BLOCKS, regions=tuple(regions))


def _extent(region: TensorRegion) -> int:
    """The end of the last page of a region's first block."""
    return region.offset + (region.num_layers - 1) * region.layer_stride + region.page_bytes


def _aligned_as(value: int, least: int) -> int:
    """The first number from `least` on that leaves the same rest."""
    return least + (value - least) % _ALIGNMENT


def _noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")
