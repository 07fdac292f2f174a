# SPDX-License-Identifier: Apache-2.0
"""Read the blocks of a worker anywhere by way of a network that reads and writes memory by itself.

The source gathers blocks into a staging buffer and says over the block server's connection where it lies and what its
seal is; the network brings the buffer here; if the seal is right, its blocks are scattered into our KV memory. Several
buffers are under way at a time, each in another of these phases. Everything that networks
share is here; `networks.mooncake` and `networks.nixl` have the rest.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from typing import Final, Protocol

import torch

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.block_memory import BlockMemory, Blocks
from vllm_llumnix.kv.memory.layout import WHOLE, Cuts, require_pairs, require_same_pages
from vllm_llumnix.kv.mover.messages import DEPTH, NetworkName, PeerMemory, Pull, StageRequest, decode_stage_answer
from vllm_llumnix.kv.networks.seal import new_key, sealer
from vllm_llumnix.kv.networks.staging import Slot, StagingArea
from vllm_llumnix.kv.transport.base import STALL_SECONDS, TURN_SECONDS
from vllm_llumnix.kv.transport.connections import Connections, readable, receive, require_served, send

STUCK_SECONDS: Final = 1.0
"""A read that takes so long speaks against the network, however its pull ends."""
POLL_SECONDS: Final = 50e-6
SLOTS_SECONDS: Final = 1e-3
"""Seconds that the mover waits for buffers before it turns to others."""


class Read(Protocol):
    def cancel(self) -> bool:
        """True if it has not begun, and never will."""

    def poll(self) -> bool | None:
        """True if all bytes have arrived; None while they are under way, and may still be written."""


class Network(Protocol):
    """A network that reads a buffer of a peer's into one of ours. Thread-safe.

    name: its transport's, and a source's name of its staging area. title: its name for people.
    """

    @property
    def name(self) -> NetworkName: ...

    @property
    def title(self) -> str: ...

    def place_of(self, peer: PeerMemory) -> str:
        """The name of the peer in this network. Raises TransportUnavailable if it has none, or if we do not."""

    def obstacle(self, peer: PeerMemory) -> str | None:
        """Reason why we cannot read the peer, found out by trying: by connecting, or by a read."""

    def begin_read(self, peer: PeerMemory, slot: Slot, address: int, num_bytes: int) -> Read:
        """Copy from `address`, as the peer's slots have it, to the start of `slot`."""

    def tidy(self) -> None:
        """Called from time to time, also when nothing is read."""


