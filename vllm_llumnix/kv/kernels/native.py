# SPDX-License-Identifier: Apache-2.0
"""The compiled forms: libraries with a C interface that `setup.py` puts beside this file.

They know neither Python nor torch, so one build serves every version of both, and a call releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vllm_llumnix.kv.kernels.plan import PlannedCopy, table_on

DIRECTORY = Path(__file__).parent
SCATTER_STREAMING_FROM = 4096
"""Smaller pages go through the caches. From here on, past them was 7 to 52 % faster (`benchmarks/block_copy.py`)."""
GATHER_STREAMING_FROM = 1 << 62
"""Never: a buffer is read again at once, to be sealed and sent. From the caches, all of that took a third less time."""

Entry: TypeAlias = Callable[..., int]


class _BlockCopy(ctypes.Structure):
    """`struct PlannedCopy` of csrc/block_pages.h."""

    _fields_ = [
        ("storage", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("num_regions", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("to_buffer", ctypes.c_int64),
    ]


def arguments(copy: PlannedCopy, regions: int, ids: int) -> ctypes.Structure:
    """The copy, with the addresses of its table and ids where the kernel can read them."""
    return _BlockCopy(
        storage=copy.storage.data_ptr(),
        buffer=copy.buffer.data_ptr(),
        regions=regions,
        ids=ids,
        num_regions=len(copy.table),
        num_blocks=len(copy.ids),
        num_layers=copy.layout.num_layers,
        block_bytes=copy.layout.bytes_per_block,
        to_buffer=copy.to_buffer,
    )


@functools.cache
def cpu() -> Entry | str:
    """The entry of csrc/cpu, or why it cannot be had."""
    return _entry("_cpu.so", "llumnix_copy_blocks_cpu_1", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64])


@functools.cache
def cuda() -> Entry | str:
    """The entry of csrc/cuda, or why it cannot be had."""
    return _entry("_cuda.so", "llumnix_copy_blocks_cuda_1", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p])


def copy_blocks_cpu(copy: PlannedCopy, num_threads: int) -> None:
    entry = cpu()
    assert not isinstance(entry, str)
    table, ids = copy.table, copy.ids
    streaming_from = GATHER_STREAMING_FROM if copy.to_buffer else SCATTER_STREAMING_FROM
    entry(ctypes.byref(arguments(copy, table.ctypes.data, ids.ctypes.data)), num_threads, streaming_from)


def copy_blocks_cuda(copy: PlannedCopy, max_sms: int) -> None:
    entry = cuda()
    assert not isinstance(entry, str)
    device = copy.storage.device
    with torch.cuda.device(device):
        table, ids = table_on(copy.layout, device), copy.ids_there
        stream = torch.cuda.current_stream(device).cuda_stream
        # `ids` may be forgotten when this returns: they were uploaded on this stream, or `ids_there` has recorded it.
        error = entry(ctypes.byref(arguments(copy, table.data_ptr(), ids.data_ptr())), max_sms, stream)
    if error:
        raise RuntimeError(f"the block copy was not launched: CUDA error {error}")


def _entry(library: str, name: str, arguments: list[type]) -> Entry | str:
    path = DIRECTORY / library
    if not path.exists():
        return f"{library} was not built when this package was installed"
    try:
        entry: Any = getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError) as error:
        return f"{library} does not fit this system or package: {error}"
    entry.argtypes, entry.restype = arguments, ctypes.c_int
    found: Entry = entry
    return found
