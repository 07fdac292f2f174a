# SPDX-License-Identifier: Apache-2.0
"""Puts granted blocks where Mooncake can read them: the serving end of the `mooncake` transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.grants import Grants
from vllm_llumnix.kv.layout import BlockLayout
from vllm_llumnix.kv.messages import DEPTH, StageAnswer, StageRequest
from vllm_llumnix.kv.seal import Sealer
from vllm_llumnix.kv.staging import Slot, StagingArea, bytes_of, storage_of

PATIENCE_SECONDS: Final = 1.0
"""How long a pull waits for the buffers of others."""


class Stage:
    """What one connection has staged. Used by that connection's thread."""

    def __init__(self, layout: BlockLayout, area: StagingArea, grants: Grants, grant_seconds: float) -> None:
        self._layout = layout
        self._area = area
        self._grants = grants
        self._grant_seconds = grant_seconds
        self._slots: list[Slot] = []
        self._used: dict[Slot, int] = {}
        """How many bytes of them are filled, at the most."""
        self._storage = storage_of(layout)
        self._private = torch.empty(area.slot_bytes, dtype=torch.uint8)

    def fill(self, request: StageRequest, cut: Callable[[], None]) -> StageAnswer:
        num_bytes = len(request.blocks) * self._layout.bytes_per_block
        if num_bytes > self._area.slot_bytes:
            return StageAnswer(f"{num_bytes} bytes do not fit a buffer of {self._area.slot_bytes}")
        try:
            if not self._slots:
                self._slots = self._area.take(DEPTH, PATIENCE_SECONDS)
            # Not gathered in place: what lies there can be changed by anybody before it is sealed.
            granted = self._grants.reading(request.capability, request.blocks, cut, self._grant_seconds)
            with granted:
                kernels.gather(self._storage, self._layout, request.blocks, self._private)
        except (TransferFailed, ValueError) as error:
            return StageAnswer(str(error))
        slot, private = self._slots[request.slot], self._private[:num_bytes].numpy()
        self._used[slot] = max(num_bytes, self._used.get(slot, 0))
        np.copyto(bytes_of(slot, num_bytes), private)
        return StageAnswer(address=slot.address, seal=Sealer(request.key).seal(request.number, private))

    def clear(self) -> None:
        """The peer reads nothing more, and nobody else shall."""
        slots, self._slots = self._slots, []
        for slot, num_bytes in self._used.items():
            # By this thread alone: torch would wake a pool of its own, beside the model's.
            bytes_of(slot, num_bytes).fill(0)
        self._used.clear()
        self._area.give_back(slots)
