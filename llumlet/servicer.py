# SPDX-License-Identifier: Apache-2.0
"""The two gRPC services, as a thin skin around an `Agent`: validate, call, translate errors.

This is the outermost loop of a call: whatever the agent raises ends here, as a gRPC status with a
reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message
from grpc import aio

from llumlet import types, validation
from llumlet.agent import Agent, Destination, Operator, Report
from llumlet.detached import DetachedCalls
from llumlet.errors import LlumletError
from llumlet.proto import llumlet_pb2_grpc
from llumlet.status_codes import REASON_METADATA
from llumlet.terms import Terms

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P")
S = TypeVar("S")
Context = aio.ServicerContext[Any, Any]

MAX_DETAIL_CHARACTERS = 1000


class _Calls:
    """What both services share: running one call of the agent and answering for it."""

    def __init__(self, calls: DetachedCalls) -> None:
        self._calls = calls

    async def _answer(
        self,
        context: Context,
        name: str,
        faults: list[str],
        call: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        if faults:
            await refuse(context, _invalid(faults))
        task = self._calls.start(name, call())
        await self._calls.settled(task)
        return await _outcome(context, task)

    async def _stream(
        self,
        context: Context,
        name: str,
        faults: list[str],
        call: Callable[[Callable[[P], None]], Coroutine[Any, Any, S]],
        event: Callable[[P], Message],
        last: Callable[[S], Message],
    ) -> None:
        if faults:
            await refuse(context, _invalid(faults))
        # None marks the end. A few events per phase of each request: the queue needs no bound.
        events: asyncio.Queue[P | None] = asyncio.Queue()
        listening = True

        def report(progress: P) -> None:
            if listening:
                events.put_nowait(progress)

        task = self._calls.start(name, call(report))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (progress := await events.get()) is not None:
                await context.write(event(progress))
        finally:
            listening = False
            if not task.done():
                self._calls.abandon(task)
        await context.write(last(await _outcome(context, task)))


class LlumletServicer(_Calls, llumlet_pb2_grpc.LlumletServicer):
    def __init__(self, agent: Operator, calls: DetachedCalls) -> None:
        super().__init__(calls)
        self._agent = agent
        self._terms = Terms()

    async def Migrate(self, request: types.MigrateRequest, context: Context) -> None:
        faults = validation.migrate_faults(request)
        await self._stream(
            context, "Migrate", faults, lambda report: self._migrate(request, report), _progress, _summary
        )

    async def _migrate(self, request: types.MigrateRequest, report: Report) -> types.MoveSummary:
        self._terms.check(request.leader_term)
        return await self._agent.migrate(request, report)

    async def MigrateIn(self, request: types.MigrateInRequest, context: Context) -> None:
        faults = validation.migrate_in_faults(request)
        await self._stream(
            context, "MigrateIn", faults, lambda report: self._agent.migrate_in(request, report), _progress, _summary
        )

    async def Drain(self, request: types.DrainRequest, context: Context) -> None:
        faults = validation.drain_faults(request)
        await self._stream(
            context, "Drain", faults, lambda report: self._agent.drain(request, report), _itself, _itself
        )

    async def Abort(self, request: types.AbortRequest, context: Context) -> types.AbortResponse:
        faults = validation.abort_faults(request)
        return await self._answer(context, "Abort", faults, lambda: self._agent.abort(request))

    async def AbortMigrateIn(
        self, request: types.AbortMigrateInRequest, context: Context
    ) -> types.AbortMigrateInResponse:
        faults = validation.abort_migrate_in_faults(request)
        return await self._answer(context, "AbortMigrateIn", faults, lambda: self._agent.abort_migrate_in(request))

    async def GetInstanceStatus(
        self, request: types.GetInstanceStatusRequest, context: Context
    ) -> types.InstanceStatus:
        return await self._answer(context, "GetInstanceStatus", [], self._agent.get_instance_status)

    async def GetInstanceMetadata(
        self, request: types.GetInstanceMetadataRequest, context: Context
    ) -> types.InstanceMetadata:
        return await self._answer(context, "GetInstanceMetadata", [], self._agent.get_instance_metadata)

    async def ListRequests(self, request: types.ListRequestsRequest, context: Context) -> types.ListRequestsResponse:
        return await self._answer(context, "ListRequests", [], self._agent.list_requests)

    async def WatchCache(self, request: types.WatchCacheRequest, context: Context) -> None:
        if faults := validation.watch_cache_faults(request):
            await refuse(context, _invalid(faults))
        try:
            async with aclosing(self._agent.watch_cache(request)) as stream:
                async for changes in stream:
                    await context.write(changes)
        except LlumletError as refusal:
            await refuse(context, refusal)


class PeerServicer(_Calls, llumlet_pb2_grpc.PeerServicer):
    def __init__(self, agent: Destination, calls: DetachedCalls) -> None:
        super().__init__(calls)
        self._agent = agent

    async def Reserve(self, request: types.ReserveRequest, context: Context) -> types.ReserveResponse:
        faults = validation.reserve_faults(request)
        return await self._answer(context, "Reserve", faults, lambda: self._agent.reserve(request))

    async def CopyRound(self, request: types.CopyRoundRequest, context: Context) -> types.CopyRoundResponse:
        faults = validation.copy_round_faults(request)
        return await self._answer(context, "CopyRound", faults, lambda: self._agent.copy_round(request))

    async def Commit(self, request: types.CommitRequest, context: Context) -> types.CommitResponse:
        faults = validation.commit_faults(request)
        return await self._answer(context, "Commit", faults, lambda: self._agent.commit(request))

    async def Withdraw(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._settle(context, "Withdraw", request, self._agent.withdraw)

    async def Cancel(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._settle(context, "Cancel", request, self._agent.cancel)

    async def Abort(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._settle(context, "Peer.Abort", request, self._agent.abort_handover)

    async def Close(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._settle(context, "Close", request, self._agent.close_handover)

    async def Query(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._settle(context, "Query", request, self._agent.query)

    async def Adopt(self, request: types.AdoptRequest, context: Context) -> types.AdoptResponse:
        faults = validation.adopt_faults(request)
        given_up = asyncio.Event()
        try:
            return await self._answer(context, "Adopt", faults, lambda: self._agent.adopt(request, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def Claim(self, request: types.ClaimRequest, context: Context) -> types.ClaimResponse:
        faults = validation.claim_faults(request)
        return await self._answer(context, "Claim", faults, lambda: self._agent.claim(request))

    async def EndClaim(self, request: types.EndClaimRequest, context: Context) -> types.EndClaimResponse:
        faults = validation.end_claim_faults(request)
        return await self._answer(context, "EndClaim", faults, lambda: self._agent.end_claim(request))

    async def _settle(
        self,
        context: Context,
        name: str,
        request: types.SettleRequest,
        call: Callable[[types.SettleRequest], Coroutine[Any, Any, types.SettleResponse]],
    ) -> types.SettleResponse:
        return await self._answer(context, name, validation.settle_faults(request), lambda: call(request))


def add_services(agent: Agent, server: aio.Server) -> DetachedCalls:
    """Register both services; returns their calls, to be stopped with the server."""
    calls = DetachedCalls()
    llumlet_pb2_grpc.add_LlumletServicer_to_server(LlumletServicer(agent, calls), server)
    llumlet_pb2_grpc.add_PeerServicer_to_server(PeerServicer(agent, calls), server)
    return calls


def _progress(progress: types.MoveProgress) -> types.MigrateEvent:
    return types.MigrateEvent(progress=progress)


def _summary(summary: types.MoveSummary) -> types.MigrateEvent:
    return types.MigrateEvent(summary=summary)


def _itself(progress: types.DrainProgress) -> types.DrainProgress:
    return progress


def _invalid(faults: list[str]) -> LlumletError:
    return LlumletError(types.Reason.INVALID_REQUEST, "; ".join(faults))


async def _outcome(context: Context, task: asyncio.Task[T]) -> T:  # noqa: RET503 - `refuse` never returns
    """The result of a `task` that is done; what it raised instead ends the call."""
    if task.cancelled():
        await refuse(context, LlumletError(types.Reason.SHUTTING_DOWN, "the llumlet is shutting down"))
    match task.exception():
        case None:
            return task.result()
        case LlumletError() as refusal:
            await refuse(context, refusal)
        case error:
            # The only place where an unforeseen exception of the agent may end.
            logger.error("%s failed", task.get_name(), exc_info=error)
            detail = f"{type(error).__name__}: {error} (the instance's log has the traceback)"
            await refuse(context, LlumletError(types.Reason.INTERNAL, detail))


async def refuse(context: Context, error: LlumletError) -> NoReturn:
    """End the call. Details may quote what the caller sent; a status that is too long would not get through."""
    await context.abort(error.code, error.detail[:MAX_DETAIL_CHARACTERS], ((REASON_METADATA, error.word),))
