# SPDX-License-Identifier: Apache-2.0
"""Collect KV blocks of all layers into one buffer, and spread them again.

    num_bytes = gather(storage, layout, block_ids, buffer)
    num_bytes = scatter(storage, layout, block_ids, buffer)

`storage` is a worker's whole KV memory as a row of bytes (1-D, uint8), `layout` says where its pages lie, `buffer` is
a row of bytes on the same device. The buffer holds block after block, in the order of `block_ids`, and of each block
the pages of all layers, in the order of the layout's regions, without gaps:

    [ block_ids[0]: layer 0, layer 1, … | block_ids[1]: layer 0, layer 1, … | … ]

That order depends neither on the backend nor on whether layers or blocks are outermost in the storage, so a buffer
fits every layout for which `layout.require_same_pages` holds. Some of the blocks are a range of it, `bytes_per_block`
each: staging in turns is a matter of slicing `block_ids`.

Backends: `torch` is the reference. On "auto", the first of a device's that is there is taken:

    cpu     cpp (csrc/cpu), torch
    cuda    cuda (csrc/cuda), triton, torch
    others  torch

A call on the CPU returns when the bytes are there. On a GPU it returns when the copy is enqueued on torch's current
stream of that device; `block_ids` may be changed then, the tensors are used until the stream has got there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from vllm_llumnix.errors import ConfigError
from vllm_llumnix.kv.kernels import reference
from vllm_llumnix.kv.kernels.plan import BlockCopy, planned
from vllm_llumnix.kv.layout import BlockLayout, Ids

Backend: TypeAlias = Literal["auto", "torch"]


def gather(
    storage: torch.Tensor,
    layout: BlockLayout,
    block_ids: Sequence[int] | Ids,
    buffer: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> int:
    """Copy the named blocks to the start of `buffer`; returns the number of bytes. A block may be named twice.

    Raises ValueError before a byte is copied if anything does not fit, ConfigError if `backend` cannot be had.
    """
    return _copy(planned(storage, layout, block_ids, buffer, to_buffer=True), backend)


def scatter(
    storage: torch.Tensor,
    layout: BlockLayout,
    block_ids: Sequence[int] | Ids,
    buffer: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> int:
    """Copy the start of `buffer` to the named blocks; as `gather`, but a block named twice is a ValueError too."""
    return _copy(planned(storage, layout, block_ids, buffer, to_buffer=False), backend)


def _copy(copy: BlockCopy, backend: Backend) -> int:
    if backend not in get_args(Backend):
        raise ConfigError([f"{backend} is none of the block copy backends {', '.join(get_args(Backend))}"])
    reference.copy_blocks(copy)
    return copy.num_bytes
