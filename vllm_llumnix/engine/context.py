# SPDX-License-Identifier: Apache-2.0
"""The objects that all parts of one engine's llumlet share. They do not change while it lives."""

from __future__ import annotations

import dataclasses
import time

from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.engine.blocks.movers import Movers
from vllm_llumnix.engine.compatibility.identity import EngineIdentity
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.service.relay_sender import Forwarding, Relay
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.wire.peer_clients import PeerClients


@dataclasses.dataclass(frozen=True, slots=True)
class EngineContext:
    """The engine's configuration, identity, loop and memory, and its connections to peers and origins. Made on the
    llumlet's thread.

    `address`: where peers and API servers reach the llumlet. `credentials`: for these connections. `started_at`:
    seconds since the epoch.
    """

    config: LlumletConfig
    identity: EngineIdentity
    engine: Engine
    loop: EngineLoop
    movers: Movers
    relay: Relay
    peers: PeerClients
    adapters: Adapters
    forwarding: Forwarding
    credentials: Credentials
    address: Address
    started_at: float = dataclasses.field(default_factory=time.time)

    @property
    def weight_version(self) -> str:
        """vLLM's name of the weights that are loaded at this moment."""
        return str(self.engine.get_weight_version())

    @property
    def num_weight_changes(self) -> int:
        """See `Pauses.num_changes`."""
        return self.loop.pauses.num_changes

    def offered_memory(self, capability: bytes) -> bytes:
        """The place where the KV cache of this engine's workers lies, for a peer that will have blocks granted."""
        # A new name comes before its count of 0: read the other way round, 0 never goes with the old name.
        num_changes = self.num_weight_changes
        return self.movers.offer(self.identity.facts, capability, self.weight_version, num_changes)