class StagedTransport:
    """Implements `base.Transport` for peers that are found in `network`. `memory` is our own.

    `area`: into which peers' buffers are read.
    """

    asks_peers = True

    def __init__(
        self,
        memory: BlockMemory,
        network: Network,
        area: StagingArea,
        connections: Connections,
        *,
        exposed: bool = False,
    ) -> None:
        """`exposed`: others can write to `area` at any time, as with RDMA, and not the network's own reads only."""
        self.name = network.name
        self.network = network
        self._blocks = area.blocks_of(memory)
        self._private = area.private() if exposed else None
        self._area = area
        self.connections = connections
        self.obstacles = Obstacles()

    def probe(self, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        require_served(peer)
        place = self.network.place_of(peer)
        self.connections.probe(self._blocks.layout, peer, cuts)
        self.obstacles.require_none(place, functools.partial(self.network.obstacle, peer))

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        peer = pull.peer
        blocks = self._blocks.cut(pull.cuts.destination)
        require_same_pages(blocks.layout, peer.layout.cut(pull.cuts.source))
        require_pairs(pull.src_blocks, pull.dst_blocks)
        require_served(peer)
        place, title = self.network.place_of(peer), self.network.title
        slots = yield from self._slots()
        reading = None
        try:
            reading = _Reading(self, pull, blocks, place, slots, chunk_bytes)
            yield from reading.run()
        except OSError as error:
            raise TransferFailed(f"{peer.tcp}: {error}") from error
        except _ReadFailed as error:
            self.obstacles.remember(place, str(error))
            raise
        finally:
            if reading is not None:
                if reading.is_stuck:
                    self.obstacles.remember(place, f"{title} has lately not come to an end of reading from {place}")
                reading.leave()
            else:
                self._area.give_back(slots)

    def _slots(self) -> Generator[int, None, list[Slot]]:
        """Buffers of one pull, as soon as others have given so many back: for the most part pulls of this same thread,
        which must have their turns."""
        while True:
            with contextlib.suppress(TransferFailed):
                return self._area.take(DEPTH, SLOTS_SECONDS)
            yield 0

    def settled(self, slot: Slot, num_bytes: int) -> torch.Tensor:
        """Bytes that lie in a buffer now, and that nobody changes any more. Valid until the next call."""
        if self._private is None:
            return slot.memory[:num_bytes]
        content = self._private[:num_bytes]
        self._area.copy(slot.memory[:num_bytes], content)
        return content

    def tidy(self) -> None:
        self.connections.tidy()
        self.network.tidy()

    def close(self) -> None:
        self.connections.close()


class _ReadFailed(TransferFailed):
    """A read by the network that did not bring what the source has staged."""


class _Reading:
    """The buffers of one pull, by number: requested of the source, read, and done with."""

    def __init__(
        self,
        transport: StagedTransport,
        pull: Pull,
        blocks: Blocks,
        place: str,
        slots: list[Slot],
        chunk_bytes: int,
    ) -> None:
        self._transport = transport
        self._pull = pull
        self._blocks = blocks
        self._place = place
        self._slots = slots
        self._key = new_key()
        self._sealer = sealer(transport._area.seal, self._key)
        step = max(1, min(chunk_bytes, transport._area.slot_bytes) // blocks.layout.bytes_per_block)
        self._parts = [
            (pull.src_blocks[at : at + step], pull.dst_blocks[at : at + step])
            for at in range(0, len(pull.src_blocks), step)
        ]
        self._requested = 0
        self._reads: deque[tuple[int, Read, bytes]] = deque()
        self._answered = 0
        self._finished = 0
        self._since = time.monotonic()
        """The time at which something came last."""
        self._connection: socket.socket | None = transport.connections.take(pull.peer)

    def run(self) -> Iterator[int]:
        """Yields the bytes of each buffer, 0 when none has come for a while."""
        self._since = turn = time.monotonic()
        arrived = 0
        while self._finished < len(self._parts):
            self._request()
            self._listen(0.0 if arrived else POLL_SECONDS)
            arrived = self._take()
            now = time.monotonic()
            if arrived:
                yield arrived
                self._since = turn = time.monotonic()
            elif now - self._since > STALL_SECONDS:
                raise TransferFailed(f"nothing has come for {STALL_SECONDS:.0f} s")
            elif now - turn > TURN_SECONDS:
                yield 0
                # While others have their turn, nothing is looked for.
                turn = time.monotonic()
                self._since += turn - now
        self._part()

    @property
    def is_stuck(self) -> bool:
        """True if it is the network's turn, and has been for long."""
        return bool(self._reads) and time.monotonic() - self._since > STUCK_SECONDS

    def leave(self) -> None:
        """Whatever has happened: keep buffers that the network may still write to."""
        transport = self._transport
        under_way = {number % DEPTH: read for number, read, _ in self._reads if not read.cancel()}
        for index, read in under_way.items():
            transport._area.quarantine(self._slots[index], functools.partial(_is_over, read))
        transport._area.give_back([slot for index, slot in enumerate(self._slots) if index not in under_way])
        if self._connection is not None:
            self._connection.close()

    def _request(self) -> None:
        """Have the source fill every buffer that is free."""
        assert self._connection is not None
        while self._requested < min(len(self._parts), self._finished + DEPTH):
            number = self._requested
            blocks = self._parts[number][0]
            send(self._connection, self._question(blocks, number))
            self._requested += 1

    def _listen(self, patience_s: float) -> None:
        """Begin to read what the source has filled; if it has filled nothing, wait for so long."""
        assert self._connection is not None
        if self._answered == self._requested or not readable([self._connection]):
            time.sleep(patience_s)
            return
        answer = receive(self._connection, decode_stage_answer)
        if answer.error is not None:
            raise TransferFailed(answer.error)
        number = self._answered
        slot, num_bytes = self._slots[number % DEPTH], self._num_bytes(number)
        read = self._transport.network.begin_read(self._pull.peer, slot, answer.address, num_bytes)
        self._reads.append((number, read, answer.seal))
        self._answered += 1

    def _take(self) -> int:
        """Scatter the first buffer that is under way, if it has come."""
        if not self._reads:
            return 0
        number, read, seal = self._reads[0]
        arrived = read.poll()
        if arrived is None:
            return 0
        self._reads.popleft()
        if not arrived:
            raise _ReadFailed(f"{self._transport.network.title} could not read from {self._place}")
        transport, num_bytes = self._transport, self._num_bytes(number)
        content = transport.settled(self._slots[number % DEPTH], num_bytes)
        with transport._area.at_work():
            intact = self._sealer.is_intact(number, content, seal)
        if not intact:
            title = transport.network.title
            raise _ReadFailed(f"what {title} read from {self._place} is not what was to be read")
        self._blocks.scatter(self._parts[number][1], content)
        self._finished += 1
        return num_bytes

    def _part(self) -> None:
        """The source's buffers are free; the connection can be used again."""
        assert self._connection is not None
        send(self._connection, self._question([], 0))
        self._transport.connections.keep(self._pull.peer, self._connection)
        self._connection = None

    def _question(self, blocks: list[int], number: int) -> StageRequest:
        return StageRequest(
            nonce=self._pull.peer.nonce,
            capability=self._pull.capability,
            blocks=blocks,
            slot=number % DEPTH,
            key=self._key,
            number=number,
            final=self._pull.final,
            kind=self._transport._area.seal,
            network=self._transport.name,
            cut=self._pull.cuts.source,
        )

    def _num_bytes(self, number: int) -> int:
        return len(self._parts[number][0]) * self._blocks.layout.bytes_per_block


def _is_over(read: Read) -> bool:
    return read.poll() is not None


REMEMBERED_SECONDS: Final = 60.0
"""Seconds for which an answer counts: peers' Mooncake logs every connection on which it is asked nothing."""
MAX_PLACES: Final = 256


class Obstacles:
    """Thread-safe. A place is what a peer is called in the network."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()

    def require_none(self, place: str, look: Callable[[], str | None]) -> None:
        """`look` tries, if nobody has lately. Raises TransportUnavailable."""
        with self._lock:
            until, obstacle = self._known.get(place, (0.0, None))
        if self._clock() >= until:
            obstacle = look()
            self.remember(place, obstacle)
        if obstacle is not None:
            raise TransportUnavailable(obstacle)

    def remember(self, place: str, obstacle: str | None) -> None:
        """Remembers for some time why it cannot be read; None: it can."""
        with self._lock:
            self._known[place] = (self._clock() + REMEMBERED_SECONDS, obstacle)
            self._known.move_to_end(place)
            if len(self._known) > MAX_PLACES:
                self._known.popitem(last=False)
