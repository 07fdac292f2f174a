# SPDX-License-Identifier: Apache-2.0
"""Read the GPU memory of another process on this host: CUDA IPC and the block copy kernels.

The source does nothing. Its blocks are gathered from where its memory is mapped here into a buffer of this GPU, and
scattered into our KV memory, on a stream of its own and by few SMs; a pull ends when the GPU has done all of that. A
thread waits for the GPU inside CUDA, without Python's lock: where the model has this process, too, it goes on.
What protects both sides from reading the wrong thing is what `local` has: the process is identified, alive before and
after, and offers exactly the memory that is read. Memory stays mapped for as long as its process is known to offer it:
a GPU's memory is free again only when nobody maps it any more.

Unproven: it has not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import torch

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import Uploaded, in_chunks
from vllm_llumnix.kv.memory.cuda_share import mapped, require_plausible
from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cuts, require_pairs, require_same_pages
from vllm_llumnix.kv.mover.messages import PeerMemory, Pull
from vllm_llumnix.kv.transport.base import TURN_SECONDS
from vllm_llumnix.kv.transport.local import LocalTransport

BUFFER_BYTES: Final = 8 << 20
"""Several blocks, parts of a large one, or one page."""
AHEAD: Final = 2
"""Chunks enqueued ahead, so that the GPU copies one while the host waits for the one before."""
WAITER: Final = "llumnix-gpu"


class LocalCudaTransport:
    """Implements `base.Transport` for peers on this host whose KV memory is on a GPU that this one can read.

    `storage`, a row of bytes on the GPU, is our own KV memory, `layout` its layout.
    """

    name = "local"
    asks_peers = False

    def __init__(self, storage: torch.Tensor, layout: BlockLayout) -> None:
        self._storage = storage
        self._layout = layout
        self._identities = LocalTransport(layout)
        self._buffer = torch.empty(max(BUFFER_BYTES, layout.largest_page), dtype=torch.uint8, device=storage.device)
        self._stream = torch.cuda.Stream(storage.device)
        # Each thread must select its CUDA device.
        at_start = partial(torch.cuda.set_device, storage.device) if storage.device.type == "cuda" else None
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix=WAITER, initializer=at_start)
        self._mapped: dict[PeerMemory, torch.Tensor] = {}

    def probe(self, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        try:
            self._identities.probe(peer, cuts)
            self._memory_of(peer)
        finally:
            self._unmap_unknown()

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        peer, src_blocks, dst_blocks = pull.peer, pull.src_blocks, pull.dst_blocks
        there, here = peer.layout.cut(pull.cuts.source), self._layout.cut(pull.cuts.destination)
        require_same_pages(here, there)
        require_pairs(src_blocks, dst_blocks)
        for layout, blocks in ((there, src_blocks), (here, dst_blocks)):
            if not all(0 <= block < layout.num_blocks for block in blocks):
                raise ValueError(f"block ids are not all within 0 to {layout.num_blocks - 1}")
        self._identities.verify(peer)
        theirs = self._memory_of(peer)
        chunk_bytes = min(max(chunk_bytes, here.bytes_per_block), len(self._buffer))
        under_way: deque[tuple[Future[None], int]] = deque()
        try:
            with self._at_work():
                from_ids, to_ids = (Uploaded.to(self._storage.device, ids) for ids in (src_blocks, dst_blocks))
            chunks = (in_chunks(side, ids, chunk_bytes) for side, ids in ((there, from_ids), (here, to_ids)))
            for source, destination in zip(*chunks, strict=True):
                with self._at_work():
                    kernels.gather(theirs, source.layout, source.ids, self._buffer)
                    kernels.scatter(self._storage, destination.layout, destination.ids, self._buffer)
                    done = torch.cuda.Event(blocking=True)
                    done.record(self._stream)
                under_way.append((self._waiter.submit(done.synchronize), destination.num_bytes))
                if len(under_way) == AHEAD:
                    yield from self._await(*under_way.popleft())
            while under_way:
                yield from self._await(*under_way.popleft())
        finally:
            # Nothing is written after the iterator has ended, however it ends.
            self._stream.synchronize()
        self._identities.verify(peer)

    def tidy(self) -> None:
        self._identities.tidy()
        self._unmap_unknown()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Sends the work enqueued within to this transport's stream."""
        with torch.cuda.device(self._storage.device), torch.cuda.stream(self._stream):
            yield

    def _await(self, copied: Future[None], num_bytes: int) -> Iterator[int]:
        """Yields the bytes when they have been copied, and 0 after each turn until then."""
        while True:
            try:
                copied.result(TURN_SECONDS)
            except TimeoutError:
                yield 0
            else:
                yield num_bytes
                return

    def close(self) -> None:
        self._waiter.shutdown()
        self._identities.close()
        self._mapped.clear()

    def _unmap_unknown(self) -> None:
        for peer in [peer for peer in self._mapped if not self._identities.knows(peer)]:
            del self._mapped[peer]

    def _memory_of(self, peer: PeerMemory) -> torch.Tensor:
        """The peer's storage, mapped here. Raises TransportUnavailable, TransferFailed."""
        if peer.cuda is None:
            raise TransportUnavailable("the source does not export its GPU memory")
        if peer not in self._mapped:
            require_plausible(peer.cuda, peer.pid, peer.layout.storage_bytes)
            self._mapped[peer] = mapped(peer.cuda, self._storage.device)
        return self._mapped[peer]
