# SPDX-License-Identifier: Apache-2.0
"""Limit of the rate at which a mover copies.

The limit is that of a link, not of a bucket with credit: n bytes take n / rate seconds, the first
ones included. A mover copies a chunk, says `spend`, and waits `delay` seconds before it goes on or
reports. It never gets ahead by more than the one chunk, whose size follows from the rate.

A limit can be a share of what the link gives. That is measured, by pulls that begin without a limit:
the first ones, and others from time to time. A pull that was begun under a limit measures nothing,
because what it has not fetched in time lies in the buffers of its connections; nor does the first
chunk of any pull, for which the peer is connected to and asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from vllm_llumnix.kv.settings import UNLIMITED, Limit

CHUNK_BYTES = 8 << 20
"""Upper bound of a chunk: some 0.7 ms of copying, the longest that a mover does not listen."""
CHUNK_SECONDS = 0.002
"""Seconds that a chunk takes on a limited link."""
SMALLEST_CHUNK_BYTES = 16 << 10
MEASURED_BYTES = 16 << 20
"""More than lies in the buffers of a connection, so that it is the link that is measured."""
MEASURED_FOR_SECONDS = 60.0
"""Seconds for which a measurement counts."""
MEASURED_CHUNKS = 4
"""Chunks of which a pull that measures consists at least, so that a small one has more than a first."""


class Pace:
    """Rate that a limit leaves of a link. Raises ValueError for a limit that lets nothing through."""

    def __init__(self, limit: Limit = UNLIMITED, clock: Callable[[], float] = time.monotonic) -> None:
        rate, share = limit.bytes_per_s, limit.share
        if rate is not None and not rate > 0:
            raise ValueError(f"a limit of {rate} bytes per second")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"a limit of {share} of the link")
        self.clock = clock
        self.bytes_per_s = rate if rate is not None and math.isfinite(rate) else None
        """The limit. None: as fast as can be, because nothing is limited, or measured."""
        self._share = share
        self._free_at = 0.0
        self._measured_until = -math.inf
        self._bytes, self._seconds = 0, 0.0

    @property
    def is_to_be_measured(self) -> bool:
        return self._share is not None and self.clock() >= self._measured_until

    def begin(self, num_bytes: int) -> PacedPull:
        return PacedPull(self, num_bytes)

    def delay(self) -> float:
        """Seconds until the link is free again."""
        return max(0.0, self._free_at - self.clock())

    def occupy(self, num_bytes: int, started: float) -> None:
        """The link, from `started` on, for as long as they take at the rate of the limit, if there is one."""
        if self.bytes_per_s is not None:
            self._free_at = max(self._free_at, started) + num_bytes / self.bytes_per_s

    def measure(self, num_bytes: int, seconds: float) -> None:
        """So long took so many without a limit."""
        assert self._share is not None
        self._bytes += num_bytes
        self._seconds += seconds
        if self._bytes >= MEASURED_BYTES and self._seconds > 0:
            self.bytes_per_s = self._share * self._bytes / self._seconds
            self._measured_until = self.clock() + MEASURED_FOR_SECONDS
            self._bytes, self._seconds = 0, 0.0


class PacedPull:
    """A pull at a pace. If it begins when the link is to be measured, it has no limit until that is done."""

    def __init__(self, pace: Pace, num_bytes: int) -> None:
        self._pace = pace
        self._num_bytes = num_bytes
        self._measures = pace.is_to_be_measured
        self._has_begun = False

    def chunk_bytes(self) -> int:
        """Bytes to copy before asking again."""
        if self._is_measuring:
            wanted: float = self._num_bytes / MEASURED_CHUNKS
        elif self._pace.bytes_per_s is not None:
            wanted = self._pace.bytes_per_s * CHUNK_SECONDS
        else:
            wanted = CHUNK_BYTES
        return int(min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, wanted)))

    def spend(self, num_bytes: int, started: float) -> None:
        """Count a chunk that was begun at clock time `started`."""
        if not self._is_measuring:
            self._pace.occupy(num_bytes, started)
        elif self._has_begun:
            self._pace.measure(num_bytes, self._pace.clock() - started)
        self._has_begun = self._has_begun or num_bytes > 0

    @property
    def _is_measuring(self) -> bool:
        return self._measures and self._pace.is_to_be_measured
