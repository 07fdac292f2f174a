# SPDX-License-Identifier: Apache-2.0
"""Limits of the event loop's time for one instance's stream: a flooding instance delays only its own reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from llumlet.contract.types import InstanceReport

MAX_REPORTS_PER_S: Final = 1000.0
"""Reports per second of one stream; five times what a reporter sends at most."""
MAX_BYTES_PER_S: Final = 8e6
"""Bytes per second of one stream, about 3 % of a core: 20 full statuses, or 200 of an engine with 20 requests a
second."""
MAX_METADATA_PER_S: Final = 4.0
"""Metadata per second of one stream, since each makes the next decision read all instances again."""
_NAME_BYTES: Final = 64
"""Cost of a name in a list, in bytes, beside its own length."""


class TimeAllowance:
    """The remaining allowance of a stream, which refills with time up to one second's worth."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s, self._before_s = 1.0, clock()

    def spend(self, report: InstanceReport) -> float:
        """Seconds until the next report may be read; not positive for at once."""
        now_s = self._clock()
        self._left_s = min(1.0, self._left_s + now_s - self._before_s) - _cost_s(report)
        self._before_s = now_s
        return -self._left_s


def _cost_s(report: InstanceReport) -> float:
    if report.HasField("metadata"):
        return 1 / MAX_METADATA_PER_S
    names = len(report.status.waiting_requests) + len(report.status.recent_waiting_requests)
    return max(1 / MAX_REPORTS_PER_S, (report.ByteSize() + _NAME_BYTES * names) / MAX_BYTES_PER_S)
