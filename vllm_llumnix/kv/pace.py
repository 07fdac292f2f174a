# SPDX-License-Identifier: Apache-2.0
"""Limit of the rate at which a mover copies.

The limit is that of a link, not of a bucket with credit: n bytes take n / rate seconds, the first
ones included. A mover copies a chunk, says `spend`, and waits `delay` seconds before it goes on or
reports. It never gets ahead by more than the one chunk, whose size follows from the rate.

A limit can be a share of what the link gives. That is measured, by copying without a limit for a
moment: at first, and again from time to time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from vllm_llumnix.kv.settings import UNLIMITED, Limit

CHUNK_BYTES = 8 << 20
"""Upper bound of a chunk: some 0.7 ms of copying, the longest that a mover does not listen."""
CHUNK_SECONDS = 0.002
"""What a chunk takes on a limited link."""
SMALLEST_CHUNK_BYTES = 16 << 10
MEASURED_BYTES = 16 << 20
"""More than lies in the buffers of a connection, so that it is the link that is measured."""
MEASURED_FOR_SECONDS = 60.0
"""How long a measurement counts."""


class Pace:
    """What one limit leaves of a link. Raises ValueError for a limit that lets nothing through."""

    def __init__(self, limit: Limit = UNLIMITED, clock: Callable[[], float] = time.monotonic) -> None:
        rate, share = limit.bytes_per_s, limit.share
        if rate is not None and not rate > 0:
            raise ValueError(f"a limit of {rate} bytes per second")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"a limit of {share} of the link")
        self._clock = clock
        self._share = share
        self._rate = rate if rate is not None and math.isfinite(rate) else None
        self._free_at = 0.0
        self._measured_until = -math.inf
        self._bytes, self._seconds = 0, 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None: as fast as can be, because nothing is limited, or to measure the link."""
        if self._share is not None and self._clock() >= self._measured_until:
            return None
        return self._rate

    def chunk_bytes(self) -> int:
        """How much to copy before asking again."""
        rate = self.bytes_per_s
        if rate is None:
            return CHUNK_BYTES
        return int(min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, rate * CHUNK_SECONDS)))

    def spend(self, num_bytes: int, started: float) -> None:
        """Count a chunk that was begun at clock time `started`."""
        rate = self.bytes_per_s
        if rate is not None:
            self._free_at = max(self._free_at, started) + num_bytes / rate
        elif self._share is not None:
            self._measure(num_bytes, self._clock() - started)

    def delay(self) -> float:
        """Seconds until the link is free again."""
        return max(0.0, self._free_at - self._clock())

    def _measure(self, num_bytes: int, seconds: float) -> None:
        assert self._share is not None
        self._bytes += num_bytes
        self._seconds += seconds
        if self._bytes >= MEASURED_BYTES and self._seconds > 0:
            self._rate = self._share * self._bytes / self._seconds
            self._measured_until = self._clock() + MEASURED_FOR_SECONDS
            self._bytes, self._seconds = 0, 0.0
