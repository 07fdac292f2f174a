# SPDX-License-Identifier: Apache-2.0
"""The fault for a request that did not move, which decides what is avoided for a while."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from llumlet.protocol.errors import Reason


class Blame(enum.Enum):
    REQUEST = enum.auto()
    """The request's fault, or none: another request, or the same one later, may move."""
    PAIRING = enum.auto()
    """This request will never move to this destination; others will, and it may move elsewhere."""
    DESTINATION = enum.auto()
    DESTINATION_BUSY = enum.auto()
    """The destination has its largest number of moves."""
    LINK = enum.auto()
    """The fault of one end, or of the link between them."""


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
    """The blame for a `Reason`. An unknown word of a newer llumlet counts as nobody's fault."""
    return _BLAME.get(reason, Blame.REQUEST)
