# SPDX-License-Identifier: Apache-2.0
"""The events of a migration: the input alphabet of the two machines.

An event says that something *has happened*: a peer's message or answer arrived, the engine's loop did what it was asked
to, a timer fired. Times are seconds, block indices are positions in the request's block table (not ids of the pool),
ranges are half-open.
"""

from __future__ import annotations

import enum

import msgspec

from llumlet.protocol.errors import Reason
from llumlet.protocol.ids import Epoch


class Settlement(enum.StrEnum):
    """The state of a destination's record of a migration. Only COMMITTED and BARRED are binding, and they are final."""

    PENDING = "pending"
    COMMITTED = "committed"
    BARRED = "barred"
    UNKNOWN = "unknown"


class Call(enum.StrEnum):
    """Messages of a source: to the destination, and (fence) to the origin."""

    RESERVE = "reserve"
    ROUND = "round"
    COMMIT = "commit"
    WITHDRAW = "withdraw"
    CANCEL = "cancel"
    ABORT = "abort"
    CLOSE = "close"
    QUERY = "query"
    FENCE = "fence"


class Gone(enum.StrEnum):
    """Ways in which a request leaves the running requests of its engine by itself."""

    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


# Both machines


class TimerFired(msgspec.Struct, frozen=True):
    """A timer asked for with `SetTimer(name)` ran out. One that was cleared meanwhile is ignored by the machine."""

    name: str


class CancelRequested(msgspec.Struct, frozen=True):
    """Source: an operator calls the move off. Destination: the source gave up, or an operator calls the move off."""

    reason: Reason = Reason.CANCELLED
    detail: str = ""


# Source: the request and the loop of its engine


class Start(msgspec.Struct, frozen=True):
    """Begin."""


class BlocksPinned(msgspec.Struct, frozen=True):
    """`PinBlocks` was carried out: full blocks `[from_block, frontier_blocks)` hold final KV and are pinned."""

    frontier_blocks: int
    num_tokens: int


class PinFailed(msgspec.Struct, frozen=True):
    """`PinBlocks` or `Freeze` could not be carried out; nothing was pinned or frozen."""

    reason: Reason
    detail: str = ""


class Frozen(msgspec.Struct, frozen=True):
    """The request is out of the schedule, no step in flight touches it, and all its blocks are pinned.

    `num_blocks` hold its `computed_tokens`; `base` counts its output tokens.
    """

    num_tokens: int
    computed_tokens: int
    num_blocks: int
    base: int


class RequestGone(msgspec.Struct, frozen=True):
    """The request finished, was aborted or was preempted by its own engine. Its pins are still held."""

    kind: Gone


# Source: answers of the destination


class Reserved(msgspec.Struct, frozen=True):
    """The destination holds blocks. Its lease counts from the moment this event is handled."""

    hit_blocks: int
    lease_s: float
    incarnation: str


class ReserveRefused(msgspec.Struct, frozen=True):
    """The destination will not take the request."""

    reason: Reason
    detail: str = ""


class RoundDone(msgspec.Struct, frozen=True):
    """Every byte of the round is at the destination. Renews the lease."""

    round: int
    num_bytes: int
    seconds: float


class RoundFailed(msgspec.Struct, frozen=True):
    """The destination answered a round with a refusal."""

    round: int
    reason: Reason
    detail: str = ""


class Committed(msgspec.Struct, frozen=True):
    """The destination owns the request: its answer to Commit, Withdraw or Abort."""

    incarnation: str


class Barred(msgspec.Struct, frozen=True):
    """The destination will never own it under this migration: its answer to Commit, Withdraw or Abort."""

    reason: Reason
    incarnation: str
    detail: str = ""


class Forgotten(msgspec.Struct, frozen=True):
    """The destination answers that it does not know the migration. Not a no."""


class Unsettled(msgspec.Struct, frozen=True):
    """The destination answers that it has not decided."""


class PeerUnreachable(msgspec.Struct, frozen=True):
    """No answer to `call`: what became of it is not known."""

    call: Call
    detail: str = ""


# Source: answers of the origin


class FenceStarted(msgspec.Struct, frozen=True):
    """The origin has output of the new epoch, or of a later one: another engine owns the request."""


