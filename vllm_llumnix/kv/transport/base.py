# SPDX-License-Identifier: Apache-2.0
"""Interface between mover and transport.

A transport reads blocks of a peer's KV memory into this worker's. It runs in the mover's thread and knows nothing of
migrations. Only the process that owns the destination memory ever writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cuts, require_same_pages
from vllm_llumnix.kv.mover.messages import PeerMemory, Pull

STALL_SECONDS: Final = 5.0
"""Seconds for which nothing may come in the middle of a pull."""
TURN_SECONDS: Final = 0.005
"""The longest that the mover waits for a peer, or for the GPU, before it listens to its engine again."""


def require_readable(ours: BlockLayout, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
    """Raises TransportUnavailable for a peer whose memory nobody reads, or whose pages are other ones than ours."""
    if peer.unavailable is not None:
        raise TransportUnavailable(peer.unavailable)
    try:
        require_same_pages(ours.cut(cuts.destination), peer.layout.cut(cuts.source))
    except ValueError as error:
        raise TransportUnavailable(str(error)) from error


class Transport(Protocol):
    """A way to reach a peer's memory; `name` is what configuration and messages call it."""

    @property
    def name(self) -> str: ...

    @property
    def asks_peers(self) -> bool:
        """True if `probe` waits for the peer's answer. Then other threads than the mover's call it, at any time."""

    def probe(self, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        """Raise TransportUnavailable, with a reason for people, unless this peer can be read, and the parts be copied.

        TransferFailed means that the peer itself is gone.
        """

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        """Copy the blocks of `pull`, `chunk_bytes` a turn; its deadline and its limit are the mover's to keep.

        Yields the bytes of each chunk, 0 when none has come for a while. The copy counts only when the iterator has
        ended: the last turn verifies that the memory was the peer's all along.
        Nothing is written after the iterator has ended, was closed or raised; between turns only what a GPU has been
        told to. Raises ValueError (wrong blocks; before anything is read), TransportUnavailable, TransferFailed.
        """

    def tidy(self) -> None:
        """Let go of what is kept of peers that have gone. Called from time to time, also when nothing else is."""

    def close(self) -> None:
        """Let go of what was kept between pulls."""
