# SPDX-License-Identifier: Apache-2.0
"""The copy in torch's own operations, on any device: what the other backends are held to."""

from __future__ import annotations

from vllm_llumnix.kv.kernels.plan import PlannedCopy


def copy_blocks(copy: PlannedCopy) -> None:
    ids = copy.ids_there
    packed = copy.buffer[: copy.num_bytes].view(len(copy.ids), copy.layout.bytes_per_block)
    first = 0
    for region in copy.layout.regions:
        pages = copy.storage.as_strided(
            (copy.layout.num_blocks, region.num_layers, region.page_bytes),
            (region.block_stride, region.layer_stride, 1),
            copy.storage.storage_offset() + region.offset,
        )
        stop = first + region.num_layers * region.page_bytes
        columns = packed[:, first:stop].unflatten(1, (region.num_layers, region.page_bytes))
        if copy.to_buffer:
            columns.copy_(pages.index_select(0, ids))
        else:
            pages.index_copy_(0, ids, columns)
        first = stop
