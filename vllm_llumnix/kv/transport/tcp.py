# SPDX-License-Identifier: Apache-2.0
"""Read the blocks of a worker anywhere: its block server sends them over TCP.

The bytes go from the source's KV memory into the socket and from the socket into ours: only the kernel copies. A large
pull is spread over several connections. They are kept between pulls; one that a pull leaves in the middle is closed.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import msgspec

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.blocks_tcp import Span, receive_frame, send_frame
from vllm_llumnix.kv.layout import BlockLayout, require_same_pages
from vllm_llumnix.kv.messages import BlockAnswer, BlockRequest, PeerMemory

MAX_STREAMS: Final = 4
BYTES_PER_STREAM: Final = 4 << 20
"""A pull of less than twice this is not spread."""
MAX_IDLE: Final = 256
CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0
"""The mover waits for both, and does nothing else meanwhile."""
STALL_SECONDS: Final = 5.0
"""How long nothing may come in the middle of a pull."""
TURN_SECONDS: Final = 0.005
"""The longest that the mover waits for bytes before it listens to its engine again."""


class TcpTransport:
    """Implements `base.Transport` for peers with a block server. `layout` is our own KV memory."""

    name = "tcp"

    def __init__(self, layout: BlockLayout, tls: ssl.SSLContext | None = None) -> None:
        self._layout = layout
        self._tls = tls
        self._idle: OrderedDict[socket.socket, PeerMemory] = OrderedDict()

    def probe(self, peer: PeerMemory) -> None:
        _require_served(peer)
        try:
            require_same_pages(self._layout, peer.layout)
        except ValueError as error:
            raise TransportUnavailable(str(error)) from error
        connection = self._connection(peer)
        try:
            answer = _ask(connection, BlockRequest(peer.nonce, b"", [], True))
        except TransferFailed:
            connection.close()
            raise
        if answer.error is not None:
            connection.close()
            raise TransferFailed(answer.error)
        self._keep(peer, connection)

    def pull(
        self, peer: PeerMemory, src_blocks: list[int], dst_blocks: list[int], chunk_bytes: int, capability: bytes = b""
    ) -> Iterator[int]:
        _require_served(peer)
        require_same_pages(self._layout, peer.layout)
        if len(src_blocks) != len(dst_blocks) or len(set(dst_blocks)) != len(dst_blocks):
            raise ValueError(f"{len(src_blocks)} source blocks for {len(set(dst_blocks))} destination blocks")
        layers_outermost = self._layout.layers_outermost
        parts = list(self._parts(len(src_blocks)))
        spans = [Span(self._layout, dst_blocks[part], layers_outermost) for part in parts]
        streams: list[_Stream] = []
        try:
            for part, span in zip(parts, spans, strict=True):
                stream = _Stream(self._connection(peer), span)
                streams.append(stream)
                _send(stream.connection, BlockRequest(peer.nonce, capability, src_blocks[part], layers_outermost))
            yield from _receive_all(streams, chunk_bytes)
        except OSError as error:
            raise TransferFailed(f"{peer.tcp}: {error}") from error
        finally:
            for stream in streams:
                if stream.done:
                    self._keep(peer, stream.connection)
                else:
                    stream.connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _parts(self, num_blocks: int) -> Iterator[slice]:
        """Shares of a pull, one a connection."""
        count = max(1, min(MAX_STREAMS, num_blocks, num_blocks * self._layout.bytes_per_block // BYTES_PER_STREAM))
        for index in range(count):
            part = slice(num_blocks * index // count, num_blocks * (index + 1) // count)
            if part.start < part.stop:
                yield part

    def _connection(self, peer: PeerMemory) -> socket.socket:
        """An idle one to this peer, or a new one."""
        for connection in [connection for connection, to in self._idle.items() if to == peer]:
            del self._idle[connection]
            if not select.select([connection], [], [], 0)[0]:  # nothing is to come: readable means closed
                return connection
            connection.close()
        assert peer.tcp is not None
        try:
            where = urlsplit(f"//{peer.tcp}")
            connection = socket.create_connection((where.hostname, where.port), CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=where.hostname)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"{peer.tcp}: {error}") from error
        return connection

    def _keep(self, peer: PeerMemory, connection: socket.socket) -> None:
        self._idle[connection] = peer
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)[0].close()


class _Stream:
    """One connection's share of a pull."""

    def __init__(self, connection: socket.socket, span: Span) -> None:
        self.connection = connection
        self.span = span
        self.granted = False
        self.done = False

    def receive(self, max_bytes: int) -> int:
        """What has come; the first and the last message, which are short, are waited for."""
        if not self.granted:
            if not select.select([self.connection], [], [], 0)[0]:
                return 0
            _require_granted(_answer(self.connection))
            self.granted = True
            self.connection.setblocking(False)
        received = self.span.receive(self.connection, max_bytes) if self.span.left else 0
        if not self.span.left:
            _require_granted(_answer(self.connection))
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
            select.select([stream.connection for stream in waiting], [], [], TURN_SECONDS)
        yield received


def _require_served(peer: PeerMemory) -> None:
    if peer.unavailable is not None:
        raise TransportUnavailable(peer.unavailable)
    if peer.tcp is None:
        raise TransportUnavailable("the source does not serve its blocks over TCP")


def _require_granted(answer: BlockAnswer) -> None:
    if answer.error is not None:
        raise TransferFailed(answer.error)


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.settimeout(ANSWER_SECONDS)
    send_frame(connection, message)


def _ask(connection: socket.socket, request: BlockRequest) -> BlockAnswer:
    try:
        _send(connection, request)
        return _answer(connection)
    except OSError as error:
        raise TransferFailed(str(error)) from error


def _answer(connection: socket.socket) -> BlockAnswer:
    connection.settimeout(ANSWER_SECONDS)
    try:
        return receive_frame(connection, BlockAnswer)
    except (EOFError, ValueError, msgspec.MsgspecError) as error:
        raise TransferFailed(str(error)) from error
