# SPDX-License-Identifier: Apache-2.0
"""KV memory, wherever it lies: blocks to bytes in main memory, and back.

`HostMemory` is that of CPUs. `CudaMemory` is a GPU's: blocks are collected on the device by one launch, on a stream of
their own and by few SMs, and cross to main memory in one piece; through a socket as `bounce` has it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, Self

import torch

from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import Chunk, Uploaded
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut
from vllm_llumnix.kv.transport.blocks_tcp import Span
from vllm_llumnix.kv.transport.bounce import Bounced, Copy

SCRATCH_BYTES: Final = 1 << 20
"""Bytes per chunk (at least one block unless blocks are large). Launching a chunk costs some 30 µs. A connection's
share of a pull, 4 MiB at least, should be several chunks."""
LARGE_BLOCK_BYTES: Final = 4 << 20
"""Larger blocks cross in parts: those of models with several kinds of layers have dozens of MiB, of a memory that vLLM
has taken almost all of."""
NUM_LANES: Final = 2
"""Lanes in each direction: blocks are collected for one while another's cross."""


class Transfer(Protocol):
    """The bytes of some blocks on their way through a socket, as `Span`: `left` of them are still to come or go."""

    left: int

    def send(self, connection: socket.socket, max_bytes: int) -> int: ...
    def receive(self, connection: socket.socket, max_bytes: int) -> int: ...

    def close(self) -> None:
        """Returns when nothing of it is copied any more; what was received is in its place. Raises what kept it."""


class Blocks(Protocol):
    """Blocks of the KV memory of one worker. Thread-safe; every call returns when the bytes are there."""

    layout: BlockLayout

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        """Blocks into the start of a row of bytes, in the order of `kernels`."""

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        """Copies rows of bytes back into blocks."""

    def cut(self, cut: Cut | None) -> Self:
        """The same memory, its blocks cut as `BlockLayout.cut` has it. Raises ValueError."""


class Cuttable:
    """Implements `Blocks.cut` for who looks at nothing but its layout for where a block's bytes are."""

    layout: BlockLayout

    def cut(self, cut: Cut | None) -> Self:
        if cut is None:
            return self
        part = copy.copy(self)
        part.layout = self.layout.cut(cut)
        return part


class BlockMemory(Blocks, Protocol):
    """The memory of all blocks, copied to and from rows of bytes in main memory, and sockets. `storage` is all of it, a
    row of bytes where it lies."""

    storage: torch.Tensor

    @property
    def layers_outermost(self) -> bool:
        """The order in which blocks are received with the least effort."""

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Transfer:
        """A transfer of blocks, to be sent from here, or received. Raises ValueError for blocks that the layout does
        not have."""


class HostMemory(Cuttable):
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


class CudaMemory(Cuttable):
    """Implements `BlockMemory` and `bounce.Device`. Unproven: it has not run on a GPU yet."""

    def __init__(self, layout: BlockLayout, storage: torch.UntypedStorage) -> None:
        self.layout = layout
        self.device = storage.device
        self.storage = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.chunk_bytes = max(SCRATCH_BYTES, min(layout.bytes_per_block, LARGE_BLOCK_BYTES), layout.largest_page)
        self._stream = torch.cuda.Stream(self.device)
        out, back = ([_Lane(self) for _ in range(NUM_LANES)] for _ in range(2))
        self._out, self._back = itertools.cycle(out), itertools.cycle(back)

    @property
    def layers_outermost(self) -> bool:
        return False

    def gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        self._copy(self.begin_gather, block_ids, buffer)

    def scatter(self, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        self._copy(self.begin_scatter, block_ids, buffer)

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Transfer:
        return Bounced(self, block_ids, layers_outermost)

    def ids(self, block_ids: Sequence[int]) -> Uploaded:
        with self.at_work():
            return Uploaded.to(self.device, block_ids)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin_gather(self, chunk: Chunk, buffer: torch.Tensor) -> Copy:
        with next(self._out).turn() as (scratch, over):
            kernels.gather(self.storage, chunk.layout, chunk.ids, scratch)
            buffer.copy_(scratch[: len(buffer)], non_blocking=True)
        return over

    def begin_scatter(self, chunk: Chunk, buffer: torch.Tensor) -> Copy:
        with next(self._back).turn() as (scratch, over):
            scratch[: len(buffer)].copy_(buffer, non_blocking=True)
            kernels.scatter(self.storage, chunk.layout, chunk.ids, scratch)
        return over

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which work is enqueued on a stream of this memory; all of it is done at the end."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def _copy(
        self, begin: Callable[[Chunk, torch.Tensor], Copy], block_ids: Sequence[int], buffer: torch.Tensor
    ) -> None:
        ids, at = self.ids(block_ids), 0
        with contextlib.ExitStack() as stack:
            for chunk in kernels.in_chunks(self.layout, ids, self.chunk_bytes):
                stack.callback(begin(chunk, buffer[at : at + chunk.num_bytes]).synchronize)
                at += chunk.num_bytes


class _Lane:
    """A stream of a GPU, and a scratch for its copies alone. They follow each other there, so none writes over what
    another has yet to read, and the host need not wait.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._device = memory.device
        self._lock = threading.Lock()
        """While a copy is enqueued: its two halves belong together."""
        self._stream = torch.cuda.Stream(self._device)
        self._scratch = torch.empty(memory.chunk_bytes, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def turn(self) -> Iterator[tuple[torch.Tensor, Copy]]:
        """The scratch, and the event of all that is enqueued within; whoever waits for that sleeps."""
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            over = torch.cuda.Event(blocking=True)
            try:
                yield self._scratch, over
            except BaseException:
                self._stream.synchronize()
                raise
            over.record(self._stream)


class OnDevice(Cuttable):
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
