# SPDX-License-Identifier: Apache-2.0
"""Moves out of this engine that somebody asks for: which requests, by which way, under which plan. Llumlet thread."""

from __future__ import annotations

import asyncio
import time

from llumlet.contract.agent import Report
from llumlet.contract.bridge import reason_number
from llumlet.contract.errors import LlumletCallFailed, LlumletError
from llumlet.contract.types import (
    OUTCOMES,
    MigrateInRequest,
    MigrateRequest,
    Mode,
    MovePhase,
    MoveProgress,
    MoveSummary,
)
from llumlet.process.addresses import Address
from llumlet.protocol.errors import MigrationError, Reason, Refused
from llumlet.protocol.move.plan import Plan
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.moves.source_calls import Target
from vllm_llumnix.engine.moves.source_moves import SourceMoves
from vllm_llumnix.engine.moves.source_shell import SourceShell
from vllm_llumnix.engine.requests.request_state import residence_of
from vllm_llumnix.engine.service.listing import Listing


class Migrations:
    """Carries out `Migrate` and `MigrateIn`, and begins the moves of a drain."""

    def __init__(self, context: EngineContext, departures: SourceMoves, listing: Listing) -> None:
        self._context = context
        self._departures = departures
        self._listing = listing

    async def migrate(self, asked: MigrateRequest, report: Report) -> MoveSummary:
        """Returns when every selected request is settled. Raises Refused, LlumletError."""
        began = time.monotonic()
        self._check(asked)
        address = Address(asked.dst_engine_ip, asked.dst_engine_port)
        to = Target(asked.dst_engine_id, address, self._context.peers.at(address))
        moves, refused = [], []
        for request_id in self._select(asked):
            try:
                moves.append(self.begin(request_id, to, asked, report))
            except MigrationError as error:
                refused.append(_stayed(request_id, asked, error))
        for stayed in refused:
            self._departures.records.add(stayed)
            report(stayed)
        outcomes = await asyncio.gather(*(move.done for move in moves))
        count = {phase: sum(1 for outcome in outcomes if outcome.phase == phase) for phase in OUTCOMES}
        return MoveSummary(
            selected=len(outcomes) + len(refused),
            moved=count[MovePhase.MOVED],
            stayed=count[MovePhase.STAYED] + len(refused),
            gone=count[MovePhase.GONE],
            lost=count[MovePhase.LOST],
            total_ms=(time.monotonic() - began) * 1e3,
            # Without a KV cache, and had computed something: else the mode would be another.
            recomputed=sum(1 for one in outcomes if (one.phase, one.mode) == (MovePhase.MOVED, Mode.RECOMPUTE)),
        )

    async def migrate_in(self, asked: MigrateInRequest, report: Report) -> MoveSummary:
        """Has the source move requests here. Raises Refused(peer_unreachable), LlumletError."""
        here, wanted = self._context.address, asked.request
        wanted.dst_engine_id = self._context.identity.instance
        wanted.dst_engine_ip, wanted.dst_engine_port = here.host, here.port
        client = self._context.peers.at(asked.src_address)
        summary = MoveSummary()
        try:
            async for event in client.migrate(wanted):
                if event.WhichOneof("event") == "progress":
                    report(event.progress)
                else:
                    summary = event.summary
        except LlumletError:
            raise
        except LlumletCallFailed as error:
            raise Refused(Reason.PEER_UNREACHABLE, str(error)) from error
        return summary

    def begin(self, request_id: str, to: Target, asked: MigrateRequest, report: Report) -> SourceShell:
        """Raises Refused."""
        config = self._context.config
        request = self._context.loop.port.find(request_id)
        residence = residence_of(request)
        if request_id in self._departures.moves:
            raise Refused(Reason.ALREADY_MIGRATING, f"{request_id} is on its way already")
        way = self._listing.way(request, asked.method)
        assert residence is not None
        rows = self._context.loop.port.rows
        budget_ms = asked.stall_budget_ms if asked.HasField("stall_budget_ms") else config.stall_budget_ms
        plan = Plan(
            method=way.method,
            epoch_next=residence.claim_next_epoch(),
            bytes_per_block=self._context.movers.bytes_per_block * rows.most_in_last,
            state_bytes=self._context.movers.bytes_per_block * rows.num_states,
            stall_budget_s=budget_ms / 1e3,
            force=asked.force,
            round_s=config.lease_seconds,
        )
        return self._departures.begin(request, residence, to, plan, way, report, asked.trigger_policy)

    @property
    def num_moving(self) -> int:
        return len(self._departures.moves)

    def movable(self) -> list[str]:
        """Requests that could leave now and do not. Loop thread."""
        return [
            request_id
            for request_id, request in self._context.engine.scheduler.requests.items()
            if request_id not in self._departures.moves and self._listing.why_not(request) is None
        ]

    def _check(self, asked: MigrateRequest) -> None:
        """Raises Refused for what no request of this engine could obey."""
        identity = self._context.identity
        if asked.src_engine_id and asked.src_engine_id != identity.instance:
            raise Refused(Reason.WRONG_INSTANCE, f"this is {identity.instance}, not {asked.src_engine_id}")
        same_address = (asked.dst_engine_ip, asked.dst_engine_port) == tuple(self._context.address)
        if asked.dst_engine_id == identity.instance or same_address:
            raise Refused(Reason.SAME_INSTANCE, "source and destination are the same instance")
        if identity.unsupported is not None:
            raise Refused(Reason.NOT_PORTABLE, identity.unsupported)

    def _select(self, asked: MigrateRequest) -> list[str]:
        if asked.request_ids:
            return list(dict.fromkeys(asked.request_ids))
        return self._listing.select(asked)


def _stayed(request_id: str, asked: MigrateRequest, error: MigrationError) -> MoveProgress:
    return MoveProgress(
        request_id=request_id,
        phase=MovePhase.STAYED,
        reason=reason_number(error.reason),
        detail=error.detail,
        mode=asked.method or Mode.LIVE,
        trigger_policy=asked.trigger_policy,
    )
