# SPDX-License-Identifier: Apache-2.0
"""Connections to the block servers of peers, kept between pulls."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cuts
from vllm_llumnix.kv.mover.messages import BlockAnswer, BlockRequest, PeerMemory, decode_block_answer
from vllm_llumnix.kv.transport.base import require_readable
from vllm_llumnix.kv.transport.blocks_tcp import receive_frame, send_frame
from vllm_llumnix.wire.addresses import connect, host_of

T = TypeVar("T")

MAX_IDLE: Final = 256
CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0
"""A pull waits for both, and the mover does nothing else meanwhile: a probe has been there before."""


class Connections:
    """The connections of one transport; a connection is lent to one pull at a time, and one that a pull leaves is
    closed.

    Thread-safe: the mover's pulls take connections, and so do the threads that probe.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self.idle: OrderedDict[socket.socket, PeerMemory] = OrderedDict()

    def take(self, peer: PeerMemory) -> socket.socket:
        """An idle one to this peer, or a new one. Raises TransferFailed."""
        while (connection := self._take_idle(peer)) is not None:
            if not readable([connection]):  # nothing is to come: readable means closed
                return connection
            connection.close()
        assert peer.tcp is not None
        try:
            connection = connect(peer.tcp, CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=host_of(peer.tcp))
        except (OSError, ValueError) as error:
            raise TransferFailed(f"{peer.tcp}: {error}") from error
        return connection

    def keep(self, peer: PeerMemory, connection: socket.socket) -> None:
        """Keeps a connection for the next pull; nothing is under way on it."""
        with self._lock:
            self.idle[connection] = peer
            if len(self.idle) > MAX_IDLE:
                self.idle.popitem(last=False)[0].close()

    def probe(self, layout: BlockLayout, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        """Raises TransportUnavailable, or TransferFailed if the peer is gone, unless its server is there."""
        require_served(peer)
        require_readable(layout, peer, cuts)
        connection = self.take(peer)
        try:
            require_granted(_ask(connection, BlockRequest(peer.nonce, b"", [], True)))
        except TransferFailed:
            connection.close()
            raise
        self.keep(peer, connection)

    def tidy(self) -> None:
        """Close what peers have closed."""
        with self._lock:
            for connection in [connection for connection in self.idle if readable([connection])]:
                del self.idle[connection]
                connection.close()

    def _take_idle(self, peer: PeerMemory) -> socket.socket | None:
        with self._lock:
            connection = next((connection for connection, to in self.idle.items() if to == peer), None)
            if connection is not None:
                del self.idle[connection]
            return connection

    def close(self) -> None:
        """Closes all connections. Nobody takes or keeps any by now."""
        for connection in self.idle:
            connection.close()
        self.idle.clear()


def readable(connections: Iterable[socket.socket], seconds: float = 0.0) -> bool:
    """True if one of them has something to read, now or within `seconds`, which count in thousandths.

    Unlike `select` it takes file descriptors of any number.
    """
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return bool(poll.poll(1e3 * seconds))


def require_served(peer: PeerMemory) -> None:
    """Raises TransportUnavailable."""
    if peer.unavailable is not None:
        raise TransportUnavailable(peer.unavailable)
    if peer.tcp is None:
        raise TransportUnavailable("the source does not serve its blocks")


def require_granted(answer: BlockAnswer) -> None:
    """Raises TransferFailed."""
    if answer.error is not None:
        raise TransferFailed(answer.error)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Raises OSError."""
    connection.settimeout(ANSWER_SECONDS)
    send_frame(connection, message)


def receive(connection: socket.socket, decode: Callable[[bytes], T]) -> T:
    """A short message that has begun to come, or will soon. Raises OSError, TransferFailed."""
    try:
        return receive_frame(connection, decode, ANSWER_SECONDS)
    except (EOFError, ValueError, msgspec.MsgspecError) as error:
        raise TransferFailed(str(error)) from error


def _ask(connection: socket.socket, request: BlockRequest) -> BlockAnswer:
    try:
        send(connection, request)
        return receive(connection, decode_block_answer)
    except OSError as error:
        raise TransferFailed(str(error)) from error
