# SPDX-License-Identifier: Apache-2.0
"""NIXL as a network of `staged`: over whatever UCX finds between two agents."""

from __future__ import annotations

import time
from typing import Final

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.mover.messages import GREETING_BYTES, NixlMemory, PeerMemory
from vllm_llumnix.kv.networks.nixl import NixlEngine, NixlRead
from vllm_llumnix.kv.networks.staging import SharedStagingArea, Slot

TRIAL_SECONDS: Final = 2.0
"""Seconds that the first read may take, for which UCX connects. Who asks waits for five in all."""
SLOT_SECONDS: Final = 0.5
TRIAL_POLL_SECONDS: Final = 1e-3


class NixlNetwork:
    """Implements `staged.Network`. Places are the names of agents."""

    name: Final = "nixl"
    title: Final = "NIXL"

    def __init__(self, engine: NixlEngine, area: SharedStagingArea) -> None:
        self._engine = engine
        self._area = area

    def place_of(self, peer: PeerMemory) -> str:
        return self._memory_of(peer).agent

    def obstacle(self, peer: PeerMemory) -> str | None:
        """Its greeting is read: that connects the two as well, for which no stream has to wait then."""
        memory = self._memory_of(peer)
        try:
            (slot,) = self._area.take(1, SLOT_SECONDS)
        except TransferFailed as error:
            raise TransportUnavailable(str(error)) from error
        read = self._engine.begin_read(memory, slot, 0, GREETING_BYTES)
        deadline = time.monotonic() + TRIAL_SECONDS
        while read.poll() is None and time.monotonic() < deadline:
            time.sleep(TRIAL_POLL_SECONDS)
        if (arrived := read.poll()) is None:
            self._area.quarantine(slot, lambda: read.poll() is not None)
            return f"NIXL has not read from {memory.agent} within {TRIAL_SECONDS:.0f} s"
        greeting = bytes(slot.memory[:GREETING_BYTES].numpy())
        self._area.give_back([slot])
        if not arrived:
            return f"NIXL could not read from {memory.agent}"
        return None if greeting == memory.greeting else f"NIXL reads another process than {memory.agent}"

    def begin_read(self, peer: PeerMemory, slot: Slot, address: int, num_bytes: int) -> NixlRead:
        return self._engine.begin_read(self._memory_of(peer), slot, address, num_bytes)

    def tidy(self) -> None:
        """Its process may have ended: somebody wants to know, and it has to be waited for."""
        self._engine.hear()

    def _memory_of(self, peer: PeerMemory) -> NixlMemory:
        self._engine.hear()
        if self._engine.problem is not None:
            raise TransportUnavailable(self._engine.problem)
        if peer.nixl is None:
            raise TransportUnavailable("the source does not run NIXL")
        return peer.nixl
