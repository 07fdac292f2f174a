# SPDX-License-Identifier: Apache-2.0
"""Mooncake as a network of `staged`: over RDMA or TCP."""

from __future__ import annotations

from typing import Final

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.mover.messages import PeerMemory
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine, MooncakeRead
from vllm_llumnix.kv.networks.staging import Slot
from vllm_llumnix.kv.transport.connections import CONNECT_SECONDS
from vllm_llumnix.wire.addresses import connect


class MooncakeNetwork:
    """Implements `staged.Network`. Places are segments: HOST:PORT, where Mooncake waits for handshakes."""

    name: Final = "mooncake"
    title: Final = "Mooncake"

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine

    def place_of(self, peer: PeerMemory) -> str:
        if peer.mooncake is None:
            raise TransportUnavailable("the source does not run Mooncake")
        return peer.mooncake

    def obstacle(self, peer: PeerMemory) -> str | None:
        segment = self.place_of(peer)
        try:
            connect(segment, CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            return f"the source's Mooncake cannot be reached at {segment}: {error}"
        return None

    def begin_read(self, peer: PeerMemory, slot: Slot, address: int, num_bytes: int) -> MooncakeRead:
        return self._engine.begin_read(self.place_of(peer), slot, address, num_bytes)

    def tidy(self) -> None:
        """Nothing: Mooncake's threads look after themselves."""
