# SPDX-License-Identifier: Apache-2.0
"""Limit of the rate at which a mover copies.

The limit is that of a link, not of a bucket with credit: n bytes take n / rate seconds, the first
ones included. A mover copies a chunk, says `spend`, and waits `delay` seconds before it goes on or
reports. It never gets ahead by more than the one chunk, whose size follows from the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CHUNK_BYTES = 8 << 20
"""Upper bound of a chunk: some 0.7 ms of copying, the longest that a mover does not listen."""
CHUNK_SECONDS = 0.002
"""What a chunk takes on a limited link."""
SMALLEST_CHUNK_BYTES = 16 << 10


class Pace:
    """The link of one mover. `bytes_per_s` None means unlimited; it may change between chunks."""

    def __init__(self, bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at = 0.0
        self.bytes_per_s = bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ValueError(f"a rate of {value} bytes per second")
        self._bytes_per_s = value

    def chunk_bytes(self) -> int:
        """How much to copy before asking again."""
        if self._bytes_per_s is None:
            return CHUNK_BYTES
        return int(min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, self._bytes_per_s * CHUNK_SECONDS)))

    def spend(self, num_bytes: int, started: float) -> None:
        """Count a chunk that was begun at clock time `started`."""
        if self._bytes_per_s is not None:
            self._free_at = max(self._free_at, started) + num_bytes / self._bytes_per_s

    def delay(self) -> float:
        """Seconds until the link is free again."""
        return max(0.0, self._free_at - self._clock())