class FenceRaised(msgspec.Struct, frozen=True):
    """The origin has none and bars the new epoch for good; the source continues under `epoch`."""

    epoch: Epoch


class OriginFinished(msgspec.Struct, frozen=True):
    """The request has no client any more."""


# Destination: messages of the source


class ReserveRequested(msgspec.Struct, frozen=True):
    """The source asks for room."""


class RoundRequested(msgspec.Struct, frozen=True):
    """Blocks `[from_block, to_block)` are final and pinned at the source; the request has `num_tokens` by now."""

    round: int
    from_block: int
    to_block: int
    num_tokens: int


class CommitRequested(msgspec.Struct, frozen=True):
    """The source is frozen: pull `[from_block, num_blocks)`, then own the request from output index `base` on.

    `computed_tokens` 0 means that no KV is carried: compute it from the tokens.
    """

    epoch: Epoch
    base: int
    computed_tokens: int
    from_block: int
    num_blocks: int


class WithdrawRequested(msgspec.Struct, frozen=True):
    """Compare-and-swap PENDING -> BARRED."""


class AbortRequested(msgspec.Struct, frozen=True):
    """The request itself is over, or is no longer wanted here."""


class CloseRequested(msgspec.Struct, frozen=True):
    """The source has let the request go."""


class QueryRequested(msgspec.Struct, frozen=True):
    """Changes nothing."""


# Destination: the loop, the movers


class BlocksReserved(msgspec.Struct, frozen=True):
    """`num_blocks` are held, the first `hit_blocks` of them shared with the prefix cache: nobody may write those."""

    hit_blocks: int
    num_blocks: int


class ReserveFailed(msgspec.Struct, frozen=True):
    """The reservation failed: nothing is held."""

    reason: Reason
    detail: str = ""


class Grown(msgspec.Struct, frozen=True):
    """The reservation now has `num_blocks` blocks."""

    num_blocks: int


class GrowFailed(msgspec.Struct, frozen=True):
    """The reservation is as it was."""

    reason: Reason
    detail: str = ""


class PullDone(msgspec.Struct, frozen=True):
    """Every mover has read its last byte of `job`.

    `lease_valid`: the clock was read *after* that byte, and the lease had not run out. A process that was stopped and
    goes on may see this event before the timer's.
    """

    job: int
    num_bytes: int
    seconds: float
    lease_valid: bool = True


class PullFailed(msgspec.Struct, frozen=True):
    """A copy failed at one mover or more; others may still write."""

    job: int
    reason: Reason
    detail: str = ""


class PullQuiesced(msgspec.Struct, frozen=True):
    """The answer to `StopPull`: no mover writes for `job`, nor will."""

    job: int


class Admitted(msgspec.Struct, frozen=True):
    """The scheduler has the request. From here it may emit."""


class AdmitFailed(msgspec.Struct, frozen=True):
    """The request was not admitted, and will not be: refused by the loop, or taken back by `RevokeAdmit` in time. Still
    reserved."""

    reason: Reason
    detail: str = ""


class Revoked(msgspec.Struct, frozen=True):
    """The engine needs the reserved blocks for its own requests, or shuts down."""

    reason: Reason
    detail: str = ""


SourceEvent = (
    Start
    | BlocksPinned
    | PinFailed
    | Frozen
    | RequestGone
    | Reserved
    | ReserveRefused
    | RoundDone
    | RoundFailed
    | Committed
    | Barred
    | Forgotten
    | Unsettled
    | PeerUnreachable
    | FenceStarted
    | FenceRaised
    | OriginFinished
    | CancelRequested
    | TimerFired
)
DestinationEvent = (
    ReserveRequested
    | RoundRequested
    | CommitRequested
    | WithdrawRequested
    | CancelRequested
    | AbortRequested
    | CloseRequested
    | QueryRequested
    | BlocksReserved
    | ReserveFailed
    | Grown
    | GrowFailed
    | PullDone
    | PullFailed
    | PullQuiesced
    | Admitted
    | AdmitFailed
    | Revoked
    | TimerFired
)
Event = SourceEvent | DestinationEvent
