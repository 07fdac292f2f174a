# SPDX-License-Identifier: Apache-2.0
"""Blocks of a device on their way through a socket, by way of main memory, with all four steps at work at a time.

    source        gather 0 | gather 1 | gather 2 |                      by the device
                             send 0   | send 1   | send 2   |           by a thread of the block server
    destination                receive 0 | receive 1 | receive 2 |      by the mover
                                           scatter 0 | scatter 1 | …    by the device

So a transfer takes as long as its slowest step does, and one chunk more of each other. Each end has DEPTH buffers. A
buffer is the host's or the device's, and the device's from the beginning of a copy until that is over: until then
nobody sends what is in it or receives into it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from vllm_llumnix.kv.kernels import Chunk, Uploaded, in_chunks
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.transport.blocks_tcp import receive_into, send_from

DEPTH: Final = 2


class Copy(Protocol):
    """A copy that a device has been told of. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Waits until it is over. Raises what has become of the device instead."""


class Device(Protocol):
    """Memory in which blocks lie and which sockets do not reach. Thread-safe.

    chunk_bytes: how many cross at a time, at the most.
    """

    layout: BlockLayout
    chunk_bytes: int

    def ids(self, block_ids: Sequence[int]) -> Uploaded:
        """The ids of a transfer, where the device finds them."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """A row of bytes in main memory."""

    def begin_gather(self, chunk: Chunk, buffer: torch.Tensor) -> Copy:
        """Blocks into all of a buffer, in the order of `kernels`. If it raises, nothing is copied any more."""

    def begin_scatter(self, chunk: Chunk, buffer: torch.Tensor) -> Copy:
        """Begins the way back."""


class _UnderWay(NamedTuple):
    buffer: torch.Tensor
    chunk: Chunk
    """Kept until the copy is over: the device reads its ids."""
    copy: Copy


class Bounced:
    """Implements `memory.Transfer`: one thread sends all of the blocks, or receives them."""

    def __init__(self, device: Device, block_ids: Sequence[int], layers_outermost: bool) -> None:
        """Prepares the copies: nothing is copied before the first call. Raises ValueError for what the device does not
        have."""
        layout = device.layout
        if layers_outermost:
            raise ValueError("blocks of a GPU travel block by block")
        if not all(0 <= block < layout.num_blocks for block in block_ids):
            raise ValueError(f"block ids are not all within 0 to {layout.num_blocks - 1}")
        self.left = len(block_ids) * layout.bytes_per_block
        self._device = device
        self._chunks = deque(in_chunks(layout, device.ids(block_ids), device.chunk_bytes))
        size = max((chunk.num_bytes for chunk in self._chunks), default=0)
        self._free = deque(device.buffer(size) for _ in range(min(DEPTH, len(self._chunks))))
        self._under_way: deque[_UnderWay] = deque()
        """The device's, oldest first."""
        self._rest = memoryview(b"")
        """Rest of the host's buffer that is still to be sent or received."""

    def send(self, connection: socket.socket, max_bytes: int) -> int:
        if not self._rest:
            while self._chunks and self._free:
                self._begin(self._device.begin_gather, self._free.popleft())
            gathered = self._under_way.popleft()
            gathered.copy.synchronize()
            self._buffer = gathered.buffer
            self._rest = memoryview(self._buffer.numpy())[: gathered.chunk.num_bytes]
        # Of a chunk nothing waits for the next: that is still being gathered.
        sent = send_from(connection, self._rest[:max_bytes], more=self.left == len(self._rest))
        self._advance(sent)
        if not self._rest:
            self._free.append(self._buffer)
        return sent

    def receive(self, connection: socket.socket, max_bytes: int) -> int:
        if not self._rest:
            if not self._free:
                scattered = self._under_way.popleft()
                scattered.copy.synchronize()
                self._free.append(scattered.buffer)
            self._buffer = self._free.popleft()
            self._rest = memoryview(self._buffer.numpy())[: self._chunks[0].num_bytes]
        received = receive_into(connection, self._rest[:max_bytes])
        self._advance(received)
        if not self._rest:
            self._begin(self._device.begin_scatter, self._buffer)
        return received

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # one that fails does not keep us from the others
            stack.callback(self._under_way.clear)  # called last
            for under_way in reversed(self._under_way):
                stack.callback(under_way.copy.synchronize)

    def _begin(self, begin: Callable[[Chunk, torch.Tensor], Copy], buffer: torch.Tensor) -> None:
        chunk = self._chunks.popleft()
        self._under_way.append(_UnderWay(buffer, chunk, begin(chunk, buffer[: chunk.num_bytes])))

    def _advance(self, num_bytes: int) -> None:
        self._rest = self._rest[num_bytes:]
        self.left -= num_bytes
