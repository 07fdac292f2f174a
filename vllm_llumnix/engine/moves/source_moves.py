# SPDX-License-Identifier: Apache-2.0
"""All moves out of this engine: as many at a time as may be, and what became of the last. Llumlet thread only."""

from __future__ import annotations

from llumlet.protocol import events as on
from llumlet.protocol.errors import Reason
from llumlet.protocol.move.limits import Limits, Slots
from llumlet.protocol.move.plan import Plan
from vllm_llumnix.engine.compatibility.way import Way
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import CallOff, EnginePort
from vllm_llumnix.engine.moves.source_calls import Target
from vllm_llumnix.engine.moves.source_report import Report, SourceRecords
from vllm_llumnix.engine.moves.source_shell import SourceShell
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.engine.vllm_types import Request


class SourceMoves:
    """`moves` has those that are on their way, by request. `deadline_s`: see `SourceShell`."""

    def __init__(self, context: EngineContext, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.moves: dict[str, SourceShell] = {}
        self.records = SourceRecords()
        self._context = context
        self._loop: EnginePort = context.loop
        config, port = context.config, self._loop.port
        limits = Limits(
            max_requests=config.max_migrations_out,
            max_tokens=config.max_migration_tokens_out,
            max_kv_ratio=config.max_migration_kv_ratio_out,
        )
        self.slots = Slots(limits, port.capacity_tokens, Reason.SOURCE_BUSY)

    def begin(
        self, request: Request, residence: Residence, to: Target, plan: Plan, way: Way, report: Report, policy: str
    ) -> SourceShell:
        """Begins a move that `policy` asks for. Raises Refused(source_busy) when as much is on its way as may be."""
        move = SourceShell(self._context, request, residence, to, plan, way, report, self.deadline_s, self._ended)
        move.progress.trigger_policy = policy
        self.slots.take(move.migration_id, request.num_tokens)
        self.moves[request.request_id] = move
        self._loop.port.touch()
        move.feed(on.Start())
        return move

    def call_off(self, why: CallOff) -> None:
        """All of them. One whose Commit is on its way asks its destination to forget it."""
        for move in list(self.moves.values()):
            move.feed(on.CancelRequested(why.at_source, f"the source {why.what}"))

    def _ended(self, move: SourceShell) -> None:
        self.records.add(move.progress)
        self.slots.give_back(move.migration_id)
        self.moves.pop(move.request.request_id, None)
        self._loop.port.touch()
        self._loop.audit_when_idle()
