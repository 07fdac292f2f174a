# SPDX-License-Identifier: Apache-2.0
"""Buffers between KV memory and a network that reads and writes memory by itself.

Whoever can reach Mooncake's ports can read what is registered with it, and write to it. So KV memory never is: blocks
are gathered into a buffer of a `StagingArea` and scattered from one, and nothing is believed for lying there.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.layout import BlockLayout
from vllm_llumnix.kv.messages import DEPTH

SLOT_BYTES: Final = 4 << 20
"""What is said and waited for between buffers takes as long as 1 MiB: `benchmarks/transport.py` moved 0.95 GB/s in
buffers of 512 KiB, 1.4 of 2 MiB, 1.8 of 4 MiB, over loopback."""
AREA_BYTES: Final = 512 << 20
"""At most, unless it is for the least number of pulls. What is not used is touched by RDMA only, which pins it."""
MIN_PULLS: Final = 2
NUM_PULLS: Final = 4
"""An engine's default."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One buffer: a row of bytes, at `address`."""

    memory: torch.Tensor
    address: int


class StagingArea:
    """Thread-safe. `slot_bytes` hold a block at least; there are buffers for `num_pulls` at a time, or for as many as
    `area_bytes` hold: further ones wait.
    """

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
        self._bytes = torch.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        slots = self._bytes.split(self.slot_bytes)
        self._free = [Slot(memory, memory.data_ptr()) for memory in slots]
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

    def _there_are(self, count: int) -> bool:
        if len(self._free) < count:
            over = [entry for entry in self._quarantined if entry[1]()]
            self._quarantined = [entry for entry in self._quarantined if entry not in over]
            self._free += [slot for slot, _ in over]
        return len(self._free) >= count


def bytes_of(slot: Slot, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The first of them, without a copy."""
    row: npt.NDArray[np.uint8] = slot.memory[:num_bytes].numpy()
    return row
