# SPDX-License-Identifier: Apache-2.0
"""The messages and enums of `llumlet.proto`, and the few things around them that everybody needs.

An enum member is an int, written `Reason.DESTINATION_FULL`, `RequestInfo.DECODE`. Its word, as
people and metrics see it, is `word(Reason, value)`: the lower-case name. The enums are open on the
wire: a newer peer may send a number that `word` then shows as such.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

from llumlet.proto.llumlet_pb2 import (
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
    """The lower-case name of an enum's member; the number if this version does not know it."""
    try:
        return enum.Name(value).lower()
    except ValueError:
        return str(value)


def reason_word(reason: Reason) -> str:
    """Word of a reason: `destination_full` for `Reason.DESTINATION_FULL`; empty for `REASON_NONE`."""
    return "" if reason == Reason.REASON_NONE else word(Reason, reason)


def parse_reason(text: str) -> Reason:
    """The opposite of `reason_word`. Raises ValueError for a word that is no reason."""
    return cast(Reason, Reason.Value(text.upper())) if text else Reason.REASON_NONE


class Address(NamedTuple):
    """The host and port at which a llumlet listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that `HOST:PORT` or `[IPV6]:PORT` names. Raises ValueError that says what is wrong."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not HOST:PORT")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 address as [ADDRESS]:PORT")
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r}: the port must be a number from 1 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
