# SPDX-License-Identifier: Apache-2.0
"""Identifiers that cross process boundaries."""

from __future__ import annotations

from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
"""vLLM's internal request id: the client's id plus eight random characters. The same on every engine."""

MigrationId = NewType("MigrationId", str)
"""An attempt to move one request, chosen by the source."""


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The ownership of a request to which an output belongs.

    Compared lexicographically. Only the origin raises `term` (a fence, a replay); owners raise `hop`, by one for each
    hand-over. A request that never moved is at (0, 0).
    """

    term: int = 0
    hop: int = 0

    def next_hop(self) -> Epoch:
        return Epoch(self.term, self.hop + 1)

    def __str__(self) -> str:
        return f"{self.term}.{self.hop}"


HOME = Epoch(0, 0)
"""The epoch of a request that has not moved: its outputs take vLLM's own path, without an index."""
