# SPDX-License-Identifier: Apache-2.0
"""Which Mooncake segments of peers can be reached: found out by connecting, and by reads that fail."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.hosts import connect
from vllm_llumnix.kv.transport.connections import CONNECT_SECONDS

REMEMBERED_SECONDS: Final = 60.0
"""How long an answer counts: peers' Mooncake logs every connection on which it is asked nothing."""
MAX_SEGMENTS: Final = 256


class Segments:
    """Thread-safe. Segments are HOST:PORT, where Mooncake waits for handshakes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()

    def require_reachable(self, segment: str) -> None:
        """Raises TransportUnavailable."""
        with self._lock:
            until, obstacle = self._known.get(segment, (0.0, None))
        if self._clock() >= until:
            obstacle = _obstacle(segment)
            self.remember(segment, obstacle)
        if obstacle is not None:
            raise TransportUnavailable(obstacle)

    def remember(self, segment: str, obstacle: str | None) -> None:
        """What keeps us from reading it, for some time; None: nothing does."""
        with self._lock:
            self._known[segment] = (self._clock() + REMEMBERED_SECONDS, obstacle)
            self._known.move_to_end(segment)
            if len(self._known) > MAX_SEGMENTS:
                self._known.popitem(last=False)


def _obstacle(segment: str) -> str | None:
    try:
        connect(segment, CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"the source's Mooncake cannot be reached at {segment}: {error}"
    return None
