# SPDX-License-Identifier: Apache-2.0
"""Peers that a network does not reach: found out by trying, and by reads that fail."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from vllm_llumnix.errors import TransportUnavailable

REMEMBERED_SECONDS: Final = 60.0
"""Seconds for which an answer counts: peers' Mooncake logs every connection on which it is asked nothing."""
MAX_PLACES: Final = 256


class Obstacles:
    """Thread-safe. A place is what a peer is called in the network."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()

    def require_none(self, place: str, look: Callable[[], str | None]) -> None:
        """`look` tries, if nobody has lately. Raises TransportUnavailable."""
        with self._lock:
            until, obstacle = self._known.get(place, (0.0, None))
        if self._clock() >= until:
            obstacle = look()
            self.remember(place, obstacle)
        if obstacle is not None:
            raise TransportUnavailable(obstacle)

    def remember(self, place: str, obstacle: str | None) -> None:
        """Remembers for some time why it cannot be read; None: it can."""
        with self._lock:
            self._known[place] = (self._clock() + REMEMBERED_SECONDS, obstacle)
            self._known.move_to_end(place)
            if len(self._known) > MAX_PLACES:
                self._known.popitem(last=False)
