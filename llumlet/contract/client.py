# SPDX-License-Identifier: Apache-2.0
"""A typed client of one llumlet, for schedulers, peers and the command line.

Every call has a deadline and none is repeated, as only the caller knows whether a repetition is harmless. A deadline
that passes, or a connection that breaks, raises `LlumletUnreachable` and says nothing about the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self, TypeVar, cast

import grpc
from grpc import aio

from llumlet.contract import types
from llumlet.contract.channels import RenewedChannel
from llumlet.contract.errors import REASON_METADATA, LlumletCallFailed, LlumletError, LlumletUnreachable, NotALlumlet
from llumlet.contract.proto.llumlet_pb2_grpc import LlumletStub, PeerStub
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials

T = TypeVar("T")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from the call to its answer, by kind of call."""

    read: float = 5.0
    """Status, metadata, list of requests, and how much of one is cached."""
    act: float = 5.0
    """Abort, and calling moves off."""
    move: float = 600.0
    """A whole stream of Migrate or MigrateIn. The moves go on when it passes."""
    watch: float = 3600.0
    """A whole stream of WatchCache."""
    reserve: float = 10.0
    """The destination builds the request, its grammar included. Reserve and Adopt."""
    copy: float = 30.0
    """A round of copying, or the last copy of Commit."""
    settle: float = 2.0
    """Withdraw, Cancel, Abort, Close, Query: no bytes move."""


DEADLINES: Final = Deadlines()

IDLE_SECONDS = 30.0
"""Time after which an unused connection is closed, so that in a large cluster not every pair stays connected. The
calling side closes it: a server might do so while a call is on its way. (gRPC's own client limit,
grpc.client_idle_timeout_ms, works from the first idle time on only in 1.85.)"""


