# SPDX-License-Identifier: Apache-2.0
"""The protocol's errors.

    MigrationError             a move that does not happen; carries a `Reason`
    └── Refused                the peer, or our own rules, refused; nothing was changed
    ProtocolError
    ├── LocalProtocolError     our own code drove a state machine wrongly
    └── RemoteProtocolError    a peer sent what its state does not allow

`Reason` is closed: every refusal and failure that a user can meet has a member.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Reasons why a request was not moved. The values are part of the wire protocol and of the command line's
    output."""

    # The request
    UNKNOWN_REQUEST = "unknown_request"
    REQUEST_FINISHED = "request_finished"
    REQUEST_ABORTED = "request_aborted"
    REQUEST_PREEMPTED = "request_preempted"
    ALREADY_MIGRATING = "already_migrating"
    HANDOVER_OPEN = "handover_open"
    NOT_STARTED = "not_started"
    PREFILL_RUNNING = "prefill_running"
    NOT_PORTABLE = "not_portable"
    INVALID_REQUEST = "invalid_request"
    LORA_NOT_AVAILABLE = "lora_not_available"
    REQUEST_TOO_LONG = "request_too_long"
    # The engines
    INCOMPATIBLE_ENGINE = "incompatible_engine"
    SAME_INSTANCE = "same_instance"
    WRONG_INSTANCE = "wrong_instance"
    DESTINATION_FULL = "destination_full"
    DESTINATION_BUSY = "destination_busy"
    DESTINATION_PAUSED = "destination_paused"
    DESTINATION_NEEDS_BLOCKS = "destination_needs_blocks"
    SOURCE_BUSY = "source_busy"
    SOURCE_PAUSED = "source_paused"
    SHUTTING_DOWN = "shutting_down"
    OTHER_WEIGHTS = "other_weights"
    # The way between them
    PEER_UNREACHABLE = "peer_unreachable"
    TRANSPORT_UNAVAILABLE = "transport_unavailable"
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    LEASE_EXPIRED = "lease_expired"
    UNAUTHENTICATED = "unauthenticated"
    ADDRESS_REFUSED = "address_refused"
    # The protocol
    STALL_BUDGET = "stall_budget"
    TOO_MANY_ROUNDS = "too_many_rounds"
    BARRED = "barred"
    CANCELLED = "cancelled"
    UNKNOWN_MIGRATION = "unknown_migration"
    OWNER_LOST = "owner_lost"
    INTERNAL = "internal"
    NOT_LEADER = "not_leader"
    ROLE_REFUSED = "role_refused"


class MigrationError(Exception):
    """A request was not moved. It continues where it was."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Refused(MigrationError):
    """A move was refused before anything was changed."""


class ProtocolError(Exception):
    """The migration protocol was violated."""


class LocalProtocolError(ProtocolError):
    """An event that the machine's state does not allow, sent by our own code. The machine is unchanged."""


class RemoteProtocolError(ProtocolError):
    """A peer's message that the protocol does not allow. The message is ignored."""
