# SPDX-License-Identifier: Apache-2.0
"""Read the blocks of a worker anywhere: its block server sends them over TCP.

The bytes go from the source's KV memory into the socket and from the socket into ours: only the kernel copies. From a
GPU's memory, and into it, they go by way of main memory: see `bounce`. A large pull is spread over several connections.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.block_memory import BlockMemory, Transfer
from vllm_llumnix.kv.memory.layout import WHOLE, Cuts, require_pairs, require_same_pages
from vllm_llumnix.kv.mover.messages import BlockRequest, PeerMemory, Pull, decode_block_answer
from vllm_llumnix.kv.transport.base import STALL_SECONDS, TURN_SECONDS
from vllm_llumnix.kv.transport.connections import Connections, readable, receive, require_granted, require_served, send

MAX_STREAMS: Final = 4
BYTES_PER_STREAM: Final = 4 << 20
"""A pull of less than twice this is not spread."""


class TcpTransport:
    """Implements `base.Transport` for peers with a block server. `memory` is our own."""

    name = "tcp"
    asks_peers = True

    def __init__(self, memory: BlockMemory, tls: ssl.SSLContext | None = None) -> None:
        self._memory = memory
        self.connections = Connections(tls)

    def probe(self, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        self.connections.probe(self._memory.layout, peer, cuts)

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        peer = pull.peer
        require_served(peer)
        memory = self._memory.cut(pull.cuts.destination)
        require_same_pages(memory.layout, peer.layout.cut(pull.cuts.source))
        require_pairs(pull.src_blocks, pull.dst_blocks)
        layers_outermost = memory.layers_outermost
        parts = list(_parts(len(pull.src_blocks), memory.layout.bytes_per_block))
        asked: list[socket.socket] = []
        streams: list[_Stream] = []
        try:
            for part in parts:
                asked.append(self.connections.take(peer))
                wanted = pull.src_blocks[part]
                question = BlockRequest(
                    peer.nonce, pull.capability, wanted, layers_outermost, pull.final, pull.cuts.source
                )
                send(asked[-1], question)
            # Nothing is written after the iterator has ended, however it ends.
            with contextlib.ExitStack() as spans:
                # Planned while the source does the same.
                for connection, part in zip(asked, parts, strict=True):
                    span = memory.transfer(pull.dst_blocks[part], layers_outermost)
                    spans.callback(span.close)
                    streams.append(_Stream(connection, span))
                yield from _receive_all(streams, chunk_bytes)
        except OSError as error:
            raise TransferFailed(f"{peer.tcp}: {error}") from error
        finally:
            done = {stream.connection for stream in streams if stream.done}
            for connection in asked:
                if connection in done:
                    self.connections.keep(peer, connection)
                else:
                    connection.close()

    def tidy(self) -> None:
        self.connections.tidy()

    def close(self) -> None:
        self.connections.close()


def _parts(num_blocks: int, bytes_per_block: int) -> Iterator[slice]:
    """Shares of a pull, one a connection."""
    count = max(1, min(MAX_STREAMS, num_blocks, num_blocks * bytes_per_block // BYTES_PER_STREAM))
    for index in range(count):
        part = slice(num_blocks * index // count, num_blocks * (index + 1) // count)
        if part.start < part.stop:
            yield part


@dataclass(eq=False, slots=True)
class _Stream:
    """A connection's share of a pull."""

    connection: socket.socket
    span: Transfer
    granted: bool = False
    done: bool = False

    def receive(self, max_bytes: int) -> int:
        """Receives what has come; the first and the last message, which are short, are waited for."""
        if not self.granted:
            if not readable([self.connection]):
                return 0
            require_granted(receive(self.connection, decode_block_answer))
            self.granted = True
            self.connection.setblocking(False)
        received = self.span.receive(self.connection, max_bytes) if self.span.left else 0
        if not self.span.left:
            require_granted(receive(self.connection, decode_block_answer))
            self.done = True
        return received


def _receive_all(streams: list[_Stream], chunk_bytes: int) -> Iterator[int]:
    """Yields what comes, a chunk a turn; 0 when nothing has come for a while."""
    since = time.monotonic()
    while waiting := [stream for stream in streams if not stream.done]:
        received = 0
        for stream in waiting:
            received += stream.receive(chunk_bytes - received)
            if received >= chunk_bytes:
                break
        if received:
            since = time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            raise TransferFailed(f"nothing has come for {STALL_SECONDS:.0f} s")
        else:
            readable((stream.connection for stream in waiting), TURN_SECONDS)
        left = time.monotonic()
        yield received
        # While others have their turn, nothing can come.
        since += time.monotonic() - left
