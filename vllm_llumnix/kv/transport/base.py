# SPDX-License-Identifier: Apache-2.0
"""What a mover needs of a transport.

A transport reads blocks of a peer's KV memory into this worker's. It runs in the mover's thread,
holds no lock, and knows nothing of migrations. Only the process that owns the destination memory
ever writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vllm_llumnix.kv.messages import PeerMemory


class Transport(Protocol):
    """One way to reach a peer's memory; `name` is what configuration and messages call it."""

    @property
    def name(self) -> str: ...

    def probe(self, peer: PeerMemory) -> None:
        """Raise TransportUnavailable, with a reason for people, unless this peer can be read.

        TransferFailed means that the peer itself is gone.
        """

    def pull(
        self, peer: PeerMemory, src_blocks: list[int], dst_blocks: list[int], chunk_bytes: int, capability: bytes = b""
    ) -> Iterator[int]:
        """Copy block `src_blocks[i]` of the peer to our `dst_blocks[i]`, `chunk_bytes` a turn.

        `capability` is for those who send them. Yields the bytes of each chunk, 0 when none has come for a while. The
        copy counts only when the iterator has ended: the last turn verifies that the memory was the peer's all along.
        Nothing is written between turns, nor after the iterator was closed or raised. Raises ValueError (wrong blocks;
        before anything is read), TransportUnavailable, TransferFailed.
        """

    def close(self) -> None:
        """Let go of what was kept between pulls."""
