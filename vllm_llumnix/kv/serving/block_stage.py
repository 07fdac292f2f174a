# SPDX-License-Identifier: Apache-2.0
"""Puts granted blocks where a network can read them: the serving end of `transport.staged`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.block_memory import BlockMemory
from vllm_llumnix.kv.mover.messages import DEPTH, NetworkName, StageAnswer, StageRequest
from vllm_llumnix.kv.networks.seal import new_key, sealer
from vllm_llumnix.kv.networks.staging import Slot, StagingArea
from vllm_llumnix.kv.serving.grants import Grants

PATIENCE_SECONDS: Final = 4.0
"""Seconds that a pull waits for the buffers of others; it gives up itself only a little later."""


class Stage:
    """Blocks that one connection has staged. Used by that connection's thread.

    They are on their way in the sense of `Grants`: whoever revokes the grant waits until it is cleared.
    """

    def __init__(
        self, memory: BlockMemory, network: NetworkName, area: StagingArea, grants: Grants, grant_seconds: float
    ) -> None:
        self.network = network
        self._blocks = area.blocks_of(memory)
        self._area = area
        self._grants = grants
        self._grant_seconds = grant_seconds
        self._slots: list[Slot] = []
        self._used: dict[Slot, int] = {}
        """Most bytes of each slot that have been filled."""
        self._readings: defaultdict[Slot, contextlib.ExitStack] = defaultdict(contextlib.ExitStack)
        self._private = area.private()
        self._sealed_with = area.seal, new_key()
        """The seal of the pull that is under way."""
        self._sealer = sealer(*self._sealed_with)

    @property
    def holds_buffers(self) -> bool:
        return bool(self._slots)

    def fill(self, request: StageRequest, cut: Callable[[], None]) -> StageAnswer:
        """`cut` ends the connection, and has to make its thread `clear` soon."""
        try:
            blocks = self._blocks.cut(request.cut)
        except ValueError as error:
            return StageAnswer(str(error))
        num_bytes = len(request.blocks) * blocks.layout.bytes_per_block
        if num_bytes > self._area.slot_bytes:
            return StageAnswer(f"{num_bytes} bytes do not fit a buffer of {self._area.slot_bytes}")
        try:
            if not self._slots:
                self._slots = self._area.take(DEPTH, PATIENCE_SECONDS)
            slot = self._slots[request.slot]
            with contextlib.ExitStack() as reading:
                reading.enter_context(
                    self._grants.reading(request.capability, request.blocks, cut, self._grant_seconds)
                )
                # Not gathered in place: what lies there can be changed by anybody before it is sealed.
                blocks.gather(request.blocks, self._private)
                private = self._private[:num_bytes]
                self._used[slot] = max(num_bytes, self._used.get(slot, 0))
                self._area.copy(private, slot.memory[:num_bytes])
                # What was there before is on its way no more.
                self._readings[slot].close()
                self._readings[slot] = reading.pop_all()
        except (TransferFailed, ValueError) as error:
            if not self._used:
                self.clear()
            return StageAnswer(str(error))
        if (request.kind, request.key) != self._sealed_with:
            self._sealed_with = request.kind, request.key
            self._sealer = sealer(*self._sealed_with)
        with self._area.at_work():
            seal = self._sealer.seal(request.number, private)
        return StageAnswer(address=slot.address, seal=seal)

    def clear(self) -> None:
        """The peer reads nothing more, and nobody else shall."""
        slots, self._slots = self._slots, []
        for slot, num_bytes in self._used.items():
            self._area.wipe(slot.memory[:num_bytes])
        self._used.clear()
        for reading in self._readings.values():
            reading.close()
        self._readings.clear()
        self._area.give_back(slots)
