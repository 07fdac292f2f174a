# SPDX-License-Identifier: Apache-2.0
"""The effects that a migration asks of its shell: the output alphabet of the two machines.

A shell carries out the effects of one event in order; those on the engine's loop reach it in that order. Sending is at
most once and may fail; its result is reported as an event. `Unpin`, `Unfreeze`, `RevokeAdmit`, `FreeReservation`,
`AbortAdmitted` and `ClearTimer` may be repeated.
"""

from __future__ import annotations

import msgspec

from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Call, Settlement
from llumlet.protocol.ids import Epoch

# Both machines


class SetTimer(msgspec.Struct, frozen=True):
    """`TimerFired(name)` after `seconds`, counted from now; replaces a running timer of that name.

    The destination's timer "lease" is asked for before the answer that grants the lease is sent, and its end is what
    `PullDone.lease_valid` compares with.
    """

    name: str
    seconds: float


class ClearTimer(msgspec.Struct, frozen=True):
    name: str


# Source: messages


class SendReserve(msgspec.Struct, frozen=True):
    """Answered by Reserved, ReserveRefused or PeerUnreachable."""


class SendRound(msgspec.Struct, frozen=True):
    """Answered by RoundDone, RoundFailed or PeerUnreachable. Blocks `[from_block, to_block)` are pinned."""

    round: int
    from_block: int
    to_block: int
    num_tokens: int


class SendCommit(msgspec.Struct, frozen=True):
    """Answered by Committed, Barred, Forgotten or PeerUnreachable. From here on the source is in doubt."""

    epoch: Epoch
    base: int
    computed_tokens: int
    from_block: int
    num_blocks: int


class SendWithdraw(msgspec.Struct, frozen=True):
    """Answered by Committed, Barred, Forgotten or PeerUnreachable."""


class SendQuery(msgspec.Struct, frozen=True):
    """Asks if the destination has decided. Answered by Unsettled, Committed, Barred, Forgotten or not at all."""


class SendCancel(msgspec.Struct, frozen=True):
    """Before Commit only. The answer does not matter."""

    reason: Reason


class SendAbort(msgspec.Struct, frozen=True):
    """Committed or Barred if it is answered."""


class SendClose(msgspec.Struct, frozen=True):
    """The answer does not matter."""


class AskFence(msgspec.Struct, frozen=True):
    """Asks the origin whether `epoch` has started. Answered by FenceStarted, FenceRaised, OriginFinished or not at
    all."""

    epoch: Epoch


# Source: the loop


class PinBlocks(msgspec.Struct, frozen=True):
    """Pin the final full blocks from `from_block` on. Answered by BlocksPinned or PinFailed."""

    from_block: int


class Freeze(msgspec.Struct, frozen=True):
    """Stop scheduling the request, let a step in flight drain, pin all blocks. Answered by Frozen or PinFailed."""


class Unfreeze(msgspec.Struct, frozen=True):
    """Schedule the request again, under `epoch` (None: under the one it has). Pins are not touched.

    The epoch holds at once, whenever the loop gets to it: a move that begins in between counts from it.
    """

    epoch: Epoch | None = None


class Unpin(msgspec.Struct, frozen=True):
    """Give every pin of this migration back, also one that is still under way."""


class Release(msgspec.Struct, frozen=True):
    """The request lives elsewhere: end it here without a word to the client, and keep a forwarding entry.

    From this moment, not only when the loop gets to it, this incarnation of the request cannot start another move.
    """


class Drop(msgspec.Struct, frozen=True):
    """Releases a request of which it is not known where it lives: no forwarding entry."""


# Destination: the loop, the movers


class ReserveBlocks(msgspec.Struct, frozen=True):
    """Answered by BlocksReserved or ReserveFailed."""


class GrowReservation(msgspec.Struct, frozen=True):
    """Room for `num_tokens` tokens. Answered by Grown or GrowFailed."""

    num_tokens: int


class Pull(msgspec.Struct, frozen=True):
    """Answered by PullDone or PullFailed."""

    job: int
    from_block: int
    to_block: int


class StopPull(msgspec.Struct, frozen=True):
    """Answered by PullQuiesced, always and only when no mover can write any more, however long that takes."""

    job: int


class Admit(msgspec.Struct, frozen=True):
    """Publish the hashes and hand the request to the scheduler. Answered by Admitted or AdmitFailed."""

    epoch: Epoch
    base: int
    computed_tokens: int


class RevokeAdmit(msgspec.Struct, frozen=True):
    """Take Admit back if the loop has not begun it: decided atomically with the loop. Admit's own answer says how."""


class FreeReservation(msgspec.Struct, frozen=True):
    """Give blocks and batch slot back. No mover can write them."""


class AbortAdmitted(msgspec.Struct, frozen=True):
    """End the admitted request without a word to the client."""


# Destination: answers. Each resolves every call of its kind that waits.


class AnswerReserve(msgspec.Struct, frozen=True):
    hit_blocks: int
    lease_s: float


class RefuseReserve(msgspec.Struct, frozen=True):
    reason: Reason
    detail: str = ""


class AnswerRound(msgspec.Struct, frozen=True):
    round: int
    num_bytes: int
    seconds: float
    lease_s: float


class RefuseRound(msgspec.Struct, frozen=True):
    round: int
    reason: Reason
    detail: str = ""


class AnswerCommit(msgspec.Struct, frozen=True):
    """COMMITTED, BARRED (with the reason) or UNKNOWN."""

    state: Settlement
    reason: Reason | None = None
    detail: str = ""


class AnswerSettle(msgspec.Struct, frozen=True):
    """The answer to Withdraw, Cancel, Abort, Close and Query, as `call` says."""

    call: Call
    state: Settlement
    reason: Reason | None = None


SourceEffect = (
    SetTimer
    | ClearTimer
    | SendReserve
    | SendRound
    | SendCommit
    | SendWithdraw
    | SendQuery
    | SendCancel
    | SendAbort
    | SendClose
    | AskFence
    | PinBlocks
    | Freeze
    | Unfreeze
    | Unpin
    | Release
    | Drop
)
DestinationEffect = (
    SetTimer
    | ClearTimer
    | ReserveBlocks
    | GrowReservation
    | Pull
    | StopPull
    | Admit
    | RevokeAdmit
    | FreeReservation
    | AbortAdmitted
    | AnswerReserve
    | RefuseReserve
    | AnswerRound
    | RefuseRound
    | AnswerCommit
    | AnswerSettle
)
Effect = SourceEffect | DestinationEffect
