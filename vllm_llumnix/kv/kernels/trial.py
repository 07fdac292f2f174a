# SPDX-License-Identifier: Apache-2.0
"""Whether a backend does what it is there for, before anybody waits for it.

That a library loads says little: a kernel compiled for another GPU, or by a newer CUDA than the driver's, fails at its
launch, and Triton compiles at its first. So each form of the copy that moves will ask for is carried out once: both
ways, of two blocks and of one alone, with the pages of this worker at addresses aligned as its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import msgspec
import torch

from vllm_llumnix.kv.kernels import reference
from vllm_llumnix.kv.kernels.plan import BlockCopy, planned
from vllm_llumnix.kv.layout import BlockLayout

NUM_BLOCKS: Final = 2
TRIALS: Final = ((1, 0), (1,))
"""Blocks, in the order of their copy."""
_ALIGNMENT: Final = 16
"""Bytes: kernels are compiled for the power of two up to it that divides all addresses."""

Carry = Callable[[BlockCopy], None]


def why_not(carry: Carry, layout: BlockLayout, device: torch.device) -> str | None:
    """What is wrong with the copies that `carry` makes of pages like the layout's; None if nothing is.

    Takes four blocks of the device's memory for as long as it lasts.
    """
    small = few_blocks(layout)
    before = _noise(small.storage_bytes, seed=1), _noise(NUM_BLOCKS * small.bytes_per_block, seed=2)
    try:
        storage, buffer = (torch.empty_like(part, device=device) for part in before)
    except torch.OutOfMemoryError as error:
        return f"no memory to try it: {_first_line(error)}"
    for ids in TRIALS:
        for to_buffer in (True, False):
            name = f"{'gather' if to_buffer else 'scatter'} of {len(ids)} block{'s' * (len(ids) > 1)}"
            expected = [part.clone() for part in before]
            reference.copy_blocks(planned(expected[0], small, ids, expected[1], to_buffer=to_buffer))
            storage.copy_(before[0])
            buffer.copy_(before[1])
            try:
                with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                    carry(planned(storage, small, ids, buffer, to_buffer=to_buffer))
                    found = storage.cpu(), buffer.cpu()
            except Exception as error:  # noqa: BLE001 - a compiler's, a linker's, a driver's: there is no list of them
                return f"{name}: {type(error).__name__}: {_first_line(error)}"
            if not all(map(torch.equal, found, expected)):
                return f"{name}: wrong bytes"
    return None


def few_blocks(layout: BlockLayout) -> BlockLayout:
    """A small layout with the same pages, every address of which has the alignment that it has in `layout`."""
    # Regions side by side within each block stay so; others are moved together.
    side_by_side = all(
        region.offset + (region.num_layers - 1) * region.layer_stride + region.page_bytes <= region.block_stride
        for region in layout.regions
    )
    regions, end = [], 0
    for region in layout.regions:
        offset, layer_stride = region.offset, region.layer_stride
        if not side_by_side:
            offset = _aligned_as(offset, end)
        if layer_stride > region.block_stride:
            layer_stride = _aligned_as(layer_stride, (NUM_BLOCKS - 1) * region.block_stride + region.page_bytes)
        regions.append(msgspec.structs.replace(region, offset=offset, layer_stride=layer_stride))
        last = (region.num_layers - 1) * layer_stride + (NUM_BLOCKS - 1) * region.block_stride
        end = max(end, offset + last + region.page_bytes)
    return BlockLayout(0, end, NUM_BLOCKS, tuple(regions), layout.layout)


def _aligned_as(value: int, least: int) -> int:
    """The first number from `least` on that leaves the same rest."""
    return least + (value - least) % _ALIGNMENT


def _noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")
