# SPDX-License-Identifier: Apache-2.0
"""The plain twin of `local`: a copy within one process, one `memmove` a piece."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.layout import BlockLayout, pair_pieces
from vllm_llumnix.kv.mover.messages import PeerMemory, Pull
from vllm_llumnix.kv.mover.process import OFFER_BYTES, PinnedProcess, offer_of
from vllm_llumnix.kv.transport.base import require_readable


class LoopbackTransport:
    """Implements `base.Transport` for memory of this very process. `layout` is the destination."""

    name = "loopback"
    asks_peers = False

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    def probe(self, peer: PeerMemory) -> None:
        require_readable(self._layout, peer)
        _require_self(peer)

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        peer = pull.peer
        if peer.unavailable is not None:
            raise TransportUnavailable(peer.unavailable)
        pieces = pair_pieces(peer.layout, pull.src_blocks, self._layout, pull.dst_blocks)
        _require_self(peer)
        for source, destination, length in zip(*(array.tolist() for array in pieces), strict=True):
            for done in range(0, length, chunk_bytes):
                count = min(chunk_bytes, length - done)
                ctypes.memmove(destination + done, source + done, count)
                yield count
        _require_self(peer)

    def tidy(self) -> None:
        """Does nothing: nothing is kept."""

    def close(self) -> None:
        """Does nothing: nothing is kept."""


def _require_self(peer: PeerMemory) -> None:
    PinnedProcess(peer).close()
    if peer.pid != os.getpid():
        raise TransportUnavailable("loopback reaches only this process")
    if ctypes.string_at(peer.nonce_address, OFFER_BYTES) != offer_of(peer.nonce, peer.layout, peer.cuda):
        raise TransferFailed(f"the memory of worker {peer.rank} of {peer.instance} is not what was advertised")
