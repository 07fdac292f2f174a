# SPDX-License-Identifier: Apache-2.0
"""How much of the event loop's time the stream of one instance may take: one that floods delays its own reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from llumlet.contract.types import InstanceReport

MAX_REPORTS_PER_S: Final = 1000.0
"""Reports of one stream; five times what a reporter sends at most."""
MAX_BYTES_PER_S: Final = 8e6
"""Bytes of one stream, about 3 % of a core. A status with all the names that an engine lists is taken 20 times a
second, one of an engine that had 20 requests a second 200 times."""
MAX_METADATA_PER_S: Final = 4.0
"""Metadata of one stream: each has the next decision look at all instances again."""
_NAME_BYTES: Final = 64
"""Cost of a name in a list, in the time of bytes, beside its own."""


class TimeAllowance:
    """The time that a stream may take: a second's worth at once, and then what time brings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s, self._before_s = 1.0, clock()

    def spend(self, report: InstanceReport) -> float:
        """Seconds from a report that was taken until the next one may be read; not positive for at once."""
        now_s = self._clock()
        self._left_s = min(1.0, self._left_s + now_s - self._before_s) - _cost_s(report)
        self._before_s = now_s
        return -self._left_s


def _cost_s(report: InstanceReport) -> float:
    if report.HasField("metadata"):
        return 1 / MAX_METADATA_PER_S
    names = len(report.status.waiting_requests) + len(report.status.recent_waiting_requests)
    return max(1 / MAX_REPORTS_PER_S, (report.ByteSize() + _NAME_BYTES * names) / MAX_BYTES_PER_S)
