# SPDX-License-Identifier: Apache-2.0
"""The gRPC status of each reason. The only such table."""

from __future__ import annotations

from typing import Final

from grpc import StatusCode

from llumlet.contract.types import Reason

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
