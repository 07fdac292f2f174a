# SPDX-License-Identifier: Apache-2.0
"""The copy in Triton, for GPUs for which nothing was compiled. One launch, as many programs as SMs may be used.

Imported on first use: whether Triton interprets (TRITON_INTERPRET=1) is decided when a kernel is defined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_llumnix.kv.kernels.plan import PlannedCopy, table_on

CHUNK_BYTES = 32 * 1024
"""Bytes that a program has in flight at once."""
NUM_WARPS = 8
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# One form for all sizes, and for whole pages and parts of them: for a last round of one block nothing is compiled
# again, while its client waits.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_pages", "num_layers", "block_words", "num_regions"],
    do_not_specialize_on_alignment=["ids"],  # a slice of them begins at any multiple of 8 bytes
)
def _copy_pages(  # type: ignore[no-untyped-def]
    storage,
    buffer,
    table,
    ids,
    num_pages,
    num_layers,
    block_words,
    num_regions,
    TO_BUFFER: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All sizes and offsets are in words; every one of them, and both addresses, are multiples of VECTOR."""
    lanes = tl.arange(0, CHUNK)
    for index in range(tl.program_id(0).to(tl.int64), num_pages, tl.num_programs(0)):
        block = index // num_layers
        layer = index % num_layers
        # The last region that begins at this layer or before.
        at = num_regions * 0
        behind = num_regions
        while behind - at > 1:
            middle = (at + behind) // 2
            begins = tl.load(table + middle * 6) <= layer
            at = tl.where(begins, middle, at)
            behind = tl.where(begins, behind, middle)
        row = table + at * 6
        within = layer - tl.load(row)
        length = tl.load(row + 4)
        stored = tl.load(row + 1) + within * tl.load(row + 2) + tl.load(ids + block) * tl.load(row + 3)
        packed = block * block_words + tl.load(row + 5) + within * length
        stored = tl.multiple_of(stored, VECTOR)
        packed = tl.multiple_of(packed, VECTOR)
        length = tl.multiple_of(length, VECTOR)
        for start in range(0, length, CHUNK):
            inside = start + lanes < length
            if TO_BUFFER:
                words = tl.load(storage + stored + start + lanes, mask=inside)
                tl.store(buffer + packed + start + lanes, words, mask=inside)
            else:
                words = tl.load(buffer + packed + start + lanes, mask=inside)
                tl.store(storage + stored + start + lanes, words, mask=inside)


def copy_blocks(copy: PlannedCopy, max_sms: int) -> None:
    alignment = copy.alignment
    width = min(8, alignment)
    _copy_pages[(min(max_sms, copy.num_pages),)](
        _as_words(copy.storage, width),
        _as_words(copy.buffer, width),
        table_on(copy.layout, copy.storage.device, width),
        copy.ids_there,
        copy.num_pages,
        copy.layout.num_layers,
        copy.layout.bytes_per_block // width,
        len(copy.table),
        TO_BUFFER=copy.to_buffer,
        VECTOR=alignment // width,
        CHUNK=CHUNK_BYTES // width,
        num_warps=NUM_WARPS,
    )


def _as_words(memory: torch.Tensor, width: int) -> torch.Tensor:
    return memory[: memory.numel() // width * width].view(_WORDS[width])
