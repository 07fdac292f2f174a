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
each: staging in turns is a matter of slicing `block_ids`. `in_chunks` does it, also with parts of large blocks; ids
that are `Uploaded` go to the device once for all of them.

`torch` is the reference and works on every device. "auto" takes the first that can be had:

    cpu     cpp (csrc/cpu), torch
    cuda    cuda (csrc/cuda), triton, torch
    others  torch

`settle` carries each of them out once and takes the first that copies rightly; a worker does so before its first move.

A call on the CPU returns when the bytes are there. On a GPU it returns when the copy is enqueued on torch's current
stream of that device: `block_ids` may be changed then, the tensors are in use until the stream has got there.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from vllm_llumnix.errors import ConfigError
from vllm_llumnix.kv.kernels import native, reference, trial
from vllm_llumnix.kv.kernels.plan import BlockIds, Chunk, PlannedCopy, Uploaded, in_chunks, planned
from vllm_llumnix.kv.memory.layout import BlockLayout

__all__ = ["Backend", "Choice", "Chunk", "Uploaded", "gather", "in_chunks", "obstacle", "scatter", "settle", "why_not"]

logger = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "torch", "cpp", "cuda", "triton"]

NUM_THREADS = 1
"""Threads of a copy on a CPU, where it shares the cores with the model."""
MAX_SMS = 8
"""Multiprocessors of a GPU's hundred and more: the others stay with decoding."""

_PREFERRED: dict[str, tuple[Backend, ...]] = {"cpu": ("cpp", "torch"), "cuda": ("cuda", "triton", "torch")}

_settled: dict[torch.device, Backend] = {}
"""Backend that "auto" means on each device where it was tried."""


class Choice(NamedTuple):
    """The backend that "auto" chose on a device, and why backends before it were passed over."""

    backend: Backend
    passed_over: tuple[str, ...]


def settle(layout: BlockLayout, device: torch.device, max_sms: int = MAX_SMS) -> Choice:
    """Try the backends on `device` with pages like the layout's; from now on "auto" is the first that is right.

    Compiles whatever copies between `layout`, or a cut of it, and a buffer need to have compiled. One line in the log
    if a backend was passed over. `torch` is what the others are held to, and taken if they fail. Raises
    `torch.OutOfMemoryError` if the device has no memory to try them: that says nothing about a backend.
    """

    choice = _first(device, functools.partial(why_not, layout=layout, device=device, max_sms=max_sms))
    _settled[device] = choice.backend
    return choice


def why_not(backend: Backend, layout: BlockLayout, device: torch.device, max_sms: int = MAX_SMS) -> str | None:
    """Tries `backend` on `device` with pages like the layout's. Returns the fault, or None.
    Raises `torch.OutOfMemoryError`."""
    if backend == "torch":
        return None
    carry = functools.partial(_carry, backend, NUM_THREADS, max_sms)
    return obstacle(backend, device.type) or trial.why_not(carry, layout, device)


def gather(
    storage: torch.Tensor,
    layout: BlockLayout,
    block_ids: BlockIds,
    buffer: torch.Tensor,
    *,
    backend: Backend = "auto",
    num_threads: int = NUM_THREADS,
    max_sms: int = MAX_SMS,
) -> int:
    """Copy the named blocks to the start of `buffer`; returns the number of bytes. A block may be named twice.

    num_threads: how many threads `cpp` uses, the caller's included; max_sms: how many SMs `cuda` and `triton` occupy.
    Raises ValueError before a byte is copied if anything does not fit, ConfigError if `backend` cannot be had.
    """
    return _copy(planned(storage, layout, block_ids, buffer, to_buffer=True), backend, num_threads, max_sms)


def scatter(
    storage: torch.Tensor,
    layout: BlockLayout,
    block_ids: BlockIds,
    buffer: torch.Tensor,
    *,
    backend: Backend = "auto",
    num_threads: int = NUM_THREADS,
    max_sms: int = MAX_SMS,
) -> int:
    """Copy the start of `buffer` to the named blocks; as `gather`, but a block named twice is a ValueError too."""
    return _copy(planned(storage, layout, block_ids, buffer, to_buffer=False), backend, num_threads, max_sms)


def obstacle(backend: Backend, device: str) -> str | None:
    """Why `backend` cannot copy on a device of type `device`; None if it can."""
    found: object = None
    match backend:
        case "cpp":
            found = native.cpu() if device == "cpu" else "it copies in main memory only"
        case "cuda":
            found = native.cuda() if device == "cuda" else "it copies on CUDA devices only"
        case "triton":
            found = _triton_obstacle() if device == "cuda" or _interpreting() else "it copies on GPUs only"
    return found if isinstance(found, str) else None


def _copy(copy: PlannedCopy, backend: Backend, num_threads: int, max_sms: int) -> int:
    if num_threads < 1 or max_sms < 1:
        raise ValueError(f"{num_threads} threads, {max_sms} SMs: at least one of each is needed")
    device = copy.storage.device.type
    if backend == "auto":
        backend = _settled.get(copy.storage.device) or _chosen(device)
    elif backend not in get_args(Backend):
        raise ConfigError([f"{backend} is none of the block copy backends {', '.join(get_args(Backend))}"])
    elif missing := obstacle(backend, device):
        raise ConfigError([f"block copy backend {backend} on {device}: {missing}"])
    if copy.num_bytes:
        _carry(backend, num_threads, max_sms, copy)
    return copy.num_bytes


def _carry(backend: Backend, num_threads: int, max_sms: int, copy: PlannedCopy) -> None:
    match backend:
        case "cpp":
            native.copy_blocks_cpu(copy, num_threads)
        case "cuda":
            native.copy_blocks_cuda(copy, max_sms)
        case "triton":
            importlib.import_module("vllm_llumnix.kv.kernels.triton_copy").copy_blocks(copy, max_sms)
        case _:
            reference.copy_blocks(copy)


@functools.cache
def _chosen(device: str) -> Backend:
    """The first choice that can be had, where none was tried."""
    return _first(torch.device(device), lambda backend: obstacle(backend, device)).backend


def _first(device: torch.device, why_not: Callable[[Backend], str | None]) -> Choice:
    """The first backend against which nothing is said; one line in the log if others were passed over."""
    passed_over = []
    for backend in _PREFERRED.get(device.type, ("torch",)):
        why = why_not(backend)
        if why is None:
            break
        passed_over.append(f"{backend}: {why}")
    if passed_over:
        logger.warning("KV blocks on %s are copied by %s (%s)", device, backend, "; ".join(passed_over))
    return Choice(backend, tuple(passed_over))


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_obstacle() -> str | None:
    try:
        importlib.import_module("vllm_llumnix.kv.kernels.triton_copy")
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None
