# SPDX-License-Identifier: Apache-2.0
"""The llumlet of one engine: what operators, peers and origins ask for, on the llumlet's thread."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs

import llumlet.contract.server
from llumlet.contract import types
from llumlet.contract.agent import DrainReport, Report
from llumlet.contract.bridge import epoch_of, reason_number
from llumlet.contract.cache_feed import CacheFeed
from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.errors import LlumletError
from llumlet.contract.server import RunningServer
from llumlet.process.addresses import Address
from llumlet.process.tasks import Tasks
from llumlet.protocol import wire
from llumlet.protocol.errors import MigrationError, Reason, Refused
from llumlet.protocol.recovery.claim import LEASE_SECONDS
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.config import LlumletConfig, drain_limit
from vllm_llumnix.engine.blocks.movers import MoveGrant, Movers
from vllm_llumnix.engine.compatibility.identity import EngineIdentity
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import CallOff
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.moves.destination_moves import DestinationMoves
from vllm_llumnix.engine.moves.migrations import Migrations
from vllm_llumnix.engine.moves.source_moves import SourceMoves
from vllm_llumnix.engine.pauses import QUIET_SECONDS
from vllm_llumnix.engine.recovery.adoptions import Adoptions
from vllm_llumnix.engine.recovery.claims import Claims
from vllm_llumnix.engine.recovery.rescue import Rescues
from vllm_llumnix.engine.requests.builder import RequestBuilder
from vllm_llumnix.engine.requests.input_parts import InputParts
from vllm_llumnix.engine.service.aborts import Aborts
from vllm_llumnix.engine.service.engine_drain import REPORT_SECONDS, Drain
from vllm_llumnix.engine.service.listing import Listing
from vllm_llumnix.engine.service.metadata import metadata_of
from vllm_llumnix.engine.service.relay_sender import Forwarding, Relay
from vllm_llumnix.engine.service.status import StatusSource
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.wire.addresses import reachable_host
from vllm_llumnix.wire.peer_clients import PeerClients

CALL_SECONDS = 10.0
"""Deadline of a call to a peer in which no bytes move, and of a question to an origin."""


async def open_llumlet(
    config: LlumletConfig, identity: EngineIdentity, loop: EngineLoop, movers: list[MoverInfo], claims: Claims
) -> LlumletAgent:
    """The llumlet of an engine, listening. On the event loop that serves it, before any request can be here.

    Raises ValueError, OSError as `llumlet.contract.server.serve` does.
    """
    credentials = config.credentials()
    server = llumlet.contract.server.new_server(config.host, credentials, config.insecure)
    bound = llumlet.contract.server.bind(server, config.host, config.port, credentials)
    address = Address(reachable_host(config.host), bound.port)
    limits = config.bandwidth_limit, config.bandwidth_limit_local
    hello = wire.Hello(wire.RELAY_VERSION, identity.instance, identity.incarnation, str(address), identity.facts.digest)
    context = EngineContext(
        config=config,
        identity=identity,
        engine=loop.engine,
        loop=loop,
        movers=Movers(movers, config.transports, *limits, on_lost=identity.stop_carrying_kv),
        relay=Relay(
            hello,
            lambda origin, requests: agent.aborts.dismiss(origin, requests),
            lambda origin, part: agent.input_parts.take(origin, part),
            lambda: loop.progress.health,
            credentials,
        ),
        peers=PeerClients(credentials, config.reaches),
        adapters=Adapters(loop.engine.vllm_config.lora_config),
        forwarding=Forwarding(),
        credentials=credentials,
        address=address,
    )
    agent = LlumletAgent(context, claims)
    await agent.open(await llumlet.contract.server.start(agent, server, bound))
    return agent


class LlumletAgent:
    """Implements `llumlet.contract.agent.Agent`, and hears what the engine's threads say: `loop.Llumlet`."""

    def __init__(self, context: EngineContext, claims: Claims) -> None:
        self.context = context
        self.claims = claims
        self.aborts = Aborts(context)
        self.departures = SourceMoves(context, CALL_SECONDS)
        self.listing = Listing(context, self.departures)
        self.migrations = Migrations(context, self.departures, self.listing)
        self.drains = Drain(context, self.migrations)
        builder = RequestBuilder(context.engine, context.config.reaches, context.adapters, context.loop.record)
        self.arrivals = DestinationMoves(context, builder, self.aborts.end_soon)
        self.input_parts = InputParts(context, builder, self.aborts.end_soon)
        self.adoptions = Adoptions(context, builder, self.arrivals, Rescues(context))
        self.status = StatusSource(context, self.departures, self.arrivals, self.adoptions)
        self.cache_feed = CacheFeed(context.loop.port.cached_blocks)
        # What peers ask for goes straight there.
        self.reserve = self.arrivals.reserve
        self.copy_round = self.arrivals.copy_round
        self.commit = self.arrivals.commit
        self.withdraw = self.arrivals.withdraw
        self.cancel = self.arrivals.cancel
        self.abort_handover = self.arrivals.abort
        self.close_handover = self.arrivals.close_handover
        self.query = self.arrivals.query
        self._reporter: Reporter | None = None
        self._server: RunningServer | None = None
        self._tasks = Tasks()

    async def open(self, server: RunningServer) -> None:
        """`server` listens: have the cluster know of it."""
        self._server = server
        self.status.open()
        if self.context.config.cms:
            self._report_to(self.context.config.cms)

    def _report_to(self, cms: str) -> None:
        """Have the cluster metadata store know this instance, and its load whenever that changes."""
        context = self.context
        self._reporter = Reporter(cms, lambda: metadata_of(context), self.status.now, context.credentials)
        context.loop.port.load.on_change = self._reporter.changed
        context.loop.port.shortage.asks = context.config.ask_before_preemption
        context.adapters.on_change = self._reporter.metadata_changed
        self._tasks.spawn(self._reporter.run())

    async def close(self) -> None:
        self.drains.close()
        self.status.close()
        if self._reporter is not None:
            await self._reporter.leave()
        if self._server is not None:
            await self._server.stop(grace_s=0.0)
        await self.context.relay.close()
        await self.context.peers.close()
        self.context.movers.close()

    # What operators ask for

    async def migrate(self, request: types.MigrateRequest, report: Report) -> types.MoveSummary:
        with _refusals():
            return await self.migrations.migrate(request, report)

    async def migrate_in(self, request: types.MigrateInRequest, report: Report) -> types.MoveSummary:
        with _refusals():
            return await self.migrations.migrate_in(request, report)

    async def drain(self, request: types.DrainRequest, report: DrainReport) -> types.DrainProgress:
        with _refusals():
            self.drains.check(request)
        if not self.drains.asked:
            seconds = request.timeout_s or self.context.config.drain_seconds
            limit = drain_limit(self.context.engine.vllm_config)
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

    async def abort(self, request: types.AbortRequest) -> types.AbortResponse:
        return await self.aborts.abort(request)

    async def abort_migrate_in(self, request: types.AbortMigrateInRequest) -> types.AbortMigrateInResponse:
        return await self.arrivals.call_off(request)

    async def get_instance_status(self) -> types.InstanceStatus:
        """Whatever the loop is doing: `health` says whether it does anything."""
        return self.status.now()

    async def get_instance_metadata(self) -> types.InstanceMetadata:
        return metadata_of(self.context)

    async def list_requests(self) -> types.ListRequestsResponse:
        loop, arriving = self.context.loop, self.arrivals.pending()
        if loop.progress.health is wire.Health.HUNG:
            # It stands still, and somebody wants to see what it holds.
            return self.listing.requests(arriving)
        return await loop.call(self.listing.requests, arriving)

    def watch_cache(self, request: types.WatchCacheRequest) -> AsyncGenerator[types.CacheChanges, None]:
        identity = self.context.identity
        if (request.engine_id, request.incarnation) != (identity.instance, identity.incarnation):
            raise LlumletError(types.Reason.WRONG_INSTANCE, f"this is {identity.instance}, in another life perhaps")
        return self.cache_feed.watch(request.interval_s)

    # What origins ask for

    async def adopt(self, request: types.AdoptRequest, given_up: asyncio.Event) -> types.AdoptResponse:
        with _refusals():
            return await self.adoptions.adopt(request, given_up)

    async def cached_prefix(self, request: types.CachedPrefixRequest) -> types.CachedPrefixResponse:
        """Whatever the loop is doing."""
        blocks = self.context.loop.port.cached_blocks
        if request.block_size != blocks.block_size:
            return types.CachedPrefixResponse()
        return types.CachedPrefixResponse(num_tokens=blocks.num_leading(request.blocks) * blocks.block_size)

    # What engines ask for that go on with our requests

    async def claim(self, request: types.ClaimRequest) -> types.ClaimResponse:
        identity = self.context.identity
        with _refusals():
            if request.incarnation != identity.incarnation:
                raise Refused(Reason.WRONG_INSTANCE, "this is another life of the engine")
            if identity.kv_stays is not None:
                raise Refused(Reason.NOT_PORTABLE, identity.kv_stays)
            claimed = self.claims.take(request.request_id, epoch_of(request.epoch))
        self.context.relay.farewell(request.request_id)
        grant = MoveGrant(self.context.movers)
        self._tasks.spawn(_grant_for_claim(grant, claimed.block_ids))
        return types.ClaimResponse(
            claim_id=claimed.claim_id,
            source_memory=self.context.offered_memory(grant.capability),
            computed_tokens=claimed.computed_tokens,
            block_ids=claimed.block_ids,
            output_token_ids=claimed.output_token_ids,
        )

    async def end_claim(self, request: types.EndClaimRequest) -> types.EndClaimResponse:
        return types.EndClaimResponse(intact=self.claims.end(request.claim_id))

    # What the engine's threads say

    def relay_outputs(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        self.context.relay.send(client_index, outputs)

    def meet_origin(self, address: str) -> None:
        self.context.relay.meet(address)

    def forward_aborts(self, request_ids: list[str]) -> None:
        self.aborts.forward(request_ids)

    def learn_adapter(self, adapter: LoRARequest, reloaded: bool = False) -> None:
        self.context.adapters.learn(adapter, reloaded=reloaded)

    def revoke_youngest_reservation(self) -> None:
        self.arrivals.revoke_youngest()

    def call_off_moves(self, why: CallOff) -> None:
        # A pause that waits looks again, whatever fails here.
        asyncio.get_running_loop().call_later(QUIET_SECONDS, self.context.loop.kick)
        # The last one first. Each runs even if another raises; the thread logs the error.
        with contextlib.ExitStack() as parts:
            parts.callback(self.claims.call_off)
            parts.callback(self.adoptions.rescues.call_off)
            parts.callback(self.arrivals.call_off_all, why)
            parts.callback(self.departures.call_off, why)

    # What API servers call as utilities of the engine, on the loop's thread

    def report_drain(
        self, client_index: int, peers: list[str], seconds: float, num_streams: int, num_cut: int | None
    ) -> dict[str, Any]:
        return self.drains.report(client_index, peers, seconds, num_streams, num_cut)

    def report_moves(self, since: int) -> tuple[int, list[dict[str, Any]], dict[str, int]]:
        """See `SourceRecords.since`; and what is counted of the engine since its start, by the names of the metrics."""
        port = self.context.loop.port
        counts = {
            "computed_tokens": port.tokens.computed,
            "recomputed_tokens": port.tokens.recomputed,
            "averted_preemptions": port.shortage.num_averted,
        }
        return *self.departures.records.since(since), counts


async def _grant_for_claim(grant: MoveGrant, block_ids: list[int]) -> None:
    """Grants blocks of a claimed request. `EndClaim` answers whether they were the request's all the time."""
    with contextlib.suppress(TransportError):
        await grant.add(block_ids)
        await asyncio.sleep(LEASE_SECONDS)
        await grant.revoke()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Our errors become what the wire knows."""
    try:
        yield
    except MigrationError as error:
        raise LlumletError(reason_number(error.reason), error.detail) from error
