# SPDX-License-Identifier: Apache-2.0
"""The two gRPC services around an `Agent`: they validate, call, and translate errors.

This is the outermost loop of a call: every error of the agent ends here, as a gRPC status with a reason.

A call outlives its caller: a move must not stop because its caller has left, and a Commit must not be cut because the
source's deadline passed. So the agent's part of a call is a task of its own, for which the RPC handler only waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message
from grpc import aio

from llumlet.contract import types, validation
from llumlet.contract.agent import Agent, Destination, Operator, Report
from llumlet.contract.errors import REASON_METADATA, LlumletError
from llumlet.contract.proto import llumlet_pb2_grpc
from llumlet.process.tasks import cancel

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R")
S = TypeVar("S")
Context = aio.ServicerContext[Any, Any]

MAX_DETAIL_CHARACTERS = 1000


async def tell(context: Context, message: Message) -> None:
    """Writes a message of a stream. A caller that has left ends the call, as its cancellation does, and is no error."""
    try:
        await context.write(message)
    except aio.InternalError as error:  # what a write gives that comes before the news of the caller's end
        raise asyncio.CancelledError(str(error)) from error


class DetachedCalls:
    """The agent's calls in progress, those without a caller included."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call, name=f"llumlet {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settled(self, task: asyncio.Task[Any]) -> None:
        """Wait until `task` is done, however it ends. Being cancelled here leaves it running."""
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                self.abandon(task)

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Leaves `task` without a caller: its failure is only logged."""
        logger.info("the caller of %s left; the call goes on", task.get_name())
        task.add_done_callback(_log_failure)

    async def stop(self, grace_s: float) -> None:
        """Give the calls `grace_s` seconds to end, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await cancel(*self._tasks)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    match task.exception():
        case None:
            pass
        case LlumletError() as refusal:
            logger.info("%s, whose caller had left, was refused: %s", task.get_name(), refusal)
        case error:
            logger.error("%s, whose caller had left, failed", task.get_name(), exc_info=error)


class _Calls:
    """The common part of both services: it runs one call of the agent and answers it."""

    def __init__(self, calls: DetachedCalls) -> None:
        self._calls = calls

    async def _answer(
        self,
        context: Context,
        name: str,
        request: R,
        faults_of: Callable[[R], list[str]],
        call: Callable[[R], Coroutine[Any, Any, T]],
    ) -> T:
        await _require_legal(context, faults_of(request))
        task = self._calls.start(name, call(request))
        await self._calls.settled(task)
        return await _outcome(context, task)

    async def _stream(
        self,
        context: Context,
        name: str,
        request: R,
        faults_of: Callable[[R], list[str]],
        call: Callable[[R, Callable[[P], None]], Coroutine[Any, Any, S]],
        event: Callable[[P], Message],
        last: Callable[[S], Message],
    ) -> None:
        await _require_legal(context, faults_of(request))
        # None marks the end. A few events per phase of each request: the queue needs no bound.
        events: asyncio.Queue[P | None] = asyncio.Queue()
        listening = True

        def report(progress: P) -> None:
            if listening:
                events.put_nowait(progress)

        task = self._calls.start(name, call(request, report))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (progress := await events.get()) is not None:
                await tell(context, event(progress))
        finally:
            listening = False
            if not task.done():
                self._calls.abandon(task)
        await tell(context, last(await _outcome(context, task)))


class _Terms:
    """The highest term of a rescheduler that one llumlet has seen: orders of one that is not the leader any more are
    refused.

    Each leader has a term that is higher than those before it. One that stood still in the middle of a pass, and goes
    on when another leads, would move requests by a view that is gone.
    """

    def __init__(self) -> None:
        self._highest = 0

    def check(self, term: int) -> None:
        """Takes the term of an order; 0 is a person's, and always taken. Raises LlumletError (`not_leader`)."""
        if 0 < term < self._highest:
            detail = f"a rescheduler of term {self._highest} gives the orders, not {term}"
            raise LlumletError(types.Reason.NOT_LEADER, detail)
        self._highest = max(self._highest, term)


