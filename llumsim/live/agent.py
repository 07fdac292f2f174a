# SPDX-License-Identifier: Apache-2.0
"""The llumlet of a simulated instance behind its gRPC service.

A move runs between two machines of the protocol in this process. The calls between llumlets (reserve, commit, adopt, …)
are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, NoReturn

from llumlet.contract import types
from llumlet.contract.agent import DrainReport, Report
from llumlet.contract.bridge import reason_of
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.process.credentials import Credentials
from llumlet.protocol import effects as do
from llumlet.protocol import events as on
from llumlet.protocol.events import Settlement
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.move.limits import Limits
from llumsim.engine.instance import ModelledInstance
from llumsim.live.world import World
from llumsim.moves.incoming import Arrivals, Offer
from llumsim.moves.llumlets import Llumlet
from llumsim.moves.outgoing import Departures

MAX_MOVES: Final = 4
"""Moves at a time, in each direction."""
_HOP_PS: Final = 0
_WANTED: Final = "as the test wants it"


class SimulatedAgent:
    """Implements `llumlet.contract.agent.Agent`."""

    def __init__(
        self,
        instance: ModelledInstance,
        world: World,
        status: Callable[[], types.InstanceStatus],
        leave: Callable[[], Awaitable[None]],
        credentials: Credentials,
    ) -> None:
        self.refusals: dict[str, types.Reason] = {}
        """Reasons to refuse, by method (`migrate`, `list_requests`, …; `reserve`, `commit`)."""
        self.delays: dict[str, float] = {}
        """Delay in seconds, by method."""
        self.calls: list[str] = []
        """Methods called so far."""
        limits = Limits(max_requests=MAX_MOVES)
        departures = Departures(instance, _HOP_PS, world.owner, limits)
        arrivals = _Steered(self, instance, world, limits)
        self.llumlet = Llumlet(instance, departures, arrivals, ended=lambda move: None)
        self._instance = instance
        self._world = world
        self._status = status
        self._leave = leave
        self._credentials = credentials

    async def get_instance_status(self) -> types.InstanceStatus:
        await self._enter("get_instance_status")
        return self._status()

    async def get_instance_metadata(self) -> types.InstanceMetadata:
        await self._enter("get_instance_metadata")
        return self._instance.metadata

    async def list_requests(self) -> types.ListRequestsResponse:
        await self._enter("list_requests")
        return self.llumlet.list_requests()

    async def abort(self, request: types.AbortRequest) -> types.AbortResponse:
        await self._enter("abort")
        results = []
        for request_id in request.request_ids:
            found = self._world.requests.get(request_id)
            outcome = types.AbortResponse.NOT_FOUND
            if found is not None and found.owner == self._instance.id:
                self._world.abort(found)
                outcome = types.AbortResponse.ABORTED
            results.append(types.AbortResponse.Result(request_id=request_id, outcome=outcome))
        return types.AbortResponse(results=results)

    async def migrate_in(self, request: types.MigrateInRequest, report: Report) -> types.MoveSummary:
        await self._enter("migrate_in")
        wanted = types.MigrateRequest()
        wanted.CopyFrom(request.request)
        here = self._instance.metadata
        wanted.dst_engine_id = here.instance_id
        wanted.dst_engine_ip, wanted.dst_engine_port = here.ip, here.llumlet_port
        async with LlumletClient(request.src_address, credentials=self._credentials) as source:
            async for event in source.migrate(wanted):
                if event.HasField("summary"):
                    return event.summary
                report(event.progress)
        raise LlumletError(types.Reason.PEER_UNREACHABLE, "the answer ended before its summary")

    async def migrate(self, request: types.MigrateRequest, report: Report) -> types.MoveSummary:
        await self._enter("migrate")
        here = self._instance.id
        if request.src_engine_id != here:
            raise LlumletError(types.Reason.WRONG_INSTANCE, f"this is {here}, not {request.src_engine_id}")
        if request.dst_engine_id == here:
            raise LlumletError(types.Reason.SAME_INSTANCE, f"{here} is source and destination")
        destination = self._world.llumlets.get(request.dst_engine_id)
        if destination is None:
            raise LlumletError(
                types.Reason.PEER_UNREACHABLE, f"{request.dst_engine_id} is not of this simulated cluster"
            )
        return await self._move(request, destination, report)

    async def _move(self, wanted: types.MigrateRequest, destination: Llumlet, report: Report) -> types.MoveSummary:
        began_s = time.monotonic()
        over: asyncio.Future[types.MoveSummary] = asyncio.get_running_loop().create_future()

        def told(event: types.MigrateEvent) -> None:
            if event.HasField("progress"):
                report(event.progress)
            elif not over.done():
                over.set_result(event.summary)

        self.llumlet.migrate(wanted, destination.arrivals, told)
        summary = await over
        summary.total_ms = (time.monotonic() - began_s) * 1e3
        return summary

    async def drain(self, request: types.DrainRequest, report: DrainReport) -> types.DrainProgress:
        await self._enter("drain")
        instance, engine = self._instance, self._instance.engine
        instance.is_schedulable = False
        instance.changed(instance.clock.now_ps)
        began_s, timeout_s = time.monotonic(), request.timeout_s or 30.0
        num_moved, turn = 0, 0
        while engine.requests and time.monotonic() - began_s < timeout_s:
            if request.destinations:
                destination = self._world.at(request.destinations[turn % len(request.destinations)])
                turn += 1
                if destination is not None:
                    everything = types.MigrateRequest(migration_type=types.MigrationType.NUM_REQ, num_reqs=-1)
                    num_moved += (await self._move(everything, destination, lambda _: None)).moved
            here = len(engine.requests)
            elapsed_s = time.monotonic() - began_s
            report(
                types.DrainProgress(
                    elapsed_s=elapsed_s, timeout_s=timeout_s, num_streams=here, num_requests=here, num_moved=num_moved
                )
            )
            await asyncio.sleep(0.02)
        cut = [one for one in self._world.requests.values() if one.owner == instance.id]
        for one in cut:
            self._world.abort(one)
        await self._leave()
        elapsed_s = time.monotonic() - began_s
        return types.DrainProgress(
            elapsed_s=elapsed_s, timeout_s=timeout_s, num_moved=num_moved, done=True, num_cut=len(cut)
        )

    async def _peer(self, request: object, given_up: object = None) -> NoReturn:
        raise LlumletError(types.Reason.NOT_PORTABLE, "simulated instances move requests within their process")

    abort_migrate_in = reserve = copy_round = commit = withdraw = cancel = _peer
    abort_handover = close_handover = query = adopt = cached_prefix = claim = end_claim = _peer

    def watch_cache(self, request: types.WatchCacheRequest) -> AsyncGenerator[types.CacheChanges, None]:
        raise LlumletError(types.Reason.NOT_PORTABLE, "simulated instances have no prefix cache")

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        delay_s = self.delays.get(method, 0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        if method in self.refusals:
            raise LlumletError(self.refusals[method], _WANTED)


class _Steered(Arrivals):
    """Arrivals that refuse what the test asks them to."""

    def __init__(self, agent: SimulatedAgent, instance: ModelledInstance, world: World, limits: Limits) -> None:
        super().__init__(instance, world.network, _HOP_PS, world.owned, limits)
        self._agent = agent

    def reserve(self, offer: Offer) -> None:
        refusal = self._agent.refusals.get("reserve")
        if refusal is None:
            super().reserve(offer)
        else:
            offer.answer(do.RefuseReserve(reason_of(refusal), _WANTED))

    def tell(self, migration_id: MigrationId, event: on.DestinationEvent, answer: Callable[[do.Effect], None]) -> None:
        refusal = self._agent.refusals.get("commit")
        if refusal is None or not isinstance(event, on.CommitRequested):
            super().tell(migration_id, event, answer)
        else:
            super().tell(migration_id, on.CancelRequested(reason_of(refusal)), answer)
            answer(do.AnswerCommit(Settlement.BARRED, reason_of(refusal)))
