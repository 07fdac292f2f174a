# SPDX-License-Identifier: Apache-2.0
"""KV memory, wherever it lies: blocks to bytes in main memory, and back.

`HostMemory` is that of CPUs. `CudaMemory` is a GPU's: blocks are collected on the device by one launch, on a stream of
their own and by few SMs, and cross to main memory in one piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch

from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.blocks_tcp import Span, receive_into, send_from
from vllm_llumnix.kv.layout import BlockLayout

SCRATCH_BYTES: Final = 4 << 20
"""Of a GPU's blocks that cross at a time; one block at least."""


class Transfer(Protocol):
    """The bytes of some blocks on their way through a socket, as `Span`: `left` of them are still to come or go."""

    left: int

    def send(self, connection: socket.socket, max_bytes: int) -> int: ...
    def receive(self, connection: socket.socket, max_bytes: int) -> int: ...


class Blocks(Protocol):
    """Blocks of the KV memory of one worker. Thread-safe; every call returns when the bytes are there."""

    layout: BlockLayout

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        """Blocks into the start of a row of bytes, in the order of `kernels`."""

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        """And back."""


class BlockMemory(Blocks, Protocol):
    """To and from rows of bytes in main memory, and sockets. `storage` is all of it, a row of bytes where it lies."""

    storage: torch.Tensor

    @property
    def layers_outermost(self) -> bool:
        """The order in which blocks are received with the least effort."""

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Transfer:
        """To be sent from here, or received. Raises ValueError for blocks that the layout does not have."""


class HostMemory:
    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        memory = (ctypes.c_ubyte * layout.storage_bytes).from_address(layout.base)
        self.storage = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def layers_outermost(self) -> bool:
        return self.layout.layers_outermost

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        kernels.gather(self.storage, self.layout, block_ids, buffer)

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        kernels.scatter(self.storage, self.layout, block_ids, buffer)

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Transfer:
        return Span(self.layout, block_ids, layers_outermost)


class CudaMemory:
    """Unproven: it has not run on a GPU yet."""

    def __init__(self, layout: BlockLayout, storage: torch.UntypedStorage) -> None:
        self.layout = layout
        self.device = storage.device
        self.storage = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.scratch_blocks = max(1, SCRATCH_BYTES // layout.bytes_per_block)
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(self.device)
        self._scratch = torch.empty(self.scratch_blocks * layout.bytes_per_block, dtype=torch.uint8, device=self.device)

    @property
    def layers_outermost(self) -> bool:
        return False

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        for ids, part in self._parts(block_ids, buffer):
            with self.at_work():
                kernels.gather(self.storage, self.layout, ids, self._scratch)
                part.copy_(self._scratch[: len(part)], non_blocking=True)

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        for ids, part in self._parts(block_ids, buffer):
            with self.at_work():
                self._scratch[: len(part)].copy_(part, non_blocking=True)
                kernels.scatter(self.storage, self.layout, ids, self._scratch)

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Transfer:
        return _Bounced(self, block_ids, layers_outermost)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """What is enqueued within goes to this memory's stream, and is done afterwards."""
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def _parts(self, block_ids: Sequence[int], buffer: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
        step, size = self.scratch_blocks, self.layout.bytes_per_block
        return [
            (block_ids[at : at + step], buffer[at * size : min(at + step, len(block_ids)) * size])
            for at in range(0, len(block_ids), step)
        ]


class OnDevice:
    """Blocks to and from rows of bytes on the GPU itself: implements `Blocks`."""

    def __init__(self, memory: CudaMemory) -> None:
        self.layout = memory.layout
        self._memory = memory

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        with self._memory.at_work():
            kernels.gather(self._memory.storage, self.layout, block_ids, buffer)

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        with self._memory.at_work():
            kernels.scatter(self._memory.storage, self.layout, block_ids, buffer)


class _Bounced:
    """Blocks of a GPU on their way through a socket, by way of a buffer in main memory."""

    def __init__(self, memory: CudaMemory, block_ids: Sequence[int], layers_outermost: bool) -> None:
        layout = memory.layout
        if layers_outermost:
            raise ValueError("blocks of a GPU travel block by block")
        if not all(0 <= block < layout.num_blocks for block in block_ids):
            raise ValueError(f"block ids are not all within 0 to {layout.num_blocks - 1}")
        self.left = len(block_ids) * layout.bytes_per_block
        self._memory = memory
        self._ids = list(block_ids)
        self._buffer = torch.empty(
            min(len(block_ids), memory.scratch_blocks) * layout.bytes_per_block, dtype=torch.uint8, pin_memory=True
        )
        self._bytes = memoryview(self._buffer.numpy())
        self._at = self._end = 0

    def send(self, connection: socket.socket, max_bytes: int) -> int:
        if self._at == self._end:
            self._memory.gather(self._next(), self._buffer)
        sent = send_from(connection, self._bytes[self._at : min(self._end, self._at + max_bytes)])
        self._at += sent
        self.left -= sent
        return sent

    def receive(self, connection: socket.socket, max_bytes: int) -> int:
        if self._at == self._end:
            self._coming = self._next()
        received = receive_into(connection, self._bytes[self._at : min(self._end, self._at + max_bytes)])
        self._at += received
        self.left -= received
        if self._at == self._end:
            self._memory.scatter(self._coming, self._buffer[: self._end])
        return received

    def _next(self) -> list[int]:
        count = self._memory.scratch_blocks
        ids, self._ids = self._ids[:count], self._ids[count:]
        self._at, self._end = 0, len(ids) * self._memory.layout.bytes_per_block
        return ids
