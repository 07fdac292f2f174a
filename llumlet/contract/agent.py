# SPDX-License-Identifier: Apache-2.0
"""The interface that an engine implements to be a llumlet.

Contract of all methods:
- they are called on the event loop that called `server.serve`, several at a time;
- a call whose caller gives up (it left, its deadline passed) is **not** cancelled: it runs to its end and its answer is
  thrown away. Only the shutdown of the server cancels;
- arguments have passed `llumlet.contract.validation`: required ids are there, enums and ranges are legal.
  The agent checks that an id names this instance or a known request;
- a refusal is a raised `LlumletError`; any other exception reaches the caller as `INTERNAL` and the
  log with its trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from llumlet.contract import types

Report = Callable[[types.MoveProgress], None]
"""Passes one event on to the caller, if it is still there. Never blocks or raises; called on the
event loop with a message that is not changed afterwards."""


DrainReport = Callable[[types.DrainProgress], None]
"""Passes the progress of a drain on, under the same conditions as a `Report`."""


class Operator(Protocol):
    """Service `llumlet.Llumlet`: what schedulers and people ask for."""

    async def migrate(self, request: types.MigrateRequest, report: Report) -> types.MoveSummary:
        """Returns when every selected request is settled. Selecting none is no error."""
        ...

    async def migrate_in(self, request: types.MigrateInRequest, report: Report) -> types.MoveSummary:
        """Asks the source to move requests here, and passes its reports on."""
        ...

    async def drain(self, request: types.DrainRequest, report: DrainReport) -> types.DrainProgress:
        """Empty the instance and end it. Returns the last progress, right before the end."""
        ...

    async def abort(self, request: types.AbortRequest) -> types.AbortResponse: ...

    async def abort_migrate_in(self, request: types.AbortMigrateInRequest) -> types.AbortMigrateInResponse: ...

    async def get_instance_status(self) -> types.InstanceStatus: ...

    async def get_instance_metadata(self) -> types.InstanceMetadata: ...

    async def list_requests(self) -> types.ListRequestsResponse: ...

    def watch_cache(self, request: types.WatchCacheRequest) -> AsyncGenerator[types.CacheChanges, None]:
        """The contents of the prefix cache, and their changes. The only call that is cancelled when its caller
        leaves."""
        ...


class Destination(Protocol):
    """Service `llumlet.Peer`: the idempotent calls of a move's source, and an origin's calls `adopt` and
    `cached_prefix`."""

    async def reserve(self, request: types.ReserveRequest) -> types.ReserveResponse: ...

    async def copy_round(self, request: types.CopyRoundRequest) -> types.CopyRoundResponse: ...

    async def commit(self, request: types.CommitRequest) -> types.CommitResponse:
        """Returns COMMITTED or BARRED. After an error the source is in doubt and will withdraw."""
        ...

    async def withdraw(self, request: types.SettleRequest) -> types.SettleResponse: ...

    async def cancel(self, request: types.SettleRequest) -> types.SettleResponse: ...

    async def abort_handover(self, request: types.SettleRequest) -> types.SettleResponse: ...

    async def close_handover(self, request: types.SettleRequest) -> types.SettleResponse: ...

    async def query(self, request: types.SettleRequest) -> types.SettleResponse: ...

    async def adopt(self, request: types.AdoptRequest, given_up: asyncio.Event) -> types.AdoptResponse:
        """Starts a request whose owner is lost. Returns when the engine has it; not idempotent.

        `given_up` is set when the caller stops waiting and asks another engine, so that nothing should begin.
        """
        ...

    async def cached_prefix(self, request: types.CachedPrefixRequest) -> types.CachedPrefixResponse:
        """Tokens of a request in the prefix cache. An origin asks several engines and waits for none for long."""
        ...

    async def claim(self, request: types.ClaimRequest) -> types.ClaimResponse:
        """Gives up a request that the caller continues, and keeps its blocks for it to read. Not idempotent."""
        ...

    async def end_claim(self, request: types.EndClaimRequest) -> types.EndClaimResponse: ...


class Agent(Operator, Destination, Protocol):
    """Both services of one instance."""
