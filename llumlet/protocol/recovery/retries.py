# SPDX-License-Identifier: Apache-2.0
"""The retry budget: failed requests are retried as a share of the traffic. Pure.

Without it an overload feeds itself, as slow engines fail requests that return several times. The budget is a token
bucket, as in Finagle and Envoy: each new request adds a share of a token, each retry takes one. A lost engine leaves
many waiting requests, so tokens also come with time: a share of the requests in flight every `_RECOVERY_S` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_RECOVERY_S: Final = 2.0
_LEAST: Final = 10.0
"""Retries that are always allowed: at once, and per second."""
_FIRST_PAUSE_S: Final = 0.025
_LONGEST_PAUSE_S: Final = 1.0


class RetryBudget:
    """`share`: retries per request. `num_in_flight`: requests now. `clock`: monotonic seconds."""

    def __init__(self, share: float, num_in_flight: Callable[[], int], clock: Callable[[], float]) -> None:
        self._share = share
        self._num_in_flight = num_in_flight
        self._clock = clock
        self._tokens = _LEAST
        self._at_s = clock()

    def requested(self) -> None:
        """Notes a new request."""
        self._refill()
        self._tokens = min(self._tokens + self._share, self._most)

    def take(self, longest_wait_s: float = 0.0, *, kept: float = 0.0) -> float | None:
        """Seconds to wait before a retry; None if they exceed `longest_wait_s`, or if less than the share `kept` of the
        budget would remain."""
        self._refill()
        lacking = 1.0 + kept * self._most - self._tokens
        wait_s = max(0.0, lacking / self._rate)
        if wait_s > longest_wait_s:
            return None
        self._tokens -= 1.0
        return wait_s

    @property
    def _most(self) -> float:
        return max(_LEAST, self._share * self._num_in_flight())

    @property
    def _rate(self) -> float:
        return max(_LEAST, self._share * self._num_in_flight() / _RECOVERY_S)

    def _refill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self._most, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s


def backoff_s(attempt: int, drawn: float) -> float:
    """A pause before the next attempt, with full jitter. `drawn`: a random number from 0 to 1."""
    return drawn * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**attempt)
