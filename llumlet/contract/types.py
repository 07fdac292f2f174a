# SPDX-License-Identifier: Apache-2.0
"""The messages and enums of `llumlet.proto`, their limits and their words.

An enum member is an int, written `Reason.DESTINATION_FULL`, `RequestInfo.DECODE`. Its word, as
people and metrics see it, is `word(Reason, value)`: the lower-case name. The enums are open on the
wire: a newer peer may send a number that `word` then shows as such.
"""

from __future__ import annotations

from typing import Protocol, cast

from llumlet.contract.proto.llumlet_pb2 import (
    AbortMigrateInRequest,
    AbortMigrateInResponse,
    AbortRequest,
    AbortResponse,
    AdoptRequest,
    AdoptResponse,
    CacheChanges,
    CachedPrefixRequest,
    CachedPrefixResponse,
    ClaimRequest,
    ClaimResponse,
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    CopyRoundResponse,
    DrainProgress,
    DrainRequest,
    EndClaimRequest,
    EndClaimResponse,
    Epoch,
    GetInstanceMetadataRequest,
    GetInstanceStatusRequest,
    Handover,
    Health,
    Holder,
    InstanceMetadata,
    InstanceReport,
    InstanceState,
    InstanceStatus,
    ListRequestsRequest,
    ListRequestsResponse,
    MigrateEvent,
    MigrateInRequest,
    MigrateRequest,
    MigrationReqPolicy,
    MigrationType,
    Mode,
    MoveInfo,
    MovePhase,
    MoveProgress,
    MoveSummary,
    PeerInfo,
    PeersRequest,
    PeersResponse,
    Reason,
    ReportTaken,
    RequestInfo,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
    StepSample,
    ViewChange,
    WatchCacheRequest,
    WatchRequest,
)

MAX_MESSAGE_BYTES = 65 << 20
"""Limit of one message, either way: a request of a million tokens (5 MB), with 48 MiB of images."""

NOT_WELL = frozenset({Health.SUSPECT, Health.HUNG})
"""Health of an engine to which nothing new is sent."""

OUTCOMES = frozenset({MovePhase.MOVED, MovePhase.STAYED, MovePhase.GONE, MovePhase.LOST})
"""The phases that end a move."""


class _Enum(Protocol):
    def Name(self, number: int) -> str: ...


def word(enum: _Enum, value: int) -> str:
    """The lower-case name of an enum's member, or the number if this version does not know it."""
    try:
        return enum.Name(value).lower()
    except ValueError:
        return str(value)


def reason_word(reason: Reason) -> str:
    """Word of a reason: `destination_full` for `Reason.DESTINATION_FULL`; empty for `REASON_NONE`."""
    return "" if reason == Reason.REASON_NONE else word(Reason, reason)


def parse_reason(text: str) -> Reason:
    """The inverse of `reason_word`. Raises ValueError for an unknown word."""
    return cast(Reason, Reason.Value(text.upper())) if text else Reason.REASON_NONE
