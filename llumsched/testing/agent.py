# SPDX-License-Identifier: Apache-2.0
"""The llumlet of a simulated instance: what it answers, and how it moves requests to its like.

A move goes over the real `Peer` service (Reserve, CopyRound, Commit, Cancel), with bytes that are only counted. A
request that moves within one process stays the object that its client holds; in another process it becomes a new one.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from llumlet.agent import DrainReport, Report
from llumlet.client import LlumletClient
from llumlet.credentials import Credentials
from llumlet.errors import LlumletCallFailed, LlumletError
from llumlet.types import (
    AbortMigrateInRequest,
    AbortMigrateInResponse,
    AbortRequest,
    AbortResponse,
    Address,
    AdoptRequest,
    AdoptResponse,
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
    Handover,
    InstanceMetadata,
    InstanceStatus,
    ListRequestsResponse,
    MigrateInRequest,
    MigrateRequest,
    Mode,
    MovePhase,
    MoveProgress,
    MoveSummary,
    Reason,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
)
from llumsched.testing.engine import SimulatedEngine, SimulatedRequest
from llumsched.testing.records import listed, metadata_of, status_of
from llumsched.testing.selection import select

_REQUESTS: WeakValueDictionary[str, SimulatedRequest] = WeakValueDictionary()
"""All requests of this process, by the engine's id: a request that arrives is the one that left."""