class LlumletClient:
    """A connection to the llumlet at `address` (HOST:PORT), opened by a call and closed when it was idle for a while.

    Make it on the event loop that uses it, and close it (`async with`, or `close`). With TLS, nothing is said to a
    server before it has shown a certificate for this address. Raises ValueError for an address that is none. The
    methods raise `LlumletError` (the llumlet said no) or `LlumletUnreachable` (no answer).
    """

    def __init__(
        self, address: str | Address, deadlines: Deadlines = DEADLINES, *, credentials: Credentials = NONE
    ) -> None:
        parsed = address if isinstance(address, Address) else Address.parse(address)
        self.address = str(parsed)
        self._deadlines = deadlines
        self._credentials = credentials
        self._channel = RenewedChannel(credentials, parsed)
        self._calls = 0
        self._idle: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- Llumlet ---

    def migrate(
        self, request: types.MigrateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[types.MigrateEvent, None]:
        """Yields events, the summary last. Leaving the iteration does not stop the moves."""
        return self._events(lambda: self._llumlet.Migrate, request, deadline_s or self._deadlines.move)

    def migrate_in(
        self, request: types.MigrateInRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[types.MigrateEvent, None]:
        return self._events(lambda: self._llumlet.MigrateIn, request, deadline_s or self._deadlines.move)

    def drain(
        self, request: types.DrainRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[types.DrainProgress, None]:
        """Yields progress, `done` last. Leaving the iteration does not stop the drain."""
        return self._events(lambda: self._llumlet.Drain, request, deadline_s or self._deadlines.move)

    async def abort(self, request: types.AbortRequest, *, deadline_s: float | None = None) -> types.AbortResponse:
        return await self._answer(self._llumlet.Abort, request, deadline_s or self._deadlines.act)

    async def abort_migrate_in(
        self, request: types.AbortMigrateInRequest, *, deadline_s: float | None = None
    ) -> types.AbortMigrateInResponse:
        return await self._answer(self._llumlet.AbortMigrateIn, request, deadline_s or self._deadlines.act)

    async def get_instance_status(self, *, deadline_s: float | None = None) -> types.InstanceStatus:
        return await self._answer(
            self._llumlet.GetInstanceStatus, types.GetInstanceStatusRequest(), deadline_s or self._deadlines.read
        )

    async def get_instance_metadata(self, *, deadline_s: float | None = None) -> types.InstanceMetadata:
        return await self._answer(
            self._llumlet.GetInstanceMetadata, types.GetInstanceMetadataRequest(), deadline_s or self._deadlines.read
        )

    async def list_requests(self, *, deadline_s: float | None = None) -> types.ListRequestsResponse:
        return await self._answer(
            self._llumlet.ListRequests, types.ListRequestsRequest(), deadline_s or self._deadlines.read
        )

    def watch_cache(
        self, request: types.WatchCacheRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[types.CacheChanges, None]:
        """Yields the contents of the prefix cache, then changes, until the deadline."""
        return self._events(lambda: self._llumlet.WatchCache, request, deadline_s or self._deadlines.watch)

    # --- Peer ---

    async def reserve(self, request: types.ReserveRequest, *, deadline_s: float | None = None) -> types.ReserveResponse:
        return await self._answer(self._peer.Reserve, request, deadline_s or self._deadlines.reserve)

    async def copy_round(
        self, request: types.CopyRoundRequest, *, deadline_s: float | None = None
    ) -> types.CopyRoundResponse:
        return await self._answer(self._peer.CopyRound, request, deadline_s or self._deadlines.copy)

    async def commit(self, request: types.CommitRequest, *, deadline_s: float | None = None) -> types.CommitResponse:
        return await self._answer(self._peer.Commit, request, deadline_s or self._deadlines.copy)

    async def withdraw(self, request: types.SettleRequest, *, deadline_s: float | None = None) -> types.SettleResponse:
        return await self._answer(self._peer.Withdraw, request, deadline_s or self._deadlines.settle)

    async def cancel(self, request: types.SettleRequest, *, deadline_s: float | None = None) -> types.SettleResponse:
        return await self._answer(self._peer.Cancel, request, deadline_s or self._deadlines.settle)

    async def abort_handover(
        self, request: types.SettleRequest, *, deadline_s: float | None = None
    ) -> types.SettleResponse:
        return await self._answer(self._peer.Abort, request, deadline_s or self._deadlines.settle)

    async def close_handover(
        self, request: types.SettleRequest, *, deadline_s: float | None = None
    ) -> types.SettleResponse:
        return await self._answer(self._peer.Close, request, deadline_s or self._deadlines.settle)

    async def query(self, request: types.SettleRequest, *, deadline_s: float | None = None) -> types.SettleResponse:
        return await self._answer(self._peer.Query, request, deadline_s or self._deadlines.settle)

    async def adopt(self, request: types.AdoptRequest, *, deadline_s: float | None = None) -> types.AdoptResponse:
        return await self._answer(self._peer.Adopt, request, deadline_s or self._deadlines.reserve)

    async def cached_prefix(
        self, request: types.CachedPrefixRequest, *, deadline_s: float | None = None
    ) -> types.CachedPrefixResponse:
        return await self._answer(self._peer.CachedPrefix, request, deadline_s or self._deadlines.read)

    async def claim(self, request: types.ClaimRequest, *, deadline_s: float | None = None) -> types.ClaimResponse:
        return await self._answer(self._peer.Claim, request, deadline_s or self._deadlines.settle)

    async def end_claim(
        self, request: types.EndClaimRequest, *, deadline_s: float | None = None
    ) -> types.EndClaimResponse:
        return await self._answer(self._peer.EndClaim, request, deadline_s or self._deadlines.settle)

    # --- answers ---

    async def _answer(self, method: Callable[..., Awaitable[T]], request: object, seconds: float) -> T:
        with self._in_use():
            try:
                return await method(request, timeout=seconds, metadata=self._credentials.call_metadata)
            except aio.AioRpcError as error:
                raise failure_of(error, self.address) from error

    async def _events(
        self, method: Callable[[], aio.UnaryStreamMultiCallable[T, E]], request: T, seconds: float
    ) -> AsyncGenerator[E, None]:
        with self._in_use():
            call = method()(request, timeout=seconds, metadata=self._credentials.call_metadata)
            try:
                async for event in call:
                    yield event
            except aio.AioRpcError as error:
                raise failure_of(error, self.address) from error
            finally:
                call.cancel()

    # --- the connection ---

    @property
    def _llumlet(self) -> LlumletStub:
        return LlumletStub(self._channel.get())

    @property
    def _peer(self) -> PeerStub:
        return PeerStub(self._channel.get())

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self._calls += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._channel.rest)


def failure_of(error: aio.AioRpcError, address: str) -> LlumletCallFailed:
    """Our exception for gRPC's. Only an error with a reason is the llumlet's own answer."""
    details = error.details() or error.code().name.lower()
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    reason = next((str(value) for key, value in metadata if key == REASON_METADATA), None)
    if reason:
        try:
            return LlumletError(types.parse_reason(reason), details, address)
        except ValueError:
            unknown = f"{details} (reason {reason!r}, unknown to this version)"
            return LlumletError(types.Reason.INTERNAL, unknown, address)
    match error.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotALlumlet(address, f"the gRPC server there is not a llumlet ({details})")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return LlumletUnreachable(address, "no answer before the deadline", timed_out=True)
        case grpc.StatusCode.UNAVAILABLE if "parsing HTTP/2" in details:
            return NotALlumlet(address, "what listens there does not speak gRPC")
        case grpc.StatusCode.UNAVAILABLE:
            # "failed to connect to all addresses; last error: UNKNOWN: ipv4:…: Failed to connect to
            # remote host: Connection refused": only the end says something.
            cause = details.rpartition("last error: ")[2].rpartition("remote host: ")[2]
            return LlumletUnreachable(address, _handshake_problem(details) or cause)
        case code:
            return LlumletUnreachable(address, f"{details} ({code.name})")


def _handshake_problem(details: str) -> str | None:
    """The likely cause of a connection that failed because of credentials."""
    return next((sentence for sign, sentence in _HANDSHAKE_PROBLEMS if sign in details), None)


_HANDSHAKE_PROBLEMS: Final = (
    ("WRONG_VERSION_NUMBER", "it does not speak TLS (was it started with --llumlet-tls-cert?)"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in --llumlet-tls-ca: no TLS handshake"),
    ("Hostname Verification", "its certificate does not name this address: no TLS handshake"),
    (
        "Socket closed",
        "it closed the connection: it went away, or it wants TLS (--llumlet-tls-cert) or another certificate",
    ),
)