class LlumletServicer(_Calls, llumlet_pb2_grpc.LlumletServicer):
    def __init__(self, agent: Operator, calls: DetachedCalls) -> None:
        super().__init__(calls)
        self._agent = agent
        self._terms = _Terms()

    async def Migrate(self, request: types.MigrateRequest, context: Context) -> None:
        await self._stream(context, "Migrate", request, validation.migrate_faults, self._migrate, _progress, _summary)

    async def _migrate(self, request: types.MigrateRequest, report: Report) -> types.MoveSummary:
        self._terms.check(request.leader_term)
        return await self._agent.migrate(request, report)

    async def MigrateIn(self, request: types.MigrateInRequest, context: Context) -> None:
        await self._stream(
            context, "MigrateIn", request, validation.migrate_in_faults, self._agent.migrate_in, _progress, _summary
        )

    async def Drain(self, request: types.DrainRequest, context: Context) -> None:
        await self._stream(context, "Drain", request, validation.drain_faults, self._agent.drain, _itself, _itself)

    async def Abort(self, request: types.AbortRequest, context: Context) -> types.AbortResponse:
        return await self._answer(context, "Abort", request, validation.abort_faults, self._agent.abort)

    async def AbortMigrateIn(
        self, request: types.AbortMigrateInRequest, context: Context
    ) -> types.AbortMigrateInResponse:
        faults_of, call = validation.abort_migrate_in_faults, self._agent.abort_migrate_in
        return await self._answer(context, "AbortMigrateIn", request, faults_of, call)

    async def GetInstanceStatus(
        self, request: types.GetInstanceStatusRequest, context: Context
    ) -> types.InstanceStatus:
        return await self._look(context, "GetInstanceStatus", self._agent.get_instance_status)

    async def GetInstanceMetadata(
        self, request: types.GetInstanceMetadataRequest, context: Context
    ) -> types.InstanceMetadata:
        return await self._look(context, "GetInstanceMetadata", self._agent.get_instance_metadata)

    async def ListRequests(self, request: types.ListRequestsRequest, context: Context) -> types.ListRequestsResponse:
        return await self._look(context, "ListRequests", self._agent.list_requests)

    async def _look(self, context: Context, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._answer(context, name, None, lambda _: [], lambda _: call())

    async def WatchCache(self, request: types.WatchCacheRequest, context: Context) -> None:
        await _require_legal(context, validation.watch_cache_faults(request))
        try:
            async with aclosing(self._agent.watch_cache(request)) as stream:
                async for changes in stream:
                    await tell(context, changes)
        except LlumletError as refusal:
            await refuse(context, refusal)


class PeerServicer(_Calls, llumlet_pb2_grpc.PeerServicer):
    def __init__(self, agent: Destination, calls: DetachedCalls) -> None:
        super().__init__(calls)
        self._agent = agent

    async def Reserve(self, request: types.ReserveRequest, context: Context) -> types.ReserveResponse:
        return await self._answer(context, "Reserve", request, validation.reserve_faults, self._agent.reserve)

    async def CopyRound(self, request: types.CopyRoundRequest, context: Context) -> types.CopyRoundResponse:
        return await self._answer(context, "CopyRound", request, validation.copy_round_faults, self._agent.copy_round)

    async def Commit(self, request: types.CommitRequest, context: Context) -> types.CommitResponse:
        return await self._answer(context, "Commit", request, validation.commit_faults, self._agent.commit)

    async def Withdraw(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._answer(context, "Withdraw", request, validation.settle_faults, self._agent.withdraw)

    async def Cancel(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._answer(context, "Cancel", request, validation.settle_faults, self._agent.cancel)

    async def Abort(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._answer(context, "Peer.Abort", request, validation.settle_faults, self._agent.abort_handover)

    async def Close(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._answer(context, "Close", request, validation.settle_faults, self._agent.close_handover)

    async def Query(self, request: types.SettleRequest, context: Context) -> types.SettleResponse:
        return await self._answer(context, "Query", request, validation.settle_faults, self._agent.query)

    async def Adopt(self, request: types.AdoptRequest, context: Context) -> types.AdoptResponse:
        given_up = asyncio.Event()
        try:
            return await self._answer(
                context, "Adopt", request, validation.adopt_faults, lambda asked: self._agent.adopt(asked, given_up)
            )
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def CachedPrefix(self, request: types.CachedPrefixRequest, context: Context) -> types.CachedPrefixResponse:
        faults_of, call = validation.cached_prefix_faults, self._agent.cached_prefix
        return await self._answer(context, "CachedPrefix", request, faults_of, call)

    async def Claim(self, request: types.ClaimRequest, context: Context) -> types.ClaimResponse:
        return await self._answer(context, "Claim", request, validation.claim_faults, self._agent.claim)

    async def EndClaim(self, request: types.EndClaimRequest, context: Context) -> types.EndClaimResponse:
        return await self._answer(context, "EndClaim", request, validation.end_claim_faults, self._agent.end_claim)


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


async def _require_legal(context: Context, faults: list[str]) -> None:
    if faults:
        await refuse(context, LlumletError(types.Reason.INVALID_REQUEST, "; ".join(faults)))


async def _outcome(context: Context, task: asyncio.Task[T]) -> T:  # noqa: RET503 - `refuse` never returns
    """The result of a finished `task`; an exception of it ends the call."""
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
