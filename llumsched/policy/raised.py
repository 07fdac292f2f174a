# SPDX-License-Identifier: Apache-2.0
"""Parts of a policy that raised an exception in a decision: each is logged once, counted, and skipped."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

_log = logging.getLogger(__name__)
_RECENT_S: Final = 60.0

counts: Counter[str] = Counter()
"""Number of exceptions of each part in this process."""
_last_s: dict[str, float] = {}


def note(part: str, instead: str, error: Exception) -> None:
    """Notes that a part raised. `instead`: the consequence."""
    if part not in counts:
        _log.error("%s raises, and %s when it does", part, instead, exc_info=error)
    counts[part] += 1
    _last_s[part] = time.monotonic()


def lately() -> list[str]:
    """Parts that raised within the last minute."""
    since_s = time.monotonic() - _RECENT_S
    return sorted(part for part, last_s in _last_s.items() if last_s >= since_s)
