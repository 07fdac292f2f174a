# SPDX-License-Identifier: Apache-2.0
"""The llumlet of one engine: what operators and peers ask for, on the bypass thread."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from llumlet.agent import DrainReport, Report
from llumlet.bridge import epoch_of, reason_number
from llumlet.errors import LlumletCallFailed, LlumletError
from llumlet.protocol import wire
from llumlet.protocol.errors import MigrationError, Reason, Refused
from llumlet.protocol.ids import Epoch
from llumlet.protocol.plan import Plan
from llumlet.reporter import Reporter
from llumlet.server import RunningServer
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
    InstanceMetadata,
    InstanceStatus,
    ListRequestsResponse,
    MigrateInRequest,
    MigrateRequest,
    Mode,
    MovePhase,
    MoveProgress,
    MoveSummary,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
)
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.config import END_SECONDS, drain_limit
from vllm_llumnix.engine import claims
from vllm_llumnix.engine.adoptions import Adoptions
from vllm_llumnix.engine.arrivals import Arrivals
from vllm_llumnix.engine.builder import RequestBuilder
from vllm_llumnix.engine.departures import Departures, Destination, OutgoingMove
from vllm_llumnix.engine.drain import REPORT_SECONDS, Drain
from vllm_llumnix.engine.listing import Listing
from vllm_llumnix.engine.memory import Movers
from vllm_llumnix.engine.metadata import metadata_of
from vllm_llumnix.engine.relay import Relay
from vllm_llumnix.engine.request_state import residence_of
from vllm_llumnix.engine.rescue import Rescues
from vllm_llumnix.engine.status import StatusSource
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.grants import CAPABILITY_BYTES

if TYPE_CHECKING:
    from vllm_llumnix.engine.bypass import Bypass
    from vllm_llumnix.engine.kvconn import KVConnection

CALL_SECONDS = 10.0
"""Deadline of a call to a peer in which no bytes move, and of a question to an origin."""


class LlumletAgent:
    """Implements `llumlet.agent.Agent`."""

    def __init__(self, bypass: Bypass, kvconn: KVConnection) -> None:
        self.bypass = bypass
        self.config = bypass.config
        self.identity = bypass.identity
        self.kvconn = kvconn
        self.reporter: Reporter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, server: RunningServer) -> None:
        """Build what needs our address. Called once, before any request can be here."""
        bypass, kvconn = self.bypass, self.kvconn
        self.server = server
        self.adapters = Adapters(bypass.engine.vllm_config.lora_config)
        config = self.config
        self.movers = Movers(
            bypass.movers,
            config.transports,
            config.bandwidth_limit,
            config.bandwidth_limit_local,
            on_lost=bypass.stop_carrying_kv,
        )
        self.relay = Relay(
            wire.Hello(
                wire.RELAY_VERSION,
                self.identity.instance,
                self.identity.incarnation,
                str(bypass.address),
                self.identity.digest,
            ),
            self.release,
            lambda: kvconn.progress.health,
            bypass.credentials,
        )
        self.departures = Departures(bypass, kvconn, self.relay, self.adapters, self.movers, CALL_SECONDS)
        self.listing = Listing(bypass, kvconn, self.departures)
        self.drains = Drain(self)
        builder = RequestBuilder(bypass.engine, self.config.reaches, self.adapters, kvconn.record)
        self.arrivals = Arrivals(bypass, kvconn, self.relay, self.movers, builder, self.departures, self._abort_soon)
        self.adoptions = Adoptions(
            bypass,
            kvconn,
            self.relay,
            builder,
            self.arrivals,
            self.departures,
            Rescues(bypass, kvconn, self.arrivals, self.departures),
        )
        self.status = StatusSource(bypass, kvconn, self.departures, self.arrivals)
        self.status.open()
        if config.cms:
            self._report_to(config.cms)

    def _report_to(self, cms: str) -> None:
        """Have the cluster metadata store know this instance, and its load whenever that changes."""
        address = self.bypass.address
        assert address is not None
        self.reporter = Reporter(
            cms, lambda: metadata_of(self.bypass, self.adapters, address), self.status.now, self.bypass.credentials
        )
        self.kvconn.port.load.on_change = self.reporter.changed
        self.adapters.on_change = self.reporter.metadata_changed
        self._spawn(self.reporter.run())

    async def close(self) -> None:
        self.drains.close()
        self.status.close()
        if self.reporter is not None:
            await self.reporter.leave()
        await self.server.stop(grace_s=0.0)
        await self.relay.close()
        await self.departures.close()
        self.movers.close()

    # What operators ask for

    async def migrate(self, request: MigrateRequest, report: Report) -> MoveSummary:
        began = time.monotonic()
        self._check_migrate(request)
        address = Address(request.dst_engine_ip, request.dst_engine_port)
        client = self.departures.client(address)
        destination = Destination(request.dst_engine_id, address, client)
        selected = self._select(request)
        moves = []
        refused: dict[str, MigrationError] = {}
        for request_id in selected:
            try:
                moves.append(self.begin_move(request_id, destination, request, report))
            except MigrationError as error:
                refused[request_id] = error
        for request_id, error in refused.items():
            stayed = _stayed(request_id, request.method or Mode.LIVE, error)
            self.departures.records.add(stayed)
            report(stayed)
        outcomes = await asyncio.gather(*(move.done for move in moves))
        count = {phase: sum(1 for outcome in outcomes if outcome.phase == phase) for phase in _OUTCOMES}
        return MoveSummary(
            selected=len(outcomes) + len(refused),
            moved=count[MovePhase.MOVED],
            stayed=count[MovePhase.STAYED] + len(refused),
            gone=count[MovePhase.GONE],
            lost=count[MovePhase.LOST],
            total_ms=(time.monotonic() - began) * 1e3,
            recomputed=sum(1 for outcome in outcomes if is_recomputed(outcome)),
        )

    async def migrate_in(self, request: MigrateInRequest, report: Report) -> MoveSummary:
        here = self.bypass.address
        request.request.dst_engine_id = self.identity.instance
        request.request.dst_engine_ip, request.request.dst_engine_port = here.host, here.port
        client = self.departures.client(Address.parse(request.src_address))
        summary = MoveSummary()
        try:
            async for event in client.migrate(request.request):
                if event.WhichOneof("event") == "progress":
                    report(event.progress)
                else:
                    summary = event.summary
        except LlumletError:
            raise
        except LlumletCallFailed as error:
            raise refusal(Refused(Reason.PEER_UNREACHABLE, str(error))) from error
        return summary

    async def drain(self, request: DrainRequest, report: DrainReport) -> DrainProgress:
        self._check_drain(request)
        if not self.drains.asked:
            seconds = request.timeout_s or self.config.drain_seconds
            limit = drain_limit(self.bypass.engine.vllm_config)
            self.drains.ask(list(request.destinations), seconds if limit is None else min(seconds, limit))
            # The API server, or the one parent of several.
            parent = multiprocessing.parent_process()
            assert parent is not None
            assert parent.pid is not None
            os.kill(parent.pid, signal.SIGTERM)
        while not self.drains.ended:
            report(self.drains.progress())
            await asyncio.sleep(REPORT_SECONDS)
        return self.drains.progress()

    async def abort(self, request: AbortRequest) -> AbortResponse:
        response = AbortResponse()
        here = []
        for request_id in request.request_ids:
            # One that has just left may still be in the scheduler: the loop has not let go of it yet.
            owner = self.departures.owner_of(request_id)
            if owner is not None:
                response.results.add(request_id=request_id, outcome=AbortResponse.FORWARDED, owner_address=str(owner))
            elif request_id in self.bypass.engine.scheduler.requests:
                here.append(request_id)
                response.results.add(request_id=request_id, outcome=AbortResponse.ABORTED)
            else:
                response.results.add(request_id=request_id, outcome=AbortResponse.NOT_FOUND)
        self.forward_aborts([rid for rid in request.request_ids if rid not in here])
        if here:
            await self._abort_here(here)
        return response

    async def abort_migrate_in(self, request: AbortMigrateInRequest) -> AbortMigrateInResponse:
        return await self.arrivals.call_off(request)

    async def get_instance_status(self) -> InstanceStatus:
        """Whatever the loop is doing: `health` says whether it does anything."""
        return self.status.now()

    async def get_instance_metadata(self) -> InstanceMetadata:
        return metadata_of(self.bypass, self.adapters, self.bypass.address)

    async def list_requests(self) -> ListRequestsResponse:
        if self.kvconn.progress.health is wire.Health.HUNG:
            # It stands still, and somebody wants to see what it holds.
            return self.listing.requests(self.arrivals.pending())
        return await self.kvconn.call(self.listing.requests, self.arrivals.pending())

    # What peers ask for: see arrivals

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        return await self.arrivals.reserve(request)

    async def copy_round(self, request: CopyRoundRequest) -> CopyRoundResponse:
        return await self.arrivals.copy_round(request)

    async def commit(self, request: CommitRequest) -> CommitResponse:
        return await self.arrivals.commit(request)

    async def withdraw(self, request: SettleRequest) -> SettleResponse:
        return await self.arrivals.withdraw(request)

    async def cancel(self, request: SettleRequest) -> SettleResponse:
        return await self.arrivals.cancel(request)

    async def abort_handover(self, request: SettleRequest) -> SettleResponse:
        return await self.arrivals.abort(request)

    async def close_handover(self, request: SettleRequest) -> SettleResponse:
        return await self.arrivals.close_handover(request)

    async def query(self, request: SettleRequest) -> SettleResponse:
        return await self.arrivals.query(request)

    # What origins ask for

    async def adopt(self, request: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        try:
            return await self.adoptions.adopt(request, given_up)
        except Refused as error:
            raise refusal(error) from error

    # What engines ask for that go on with our requests

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        if request.incarnation != self.identity.incarnation:
            raise refusal(Refused(Reason.WRONG_INSTANCE, "this is another life of the engine"))
        if self.identity.kv_stays is not None:
            raise refusal(Refused(Reason.NOT_PORTABLE, self.identity.kv_stays))
        try:
            claimed = self.kvconn.claims.take(request.request_id, epoch_of(request.epoch))
        except Refused as error:
            raise refusal(error) from error
        self.relay.farewell(request.request_id)
        capability = secrets.token_bytes(CAPABILITY_BYTES)
        self._spawn(self._grant_for_claim(capability, claimed.block_ids))
        return ClaimResponse(
            claim_id=claimed.claim_id,
            source_memory=self.departures.memory(capability),
            computed_tokens=claimed.computed_tokens,
            block_ids=claimed.block_ids,
            output_token_ids=claimed.output_token_ids,
        )

    async def _grant_for_claim(self, capability: bytes, block_ids: list[int]) -> None:
        """Whether the blocks were the request's all the time is what `EndClaim` answers."""
        with contextlib.suppress(TransportError):
            await self.movers.grant(capability, block_ids)
            await asyncio.sleep(claims.LEASE_SECONDS)
            await self.movers.revoke(capability)

    async def end_claim(self, request: EndClaimRequest) -> EndClaimResponse:
        return EndClaimResponse(intact=self.kvconn.claims.end(request.claim_id))

    # Aborts that come by other ways

    def forward_aborts(self, request_ids: list[str]) -> None:
        """Send aborts after requests that have left. The origin repeats itself to whoever reports such a request, so
        none of these messages has to arrive."""
        by_owner: dict[Address, list[str]] = {}
        for request_id in request_ids:
            owner = self.departures.owner_of(request_id)
            if owner is not None:
                by_owner.setdefault(owner, []).append(request_id)
        for owner, ids in by_owner.items():
            self._spawn(self._abort_at(owner, ids))

    def release(self, origin: str, requests: list[tuple[str, Epoch]]) -> None:
        """`origin` wants nothing more of these requests under these epochs. Those of others are not its to end."""
        stale = [request_id for request_id, epoch in requests if self._belongs(request_id, origin, epoch)]
        if stale:
            self._abort_soon(stale)

    def _belongs(self, request_id: str, origin: str, epoch: Epoch) -> bool:
        """Whether this engine runs the request under `epoch`, for `origin`."""
        request = self.bypass.engine.scheduler.requests.get(request_id)
        residence = residence_of(request) if request is not None else None
        if residence is None:
            residence = self.relay.residence_of(request_id)
        return residence is not None and (residence.origin, residence.epoch) == (origin, epoch)

    def _abort_soon(self, request_ids: list[str]) -> None:
        self._spawn(self._abort_here(request_ids))

    async def _abort_here(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.relay.farewell(request_id)
        self.kvconn.note_aborted(request_ids)
        await self.kvconn.call(self.bypass.engine.abort_requests, request_ids)

    async def _abort_at(self, owner: Address, request_ids: list[str]) -> None:
        with contextlib.suppress(LlumletCallFailed):
            await self.departures.client(owner).abort(AbortRequest(request_ids=request_ids))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Triggering

    def _check_migrate(self, request: MigrateRequest) -> None:
        if request.src_engine_id and request.src_engine_id != self.identity.instance:
            raise refusal(
                Refused(Reason.WRONG_INSTANCE, f"this is {self.identity.instance}, not {request.src_engine_id}")
            )
        same_address = (request.dst_engine_ip, request.dst_engine_port) == tuple(self.bypass.address)
        if request.dst_engine_id == self.identity.instance or same_address:
            raise refusal(Refused(Reason.SAME_INSTANCE, "source and destination are the same instance"))
        if self.identity.unsupported is not None:
            raise refusal(Refused(Reason.NOT_PORTABLE, self.identity.unsupported))

    def _check_drain(self, request: DrainRequest) -> None:
        here, num_ranks = self.identity.instance, self.bypass.config.num_ranks
        if request.engine_id and request.engine_id != here:
            raise refusal(Refused(Reason.WRONG_INSTANCE, f"this is {here}, not {request.engine_id}"))
        if str(self.bypass.address) in request.destinations:
            raise refusal(Refused(Reason.SAME_INSTANCE, "the instance cannot be drained to itself"))
        if num_ranks > 1:
            detail = "data-parallel ranks end together: send SIGTERM to `vllm serve`"
            raise refusal(Refused(Reason.INVALID_REQUEST, detail))
        if drain_limit(self.bypass.engine.vllm_config) == 0.0:
            detail = (
                "several API servers are given no time to drain: start the instance with --llumlet-peers or "
                f"--llumlet-cms, or with more than {END_SECONDS} s of --shutdown-timeout"
            )
            raise refusal(Refused(Reason.INVALID_REQUEST, detail))

    def _select(self, request: MigrateRequest) -> list[str]:
        if request.request_ids:
            return list(dict.fromkeys(request.request_ids))
        try:
            return self.listing.select(request)
        except Refused as error:
            raise refusal(error) from error

    def begin_move(
        self, request_id: str, destination: Destination, asked: MigrateRequest, report: Report
    ) -> OutgoingMove:
        """Raises Refused."""
        request = self.kvconn.port.find(request_id)
        residence = residence_of(request)
        if request_id in self.departures.moves:
            raise Refused(Reason.ALREADY_MIGRATING, f"{request_id} is on its way already")
        way = self.listing.way(request, asked.method)
        assert residence is not None
        budget_ms = asked.stall_budget_ms if asked.HasField("stall_budget_ms") else self.config.stall_budget_ms
        plan = Plan(
            method=way.method,
            epoch_next=residence.claim_next_epoch(),
            bytes_per_block=self.bypass.bytes_per_block,
            stall_budget_s=budget_ms / 1e3,
            force=asked.force,
            round_s=self.config.lease_seconds,
        )
        return self.departures.begin(request, residence, destination, plan, way, report)


_OUTCOMES = (MovePhase.MOVED, MovePhase.STAYED, MovePhase.GONE, MovePhase.LOST)


def is_recomputed(outcome: MoveProgress) -> bool:
    """Whether the request went without a KV cache and had computed something."""
    return outcome.phase == MovePhase.MOVED and outcome.mode == Mode.RECOMPUTE


def _stayed(request_id: str, mode: Mode, error: MigrationError) -> MoveProgress:
    return MoveProgress(
        request_id=request_id,
        phase=MovePhase.STAYED,
        reason=reason_number(error.reason),
        detail=error.detail,
        mode=mode,
    )


def refusal(error: MigrationError) -> LlumletError:
    """Our error as the wire knows it."""
    return LlumletError(reason_number(error.reason), error.detail)
