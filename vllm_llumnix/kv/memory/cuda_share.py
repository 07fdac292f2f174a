# SPDX-License-Identifier: Apache-2.0
"""KV memory of a GPU, mapped by another process on the same host: CUDA IPC, as torch does it for its own processes.

Unproven: it has not run on a GPU yet.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.mover.messages import CudaShare

EVENT_BYTES: Final = 64
_HANDLE: Final = re.compile(rb"(.?c)?.{64}", re.DOTALL)
"""CUDA's, of one allocation. Before it, releases of torch write nothing, the letter of its kind, or a version too."""
_COUNTER: Final = re.compile(rb"/torch_(\d{1,10})_\d{1,20}(_\d{1,20})?")
_NUM_COUNTERS: Final = 10_000
"""CUDA_IPC_REF_COUNTER_FILE_SIZE of torch/csrc/CudaIPCTypes.h."""
_MAX_GPU_CHARACTERS: Final = 64
_END: Final = 2**63


def share(storage: torch.UntypedStorage) -> CudaShare:
    """Let other processes of this host map `storage`. Raises TransportUnavailable.

    Not every allocation can be exported: those of vLLM's sleep mode cannot. Expandable segments are not, because
    whoever maps them takes file descriptors from any process that their handle names.
    """
    shared: Any = storage
    try:
        _, handle, num_bytes, offset, counter, counter_offset, event, event_required = shared._share_cuda_()
    except RuntimeError as error:
        raise TransportUnavailable(f"this GPU memory cannot be exported to other processes: {error}") from error
    if _HANDLE.fullmatch(handle) is None:
        raise TransportUnavailable("this GPU memory consists of expandable segments (PYTORCH_CUDA_ALLOC_CONF)")
    return CudaShare(
        gpu=str(torch.cuda.get_device_properties(storage.device).uuid),
        handle=handle,
        num_bytes=num_bytes,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_required=event_required,
    )


def require_plausible(shared: CudaShare, pid: int, storage_bytes: int) -> None:
    """Raise TransportUnavailable unless this is how process `pid` shares `storage_bytes` bytes.

    torch checks nothing of it: it reads handles of a fixed size wherever they end, opens the file of counters whatever
    its name, and when the memory is let go of it counts down at any place of that file or beyond.
    """
    counter = _COUNTER.fullmatch(shared.counter)
    for what, is_right in {
        "the GPU's name": len(shared.gpu) <= _MAX_GPU_CHARACTERS,
        "the handle": _HANDLE.fullmatch(shared.handle) is not None,
        "the size": shared.num_bytes == storage_bytes > 0,
        "the offset": 0 <= shared.offset < _END - shared.num_bytes,
        "the counter's name": counter is not None and int(counter[1]) == pid,
        "the counter's place": 0 <= shared.counter_offset < _NUM_COUNTERS,
        "the event": len(shared.event) == EVENT_BYTES,
    }.items():
        if not is_right:
            raise TransportUnavailable(f"the source describes GPU memory that cannot be: {what}")


def mapped(shared: CudaShare, device: torch.device) -> torch.Tensor:
    """The peer's storage as a row of bytes, as seen from `device`. Raises TransportUnavailable, TransferFailed."""
    there = _device_of(shared.gpu)
    if there != device and not torch.cuda.can_device_access_peer(device, there):
        raise TransportUnavailable(f"{device} has no access to the source's GPU {there}")
    constructor: Any = torch.UntypedStorage
    try:
        storage = constructor._new_shared_cuda(
            # Mapped into our own device's address space, from where its kernels reach it.
            device.index,
            shared.handle,
            shared.num_bytes,
            shared.offset,
            shared.counter,
            shared.counter_offset,
            shared.event,
            shared.event_required,
        )
    except (RuntimeError, SystemError) as error:
        raise TransferFailed(f"the source's GPU memory cannot be mapped: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device_of(gpu: str) -> torch.device:
    """The device by the GPU's own name: the numbers of processes differ with what they see."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return torch.device("cuda", index)
    raise TransportUnavailable(f"this process does not see the source's GPU {gpu}")