class SimulatedAgent:
    """Implements `llumlet.agent.Agent`."""

    def __init__(
        self,
        instance_id: str,
        incarnation: str,
        engine: SimulatedEngine,
        drained: Callable[[], Awaitable[None]],
        credentials: Credentials,
    ) -> None:
        self.id = instance_id
        self.incarnation = incarnation
        self.engine = engine
        self.port = 0
        self.metadata_fields: dict[str, object] = {}
        self.refusals: dict[str, Reason] = {}
        """Reason with which a method refuses, by its name (`migrate`, `reserve`, `commit`, …)."""
        self.delays: dict[str, float] = {}
        """Seconds before a method obeys, by its name."""
        self.max_moves_in = self.max_moves_out = 4
        self.copy_s_per_token = 0.00001
        self.schedulable = True
        self.moves_out = 0
        self.calls: list[str] = []
        """Names of the methods that were called."""
        self._created_s = time.time()
        self._reserved: dict[str, tuple[SimulatedRequest, int]] = {}
        self._drained = drained
        self._credentials = credentials

    def remember(self, request: SimulatedRequest) -> None:
        _REQUESTS[request.request_id] = request

    def end_request(self, request: SimulatedRequest) -> None:
        """Aborts a request, here or, within this process, where it is now: its engine drops what is finished."""
        self.engine.take_out(request)
        request.end("abort")

    @property
    def moves_in(self) -> int:
        return len(self._reserved)

    def metadata(self) -> InstanceMetadata:
        return metadata_of(self, self._created_s)

    def status(self) -> InstanceStatus:
        return status_of(self)

    # --- Operator ---

    async def get_instance_status(self) -> InstanceStatus:
        await self._enter("get_instance_status")
        return self.status()

    async def get_instance_metadata(self) -> InstanceMetadata:
        await self._enter("get_instance_metadata")
        return self.metadata()

    async def list_requests(self) -> ListRequestsResponse:
        await self._enter("list_requests")
        return listed(self)

    async def abort(self, request: AbortRequest) -> AbortResponse:
        await self._enter("abort")
        here = {each.request_id: each for each in self.engine.requests}
        results = []
        for request_id in request.request_ids:
            found = here.get(request_id)
            if found is not None:
                self.end_request(found)
            outcome = AbortResponse.NOT_FOUND if found is None else AbortResponse.ABORTED
            results.append(AbortResponse.Result(request_id=request_id, outcome=outcome))
        return AbortResponse(results=results)

    async def migrate_in(self, request: MigrateInRequest, report: Report) -> MoveSummary:
        await self._enter("migrate_in")
        wanted = MigrateRequest()
        wanted.CopyFrom(request.request)
        wanted.dst_engine_id, wanted.dst_engine_ip, wanted.dst_engine_port = self.id, "127.0.0.1", self.port
        async with LlumletClient(request.src_address, credentials=self._credentials) as source:
            async for event in source.migrate(wanted):
                if event.HasField("summary"):
                    return event.summary
                report(event.progress)
        raise LlumletError(Reason.PEER_UNREACHABLE, "the answer ended before its summary")

    async def migrate(self, request: MigrateRequest, report: Report) -> MoveSummary:
        await self._enter("migrate")
        if request.src_engine_id != self.id:
            raise LlumletError(Reason.WRONG_INSTANCE, f"this is {self.id}, not {request.src_engine_id}")
        if request.dst_engine_id == self.id:
            raise LlumletError(Reason.SAME_INSTANCE, f"{self.id} is source and destination")
        began = time.monotonic()
        chosen = select(self.engine, request)
        destination = Address(request.dst_engine_ip, request.dst_engine_port)
        async with LlumletClient(destination, credentials=self._credentials) as peer:
            outcomes = [await self._move(each, peer, request, report) for each in chosen]
        return MoveSummary(
            selected=len(chosen),
            moved=outcomes.count(MovePhase.MOVED),
            stayed=outcomes.count(MovePhase.STAYED),
            gone=outcomes.count(MovePhase.GONE),
            lost=outcomes.count(MovePhase.LOST),
            total_ms=(time.monotonic() - began) * 1e3,
        )

    async def drain(self, request: DrainRequest, report: DrainReport) -> DrainProgress:
        await self._enter("drain")
        self.schedulable = False
        self.engine.note_change()
        began, timeout_s = time.monotonic(), request.timeout_s or 30.0
        moved, turn = 0, 0
        while self.engine.requests and time.monotonic() - began < timeout_s:
            if request.destinations:
                moved += await self._move_all(request.destinations[turn % len(request.destinations)])
                turn += 1
            here = len(self.engine.requests)
            report(
                DrainProgress(
                    elapsed_s=time.monotonic() - began,
                    timeout_s=timeout_s,
                    num_streams=here,
                    num_requests=here,
                    num_moved=moved,
                )
            )
            await asyncio.sleep(0.02)
        cut = self.engine.requests
        for each in cut:
            self.engine.take_out(each)
            each.end("abort")
        await self._drained()
        return DrainProgress(
            elapsed_s=time.monotonic() - began, timeout_s=timeout_s, num_moved=moved, done=True, num_cut=len(cut)
        )

    async def abort_migrate_in(self, request: AbortMigrateInRequest) -> AbortMigrateInResponse:
        await self._enter("abort_migrate_in")
        results = []
        for migration_id, (held, _) in list(self._reserved.items()):
            if migration_id in request.migration_ids or held.request_id in request.request_ids:
                self._give_back(migration_id)
                results.append(
                    AbortMigrateInResponse.Result(id=migration_id, migration_id=migration_id, state=Handover.BARRED)
                )
        return AbortMigrateInResponse(results=results)

    # --- moving out ---

    async def _move_all(self, address: str) -> int:
        """Moves all requests to the llumlet at `address`; returns how many went."""
        try:
            async with LlumletClient(address, credentials=self._credentials) as peer:
                there = await peer.get_instance_metadata()
                request = MigrateRequest(dst_engine_id=there.instance_id)
                outcomes = [await self._move(each, peer, request, lambda _: None) for each in self.engine.requests]
        except LlumletCallFailed:
            return 0
        return outcomes.count(MovePhase.MOVED)

    async def _move(
        self, request: SimulatedRequest, peer: LlumletClient, asked: MigrateRequest, report: Report
    ) -> MovePhase:
        progress = MoveProgress(
            migration_id=uuid.uuid4().hex,
            request_id=request.request_id,
            external_request_id=request.external_id,
            mode=asked.method or Mode.LIVE,
            transport="simulated",
            epoch=Epoch(hop=len(request.moved_through) + 1),
        )

        def tell(phase: MovePhase, reason: Reason = Reason.REASON_NONE, detail: str = "") -> MovePhase:
            progress.phase, progress.reason, progress.detail = phase, reason, detail
            told = MoveProgress()
            told.CopyFrom(progress)
            report(told)
            return phase

        tell(MovePhase.SELECTED)
        if request.finished or request.owner != self.id:
            return tell(MovePhase.GONE, Reason.REQUEST_FINISHED)
        if request.moving:
            return tell(MovePhase.STAYED, Reason.ALREADY_MIGRATING)
        if self.moves_out >= self.max_moves_out:
            return tell(MovePhase.STAYED, Reason.SOURCE_BUSY)
        request.moving = True
        self.moves_out += 1
        self.engine.note_change()
        try:
            tell(MovePhase.RESERVING)
            await self._hand_over(request, peer, asked.dst_engine_id, progress, tell)
        except LlumletCallFailed as failure:
            reason = failure.reason if isinstance(failure, LlumletError) else Reason.PEER_UNREACHABLE
            phase = MovePhase.GONE if reason == Reason.REQUEST_FINISHED else MovePhase.STAYED
            return tell(phase, reason, failure.detail)
        finally:
            request.moving = False
            self.moves_out -= 1
            self.engine.note_change()
        return tell(MovePhase.MOVED)

    async def _hand_over(
        self,
        request: SimulatedRequest,
        peer: LlumletClient,
        peer_id: str,
        progress: MoveProgress,
        tell: Callable[[MovePhase], MovePhase],
    ) -> None:
        """Hands a request over; returns when the destination owns it. Raises LlumletCallFailed if it stays here."""
        handover = Handover(
            migration_id=progress.migration_id, request_id=request.request_id, src_incarnation=self.incarnation
        )
        state = {
            "request_id": request.request_id,
            "external_id": request.external_id,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
        }
        reserved = await peer.reserve(
            ReserveRequest(
                handover=handover,
                src_engine_id=self.id,
                dst_engine_id=peer_id,
                src_address=f"127.0.0.1:{self.port}",
                request_state=json.dumps(state).encode(),
                num_blocks=max(1, self.engine.blocks_of(request.num_tokens + 1)),
            )
        )
        handover.dst_incarnation = reserved.dst_incarnation
        handover.step = 1
        tell(MovePhase.COPYING)
        await asyncio.sleep(request.num_computed * self.copy_s_per_token)
        progress.rounds, progress.context_tokens = 1, request.num_tokens
        progress.copied_bytes = request.num_computed * 1024
        running = request in self.engine.running
        if not self.engine.take_out(request):
            await peer.cancel(SettleRequest(handover=handover))
            raise LlumletError(Reason.REQUEST_FINISHED, "it finished while it was copied")
        tell(MovePhase.COMMITTING)
        try:
            answer = await peer.commit(
                CommitRequest(
                    handover=handover,
                    epoch=progress.epoch,
                    base=len(request.output),
                    computed_tokens=request.num_computed,
                    new_token_ids=request.output,
                )
            )
            if answer.state != Handover.COMMITTED:
                raise LlumletError(answer.reason or Reason.BARRED, answer.detail)
        except LlumletCallFailed:
            self._take_back(request, running)
            raise

    def _take_back(self, request: SimulatedRequest, running: bool) -> None:
        """Takes a request back, unless the destination has it after all: within one process its owner is known."""
        if request.owner == self.id and not request.finished:
            request.num_computed = 0 if not running else request.num_computed
            needed = self.engine.blocks_of(request.num_tokens + 1)
            if running and needed <= self.engine.free_blocks:
                self.engine.free_blocks -= needed
                self.engine.admit(request, needed)
            else:
                request.num_computed = 0
                self.engine.add(request)

    # --- Destination ---

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        await self._enter("reserve")
        if request.dst_engine_id != self.id:
            raise LlumletError(Reason.WRONG_INSTANCE, f"this is {self.id}, not {request.dst_engine_id}")
        if not self.schedulable:
            raise LlumletError(Reason.SHUTTING_DOWN, "it drains")
        if len(self._reserved) >= self.max_moves_in:
            raise LlumletError(Reason.DESTINATION_BUSY, f"{self.max_moves_in} come in already")
        if request.num_blocks > self.engine.free_blocks:
            raise LlumletError(Reason.DESTINATION_FULL, f"{self.engine.free_blocks} blocks are free")
        if len(self.engine.running) + len(self._reserved) >= self.engine.model.max_num_seqs:
            raise LlumletError(Reason.DESTINATION_FULL, "no batch slot is free")
        state = json.loads(request.request_state)
        moved = _REQUESTS.get(state["request_id"])
        if moved is None:
            moved = SimulatedRequest(**state)
            self.remember(moved)
        self.engine.free_blocks -= request.num_blocks
        self._reserved[request.handover.migration_id] = (moved, request.num_blocks)
        self.engine.note_change()
        return ReserveResponse(lease_s=5.0, dst_incarnation=self.incarnation, transport="simulated")

    async def copy_round(self, request: CopyRoundRequest) -> CopyRoundResponse:
        await self._enter("copy_round")
        return CopyRoundResponse(round=request.round, lease_s=5.0)

    async def commit(self, request: CommitRequest) -> CommitResponse:
        await self._enter("commit")
        held = self._reserved.pop(request.handover.migration_id, None)
        if held is None:
            return CommitResponse(
                state=Handover.BARRED, reason=Reason.UNKNOWN_MIGRATION, dst_incarnation=self.incarnation
            )
        moved, num_blocks = held
        if not moved.output:
            moved.output.extend(request.new_token_ids)
        moved.moved_through.append(moved.owner)
        moved.owner, moved.num_computed = self.id, request.computed_tokens
        self.engine.admit(moved, num_blocks)
        return CommitResponse(state=Handover.COMMITTED, dst_incarnation=self.incarnation)

    async def cancel(self, request: SettleRequest) -> SettleResponse:
        return await self._bar("cancel", request)

    async def withdraw(self, request: SettleRequest) -> SettleResponse:
        return await self._bar("withdraw", request)

    async def abort_handover(self, request: SettleRequest) -> SettleResponse:
        return await self._bar("abort_handover", request)

    async def close_handover(self, request: SettleRequest) -> SettleResponse:
        await self._enter("close_handover")
        return SettleResponse(state=Handover.UNKNOWN, dst_incarnation=self.incarnation)

    async def query(self, request: SettleRequest) -> SettleResponse:
        await self._enter("query")
        return SettleResponse(state=Handover.UNKNOWN, dst_incarnation=self.incarnation)

    async def adopt(self, request: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        raise LlumletError(Reason.NOT_PORTABLE, "simulated instances adopt nothing")

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        raise LlumletError(Reason.UNKNOWN_REQUEST, "simulated instances have no memory to claim")

    async def end_claim(self, request: EndClaimRequest) -> EndClaimResponse:
        return EndClaimResponse()

    async def _bar(self, method: str, request: SettleRequest) -> SettleResponse:
        await self._enter(method)
        self._give_back(request.handover.migration_id)
        return SettleResponse(state=Handover.BARRED, dst_incarnation=self.incarnation)

    def _give_back(self, migration_id: str) -> None:
        held = self._reserved.pop(migration_id, None)
        if held is not None:
            self.engine.free_blocks += held[1]
            self.engine.note_change()

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        delay_s = self.delays.get(method, 0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        if method in self.refusals:
            raise LlumletError(self.refusals[method], "as the test wants it")
