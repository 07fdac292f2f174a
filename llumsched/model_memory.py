# SPDX-License-Identifier: Apache-2.0
"""Models that are known although no instance serves them now: requests for them get 503 and may retry, where an unknown
name gets 404."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

REMEMBERED_S: Final = 900.0
"""Time for which a served model is remembered, longer than models take to load."""
AWAY_RETRY_S: Final = 5.0
"""Retry-After for a model that no instance serves now."""
_MOST: Final = 10_000


class ModelMemory:
    """Models that were served recently, and `configured` ones. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], configured: Collection[str] = ()) -> None:
        self._clock = clock
        self._configured = frozenset(configured)
        self._served_s: OrderedDict[str, float] = OrderedDict()
        """Time when each was last served, the oldest first."""

    def served(self, model: str) -> None:
        """Notes that an instance serves the model."""
        self._served_s[model] = self._clock()
        self._served_s.move_to_end(model)
        if len(self._served_s) > _MOST:
            self._served_s.popitem(last=False)

    def __contains__(self, model: str) -> bool:
        served_s = self._served_s.get(model)
        is_recent = served_s is not None and self._clock() - served_s <= REMEMBERED_S
        return is_recent or model in self._configured
