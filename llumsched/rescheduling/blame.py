# SPDX-License-Identifier: Apache-2.0
"""Whose fault it was that a request did not move: who is left alone for a while."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


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
    "destination_full": Blame.DESTINATION,
    "destination_paused": Blame.DESTINATION,
    "destination_needs_blocks": Blame.DESTINATION,
    "shutting_down": Blame.DESTINATION,
    "lease_expired": Blame.DESTINATION,
    "destination_busy": Blame.DESTINATION_BUSY,
    "request_too_long": Blame.PAIRING,
    "incompatible_engine": Blame.LINK,
    "other_weights": Blame.LINK,
    "wrong_instance": Blame.LINK,
    "peer_unreachable": Blame.LINK,
    "transport_unavailable": Blame.LINK,
    "transfer_failed": Blame.LINK,
    "deadline": Blame.LINK,
    "unauthenticated": Blame.LINK,
    "address_refused": Blame.LINK,
}


def blame_for(reason: str) -> Blame:
    """The blame by the lower-case name of a `llumlet.types.Reason`; unknown ones are nobody's fault."""
    return _BLAME.get(reason, Blame.REQUEST)
