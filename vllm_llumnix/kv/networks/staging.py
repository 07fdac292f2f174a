# SPDX-License-Identifier: Apache-2.0
"""Buffers between KV memory and a network that reads and writes memory by itself.

Whoever can reach Mooncake's ports can read what is registered with it, and write to it; with NIXL, what the process has
that it runs in. So KV memory never is: blocks are gathered into a buffer of a `StagingArea` and scattered from one, and
nothing is believed for lying there.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.block_memory import BlockMemory, Blocks, CudaMemory, OnDevice
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.mover.messages import DEPTH, GREETING_BYTES, SealKind

SLOT_BYTES: Final = 4 << 20
"""Bytes of a buffer. Messages and waits between two buffers take as long as 1 MiB: `benchmarks/transport.py` moved 0.95
GB/s in buffers of 512 KiB, 1.4 of 2 MiB, 1.8 of 4 MiB, over loopback."""
AREA_BYTES: Final = 512 << 20
"""Bytes of the area at most, unless it is for the least number of pulls. What is not used is touched by RDMA only,
which pins it."""
GPU_AREA_BYTES: Final = 64 << 20
"""Bytes of an area on a GPU, of which vLLM leaves a tenth."""
MIN_PULLS: Final = 2
NUM_PULLS: Final = 4
"""An engine's default."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A buffer: a row of bytes, which the network finds at `address`."""

    memory: torch.Tensor
    address: int


class StagingArea:
    """Buffers in main memory. Thread-safe. `slot_bytes` hold a block at least; there are buffers for `num_pulls` at a
    time, or for as many as `area_bytes` hold: further ones wait."""

    seal: SealKind = "gmac"
    """Kind of seal that is fastest for bytes here."""

    def __init__(
        self,
        layout: BlockLayout,
        num_pulls: int = NUM_PULLS,
        slot_bytes: int = SLOT_BYTES,
        area_bytes: int = AREA_BYTES,
    ) -> None:
        self.slot_bytes = -(-max(slot_bytes, layout.bytes_per_block) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_slots = DEPTH * max(MIN_PULLS, min(num_pulls, area_bytes // (DEPTH * self.slot_bytes)))
        self.num_bytes = num_slots * self.slot_bytes
        self._bytes = self._area(self.num_bytes)
        self.address = self._bytes.data_ptr()
        slots = self._bytes.split(self.slot_bytes)
        self._free = [Slot(memory, self._place_of(memory)) for memory in slots]
        self._quarantined: list[tuple[Slot, Callable[[], bool]]] = []
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def take(self, count: int, patience_s: float = 0.0) -> list[Slot]:
        """Raises TransferFailed when there are not so many for so long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._there_are(count), patience_s):
                raise TransferFailed(
                    f"{count} staging buffers are needed, {len(self._free)} are free "
                    f"and {len(self._quarantined)} may still be written to"
                )
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, slots: list[Slot]) -> None:
        with self._changed:
            self._free = slots + self._free  # those that the cache holds first
            self._changed.notify_all()

    def quarantine(self, slot: Slot, is_over: Callable[[], bool]) -> None:
        """Give back a buffer that is written to until `is_over`."""
        with self._changed:
            self._quarantined.append((slot, is_over))

    def blocks_of(self, memory: BlockMemory) -> Blocks:
        """Blocks that gather into buffers here, and scatter from them."""
        return memory

    def private(self) -> torch.Tensor:
        """A further buffer, which nobody else reaches."""
        return self._zeros(self.slot_bytes)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        # By this thread alone: torch would wake a pool of its own, beside the model's.
        np.copyto(destination.numpy(), source.numpy())

    def wipe(self, content: torch.Tensor) -> None:
        content.numpy().fill(0)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """A context for whoever computes with the content of buffers."""
        return contextlib.nullcontext()

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)

    def _area(self, num_bytes: int) -> torch.Tensor:
        return self._zeros(num_bytes)

    def _place_of(self, memory: torch.Tensor) -> int:
        return int(memory.data_ptr())

    def _there_are(self, count: int) -> bool:
        if len(self._free) < count:
            over = [entry for entry in self._quarantined if entry[1]()]
            self._quarantined = [entry for entry in self._quarantined if entry not in over]
            self._free += [slot for slot, _ in over]
        return len(self._free) >= count


class SharedStagingArea(StagingArea):
    """Buffers in a memory file that another process of ours maps as well, with a greeting before them by which a peer
    that reads it knows that it reads this. The addresses of slots count from the beginning of the file.

    Nobody can make the file shorter: the process that has it is not trusted with ours.
    """

    fd: int
    greeting: bytes

    def close(self) -> None:
        """The mapping stays, the descriptor does not."""
        os.close(self.fd)

    def _area(self, num_bytes: int) -> torch.Tensor:
        self.fd = os.memfd_create("llumnix-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE + num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        file = mmap.mmap(self.fd, mmap.PAGESIZE + num_bytes)
        self.greeting = secrets.token_bytes(GREETING_BYTES)
        file[:GREETING_BYTES] = self.greeting
        return torch.frombuffer(file, dtype=torch.uint8, offset=mmap.PAGESIZE)

    def _place_of(self, memory: torch.Tensor) -> int:
        return int(memory.data_ptr() - self.address + mmap.PAGESIZE)


class GpuStagingArea(StagingArea):
    """Buffers on the GPU, where a network card reads and writes it (GPUDirect RDMA): nothing goes through main memory.

    Unproven: it has not run on one. A card's writes that a kernel does not see yet would break the seal, no more.
    """

    seal = "multilinear"

    def __init__(
        self,
        memory: CudaMemory,
        num_pulls: int = NUM_PULLS,
        slot_bytes: int = SLOT_BYTES,
        area_bytes: int = GPU_AREA_BYTES,
    ) -> None:
        self._memory = memory
        super().__init__(memory.layout, num_pulls, slot_bytes, area_bytes)

    def blocks_of(self, memory: BlockMemory) -> Blocks:
        return OnDevice(self._memory)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with self.at_work():
            destination.copy_(source)

    def wipe(self, content: torch.Tensor) -> None:
        with self.at_work():
            content.zero_()

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        return self._memory.at_work()

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        with self.at_work():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._memory.device)
