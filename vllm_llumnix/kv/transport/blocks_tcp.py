# SPDX-License-Identifier: Apache-2.0
"""Parts of both ends of a `tcp` transfer: frames, and KV memory as buffers that a socket reads or writes itself."""

from __future__ import annotations

import ctypes
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.layout import BlockLayout

T = TypeVar("T")

IOV_MAX = 1024
MAX_FRAME_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 20
"""More than a socket has at a time."""
_LENGTH = struct.Struct(">I")


class Span:
    """The bytes of some blocks in the order of a transfer: what is left of them."""

    def __init__(self, layout: BlockLayout, blocks: Sequence[int], layers_outermost: bool) -> None:
        """Raises ValueError for blocks that the layout does not have."""
        addresses, lengths = layout.pieces(blocks, layers_outermost)
        self._storage = memoryview((ctypes.c_ubyte * layout.storage_bytes).from_address(layout.base)).cast("B")
        self._starts: list[int] = (addresses - np.uint64(layout.base)).tolist()
        self._ends: list[int] = [start + length for start, length in zip(self._starts, lengths.tolist(), strict=True)]
        self._first = 0
        self.left = int(lengths.sum())

    def buffers(self, max_bytes: int) -> list[memoryview]:
        """The next ones, in place: at least one, and no more than IOV_MAX and about `max_bytes`."""
        buffers, total = [], 0
        for at in range(self._first, min(len(self._starts), self._first + IOV_MAX)):
            start = self._starts[at]
            end = min(self._ends[at], start + max_bytes - total)
            buffers.append(self._storage[start:end])
            total += end - start
            if total >= max_bytes:
                break
        return buffers

    def advance(self, num_bytes: int) -> None:
        self.left -= num_bytes
        while num_bytes:
            size = self._ends[self._first] - self._starts[self._first]
            if num_bytes < size:
                self._starts[self._first] += num_bytes
                return
            num_bytes -= size
            self._first += 1

    def send(self, connection: socket.socket, max_bytes: int) -> int:
        """Sends as much as one call takes; returns the bytes sent. Raises OSError."""
        buffers = self.buffers(max_bytes)
        sent = send_from(connection, *buffers)
        self.advance(sent)
        return sent

    def receive(self, connection: socket.socket, max_bytes: int) -> int:
        """Receives as much as one call brings; returns the bytes received, 0 if there is none now. Raises OSError,
        TransferFailed."""
        received = receive_into(connection, *self.buffers(min(max_bytes, RECEIVE_BYTES)))
        self.advance(received)
        return received

    def close(self) -> None:
        """Does nothing: nothing is under way between two calls."""


def send_from(connection: socket.socket, *buffers: memoryview, more: bool = True) -> int:
    """Sends as much as one call takes; returns the bytes sent. `more`: their end may wait for what follows at once.
    Raises OSError."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.send(buffers[0])  # OpenSSL takes one buffer at a time
    return connection.sendmsg(buffers, (), socket.MSG_MORE if more else 0)


def receive_into(connection: socket.socket, *buffers: memoryview) -> int:
    """Receives as much as one call brings; returns the bytes received, 0 if there is none now. Raises OSError,
    TransferFailed."""
    try:
        if isinstance(connection, ssl.SSLSocket):
            received = connection.recv_into(buffers[0])
        else:
            received = connection.recvmsg_into(buffers)[0]
    except (BlockingIOError, ssl.SSLWantReadError):
        return 0
    if not received:
        raise TransferFailed("the source has closed the connection")
    return received


def send_frame(connection: socket.socket, message: msgspec.Struct, more: bool = False) -> None:
    """`more`: blocks follow at once, and the frame may wait for them: its peer then wakes up once. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    flags = socket.MSG_MORE if more and not isinstance(connection, ssl.SSLSocket) else 0
    connection.sendall(_LENGTH.pack(len(data)) + data, flags)


def receive_frame(
    connection: socket.socket, decode: Callable[[bytes], T], seconds: float, idle_s: float | None = None
) -> T:
    """All of it comes within `seconds`, however it is cut into pieces, of its first byte, which may take `idle_s`.

    Raises OSError, EOFError, ValueError for what is no such message.
    """
    connection.settimeout(seconds if idle_s is None else idle_s)
    first = _receive(connection, 1, math.inf)
    deadline = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(first + _receive(connection, _LENGTH.size - 1, deadline))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return decode(_receive(connection, length, deadline))


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline < math.inf:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return bytes(data)
