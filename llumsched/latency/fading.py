# SPDX-License-Identifier: Apache-2.0
"""Sums in which recent amounts count more."""

from __future__ import annotations


class Fading:
    """Several sums; an amount counts half as much after each half-life."""

    __slots__ = ("_half_life_s", "_noted_s", "sums")

    def __init__(self, half_life_s: float, number: int) -> None:
        self.sums = [0.0] * number
        self._half_life_s, self._noted_s = half_life_s, 0.0

    def add(self, now_s: float, *amounts: float) -> None:
        kept = 0.5 ** ((now_s - self._noted_s) / self._half_life_s)
        self.sums = [old * kept + new for old, new in zip(self.sums, amounts, strict=True)]
        self._noted_s = now_s

    def ratio(self, of: int, to: int, unknown: float) -> float:
        """Divides sum `of` by sum `to`; returns `unknown` while that is 0."""
        return self.sums[of] / self.sums[to] if self.sums[to] else unknown
