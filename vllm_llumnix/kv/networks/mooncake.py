# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine, as far as it is used here: one process reads a buffer of another's.

Nobody is authenticated: see `staging`. A read is enqueued by a helper thread, because the first contact with a peer
waits for it, and then looked after by whoever began it. A read that was given up may still write until `poll` says how
it ended, which can be never.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.mover.messages import PeerMemory
from vllm_llumnix.kv.transport.connections import CONNECT_SECONDS
from vllm_llumnix.wire.addresses import connect, with_port

if TYPE_CHECKING:
    from vllm_llumnix.kv.networks.staging import Slot

logger = logging.getLogger(__name__)

NUM_HELPERS: Final = 4
VARIABLES: Final = {
    "MC_LOG_LEVEL": "WARNING",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    # Whoever connects to a peer for the first time keeps everybody from connecting to any.
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
}
"""Mooncake's own settings, unless they are set."""
PROTOCOL_VARIABLES: Final = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
"""Mooncake takes RDMA where it finds a card and TCP elsewhere, whatever it is asked for, unless one of these is set."""
IPV6_VARIABLE: Final = "MC_USE_IPV6"
"""Variable without which Mooncake listens at IPv6 addresses and connects to none."""
_NO_BATCH: Final = (0, -1, 2**64 - 1)


def why_not_installed() -> str | None:
    """Reason why Mooncake cannot be loaded; None if nothing is, and then it is loaded."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return (
            f"Mooncake cannot be loaded ({error}): pip install vllm-llumnix[mooncake], "
            "and Debian's libibverbs1, librdmacm1, libnuma1, liburing2, libcurl4"
        )
    return None


class MooncakeEngine:
    """The engine of a process. `segment` is what peers call its registered memory."""

    def __init__(self, host: str, protocol: str, devices: str = "") -> None:
        """Raises TransportUnavailable, with what is missing."""
        if (problem := why_not_installed()) is not None:
            raise TransportUnavailable(problem)
        from mooncake.engine import TransferEngine

        for name, variable in PROTOCOL_VARIABLES.items():
            os.environ.pop(variable, None)
            if name == protocol:
                os.environ[variable] = "1"
        if ":" in host:
            os.environ[IPV6_VARIABLE] = "1"
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices) != 0:
            raise TransportUnavailable(f"Mooncake does not start at {host} with protocol {protocol!r}: see its log")
        self.segment = with_port(host, self._engine.get_rpc_port())
        self._registered: set[int] = set()
        self._helpers = ThreadPoolExecutor(NUM_HELPERS, thread_name_prefix="llumnix-mooncake")

    def register(self, address: int, num_bytes: int) -> None:
        """Let everybody read and write this memory. Raises TransportUnavailable."""
        if self._engine.register_memory(address, num_bytes) != 0:
            raise TransportUnavailable(f"Mooncake does not register {num_bytes} bytes: see its log")
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        """Memory that was registered: nobody reads or writes it any more."""
        self._registered.discard(address)
        self._engine.unregister_memory(address)

    def begin_read(self, segment: str, slot: Slot, source_address: int, num_bytes: int) -> MooncakeRead:
        """Copy from a peer's `source_address` to the start of `slot`."""
        submit = self._engine.batch_transfer_async_read
        batch = self._helpers.submit(submit, segment, [slot.address], [source_address], [num_bytes])
        return MooncakeRead(self._engine, batch, slot)

    def close(self) -> None:
        """Peers read nothing any more, and nothing is begun here. What is under way goes on."""
        for address in list(self._registered):
            self.unregister(address)
        self._helpers.shutdown(wait=False, cancel_futures=True)


class MooncakeRead:
    _under_way: ClassVar[set[MooncakeRead]] = set()
    """Batches under way: their buffers must not be freed, whoever has forgotten them."""

    def __init__(self, engine: Any, batch: Future[int], slot: Slot) -> None:
        self._engine = engine
        self._batch = batch
        self._slot = slot
        self._arrived: bool | None = None
        self._under_way.add(self)

    def cancel(self) -> bool:
        """True if it has not begun, and never will."""
        if cancelled := self._batch.cancel():
            self._under_way.discard(self)
        return cancelled

    def poll(self) -> bool | None:
        """True if all bytes have arrived; None while they are under way."""
        if self._arrived is None and self._batch.done():
            if self._batch.cancelled() or self._batch.exception() is not None or self._batch.result() in _NO_BATCH:
                self._arrived = False
            elif (status := self._engine.transfer_check_status(self._batch.result())) in (1, -1):
                self._arrived = status == 1
            if self._arrived is not None:
                self._under_way.discard(self)
        return self._arrived


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
