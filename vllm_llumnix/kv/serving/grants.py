# SPDX-License-Identifier: Apache-2.0
"""Blocks of ours that a peer may be sent, by the capability of its migration. Thread-safe.

The engine grants blocks that it has pinned, and revokes the grant before it lets go of them. From then on nothing is
sent, what is being sent stops, and what was put somewhere for the peer lies there no more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from vllm_llumnix.errors import TransferFailed

CAPABILITY_BYTES = 32
NOT_GRANTED = "these blocks are not granted (any more)"
ASLEEP = "the engine sleeps: its KV memory is not there"
CAPTURES = "the engine captures CUDA graphs"
ENDED = "nobody can grant blocks of this worker any more"


class Reading:
    """Blocks on their way to a peer, or a question for them. `revoked` is to be looked at before every piece."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.revoked = False
        self._cut = cut

    def revoke(self) -> None:
        self.revoked = True
        self._cut()


class Grants:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[bytes, set[int]] = {}
        self._readings: dict[bytes, set[Reading]] = {}
        self._suspended: str | None = None
        """Why."""

    def allow(self, capability: bytes, blocks: Sequence[int]) -> None:
        """Grants these blocks, beside those granted before. While suspended, nothing: what is in them goes."""
        with self._changed:
            if self._suspended is not None:
                return
            self._blocks.setdefault(capability, set()).update(blocks)
            self._changed.notify_all()

    def revoke(self, capability: bytes) -> None:
        """Returns when nothing of it is on its way any more. A capability that is not known is no error."""
        with self._changed:
            self._blocks.pop(capability, None)
            for reading in self._readings.get(capability, ()):
                reading.revoke()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readings.get(capability))

    def suspend(self, why: str = ASLEEP) -> None:
        """Revoke all grants, and let nothing be read until `resume`; who asks is told why."""
        with self._changed:
            self._suspended = why
            for capability in [*self._blocks, *self._readings]:
                self.revoke(capability)

    def resume(self) -> None:
        with self._changed:
            self._suspended = None

    @contextlib.contextmanager
    def reading(
        self, capability: bytes, blocks: Sequence[int], cut: Callable[[], None], patience_s: float
    ) -> Iterator[Reading]:
        """While it lasts, `revoke` waits for it; it calls `cut`, after which it has to end soon.

        A grant may overtake the peer's question or be overtaken by it: one that is not there is waited for.
        Raises TransferFailed if these blocks are not granted, or suspended.
        """
        reading = Reading(cut)

        def is_decided() -> bool:
            return reading.revoked or self._blocks.get(capability, set()).issuperset(blocks)

        with self._changed:
            if self._suspended is not None:
                raise TransferFailed(self._suspended)
            under_way = self._readings.setdefault(capability, set())
            if any(other.revoked for other in under_way):  # `revoke` waits, perhaps for the caller itself
                raise TransferFailed(NOT_GRANTED)
            under_way.add(reading)
        try:
            with self._changed:
                if not self._changed.wait_for(is_decided, patience_s) or reading.revoked:
                    raise TransferFailed(NOT_GRANTED)
            yield reading
        finally:
            with self._changed:
                readings = self._readings[capability]
                readings.discard(reading)
                if not readings:
                    del self._readings[capability]
                self._changed.notify_all()
