# SPDX-License-Identifier: Apache-2.0
"""Whose fault it was that a request did not move: who is left alone for a while."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from llumlet.protocol.errors import Reason


class Blame(enum.Enum):
    REQUEST = enum.auto()
    """The request's, or nobody's: another request, or the same one later, may well move."""
    PAIRING = enum.auto()
    """The two together: this request will never go to this destination. Others will, and it may well go elsewhere."""
    DESTINATION = enum.auto()
    DESTINATION_BUSY = enum.auto()
    """The destination has all the moves it takes at a time."""
    LINK = enum.auto()
    """The fault of one of the two ends, or of what lies between."""


_BLAME: Final[Mapping[str, Blame]] = {
    Reason.DESTINATION_FULL: Blame.DESTINATION,
    Reason.DESTINATION_PAUSED: Blame.DESTINATION,
    Reason.DESTINATION_NEEDS_BLOCKS: Blame.DESTINATION,
    Reason.SHUTTING_DOWN: Blame.DESTINATION,
    Reason.LEASE_EXPIRED: Blame.DESTINATION,
    Reason.DESTINATION_BUSY: Blame.DESTINATION_BUSY,
    Reason.REQUEST_TOO_LONG: Blame.PAIRING,
    Reason.INCOMPATIBLE_ENGINE: Blame.LINK,
    Reason.OTHER_WEIGHTS: Blame.LINK,
    Reason.WRONG_INSTANCE: Blame.LINK,
    Reason.PEER_UNREACHABLE: Blame.LINK,
    Reason.TRANSPORT_UNAVAILABLE: Blame.LINK,
    Reason.TRANSFER_FAILED: Blame.LINK,
    Reason.DEADLINE: Blame.LINK,
    Reason.UNAUTHENTICATED: Blame.LINK,
    Reason.ADDRESS_REFUSED: Blame.LINK,
}


def blame_for(reason: str) -> Blame:
    """The blame for a `Reason`, or for what a newer llumlet says in its place, which is nobody's."""
    return _BLAME.get(reason, Blame.REQUEST)
