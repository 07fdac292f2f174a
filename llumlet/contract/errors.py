# SPDX-License-Identifier: Apache-2.0
"""The errors of a call to a llumlet, and the gRPC status of each reason.

    LlumletCallFailed
    ├── LlumletError            the llumlet refused; `reason` says why
    └── LlumletUnreachable      no answer: the outcome of the call is unknown
        └── NotALlumlet         something else listens at that address

An agent raises only `LlumletError` on purpose; any other exception reaches the caller as `INTERNAL`.
"""

from __future__ import annotations

from typing import Final

from grpc import StatusCode

from llumlet.contract.types import Reason, reason_word

REASON_METADATA: Final = "llumlet-reason"
"""Key of the trailing metadata that holds the reason's word."""

STATUS_OF_REASON: Final[dict[Reason, StatusCode]] = {
    Reason.UNKNOWN_REQUEST: StatusCode.NOT_FOUND,
    Reason.REQUEST_FINISHED: StatusCode.FAILED_PRECONDITION,
    Reason.REQUEST_ABORTED: StatusCode.FAILED_PRECONDITION,
    Reason.REQUEST_PREEMPTED: StatusCode.FAILED_PRECONDITION,
    Reason.ALREADY_MIGRATING: StatusCode.ABORTED,
    Reason.HANDOVER_OPEN: StatusCode.ABORTED,
    Reason.NOT_STARTED: StatusCode.FAILED_PRECONDITION,
    Reason.PREFILL_RUNNING: StatusCode.FAILED_PRECONDITION,
    Reason.NOT_PORTABLE: StatusCode.FAILED_PRECONDITION,
    Reason.INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
    Reason.LORA_NOT_AVAILABLE: StatusCode.FAILED_PRECONDITION,
    Reason.REQUEST_TOO_LONG: StatusCode.FAILED_PRECONDITION,
    Reason.INCOMPATIBLE_ENGINE: StatusCode.FAILED_PRECONDITION,
    Reason.SAME_INSTANCE: StatusCode.INVALID_ARGUMENT,
    Reason.WRONG_INSTANCE: StatusCode.FAILED_PRECONDITION,
    Reason.DESTINATION_FULL: StatusCode.RESOURCE_EXHAUSTED,
    Reason.DESTINATION_BUSY: StatusCode.RESOURCE_EXHAUSTED,
    Reason.DESTINATION_PAUSED: StatusCode.FAILED_PRECONDITION,
    Reason.DESTINATION_NEEDS_BLOCKS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.SOURCE_BUSY: StatusCode.RESOURCE_EXHAUSTED,
    Reason.SOURCE_PAUSED: StatusCode.FAILED_PRECONDITION,
    Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
    Reason.OTHER_WEIGHTS: StatusCode.FAILED_PRECONDITION,
    Reason.PEER_UNREACHABLE: StatusCode.UNAVAILABLE,
    Reason.TRANSPORT_UNAVAILABLE: StatusCode.FAILED_PRECONDITION,
    Reason.TRANSFER_FAILED: StatusCode.ABORTED,
    Reason.DEADLINE: StatusCode.DEADLINE_EXCEEDED,
    Reason.LEASE_EXPIRED: StatusCode.ABORTED,
    Reason.UNAUTHENTICATED: StatusCode.UNAUTHENTICATED,
    Reason.ADDRESS_REFUSED: StatusCode.PERMISSION_DENIED,
    Reason.STALL_BUDGET: StatusCode.ABORTED,
    Reason.TOO_MANY_ROUNDS: StatusCode.ABORTED,
    Reason.BARRED: StatusCode.ABORTED,
    # Not StatusCode.CANCELLED: that is what a caller sees of its own cancellation.
    Reason.CANCELLED: StatusCode.ABORTED,
    Reason.UNKNOWN_MIGRATION: StatusCode.NOT_FOUND,
    Reason.OWNER_LOST: StatusCode.DATA_LOSS,
    Reason.INTERNAL: StatusCode.INTERNAL,
    Reason.NOT_LEADER: StatusCode.FAILED_PRECONDITION,
    Reason.ROLE_REFUSED: StatusCode.PERMISSION_DENIED,
}


class LlumletCallFailed(Exception):
    """Base of everything that `LlumletClient` raises.

    `address`: that of the called llumlet ("" if an agent raised it). `detail`: a sentence for people, with the relevant
    values.
    """

    def __init__(self, text: str, detail: str, address: str) -> None:
        super().__init__(text)
        self.detail = detail
        self.address = address


class LlumletError(LlumletCallFailed):
    """A refusal with a reason."""

    def __init__(self, reason: Reason, detail: str = "", address: str = "") -> None:
        self.reason = reason
        super().__init__(f"{self.word}: {detail}" if detail else self.word, detail, address)

    @property
    def word(self) -> str:
        return reason_word(self.reason)

    @property
    def code(self) -> StatusCode:
        return STATUS_OF_REASON[self.reason]


class LlumletUnreachable(LlumletCallFailed):
    """No answer from `address`, or none before the deadline (`timed_out`).

    The call may or may not have been obeyed.
    """

    def __init__(self, address: str, detail: str, *, timed_out: bool = False) -> None:
        super().__init__(f"{address}: {detail}", detail, address)
        self.timed_out = timed_out

    @property
    def nobody_listens(self) -> bool:
        """True if the host refuses connections to the port, so that the process is gone. A failed handshake is
        something else."""
        return "Connection refused" in self.detail


class NotALlumlet(LlumletUnreachable):
    """Something answers at `address`, but it does not speak this protocol."""
