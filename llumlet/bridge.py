# SPDX-License-Identifier: Apache-2.0
"""Translates between the words of `llumlet.protocol` and the numbers of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llumlet import types
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Settlement
from llumlet.protocol.ids import Epoch
from llumlet.protocol.plan import Method
from llumlet.protocol.selection import Rule, parse_rule
from llumlet.protocol.source import State
from llumlet.types import Handover, MigrateRequest, MigrationReqPolicy, MigrationType, Mode, MovePhase

HANDOVERS: Final[Mapping[Settlement, Handover.State]] = {
    Settlement.PENDING: Handover.PENDING,
    Settlement.COMMITTED: Handover.COMMITTED,
    Settlement.BARRED: Handover.BARRED,
    Settlement.UNKNOWN: Handover.UNKNOWN,
}
PHASES: Final[Mapping[State, MovePhase]] = {
    State.PLANNED: MovePhase.SELECTED,
    State.RESERVING: MovePhase.RESERVING,
    State.PINNING: MovePhase.COPYING,
    State.COPYING: MovePhase.COPYING,
    State.FREEZING: MovePhase.FREEZING,
    State.COMMITTING: MovePhase.COMMITTING,
    State.WITHDRAWING: MovePhase.WITHDRAWING,
    State.FENCING: MovePhase.FENCING,
    State.MOVED: MovePhase.MOVED,
    State.STAYED: MovePhase.STAYED,
    State.GONE: MovePhase.GONE,
    State.LOST: MovePhase.LOST,
}
"""The source's states as callers see them."""
MODES: Final[Mapping[Method, Mode]] = {
    Method.LIVE: Mode.LIVE,
    Method.BLOCKING: Mode.BLOCKING,
    Method.RECOMPUTE: Mode.RECOMPUTE,
}
METHODS: Final[Mapping[Mode, Method]] = {mode: method for method, mode in MODES.items()}
HEALTHS: Final[Mapping[wire.Health, types.Health]] = {
    wire.Health.OK: types.Health.OK,
    wire.Health.SUSPECT: types.Health.SUSPECT,
    wire.Health.HUNG: types.Health.HUNG,
}


def rule_of(request: MigrateRequest) -> Rule:
    """The rule of a request that names no requests by id. Raises Refused(invalid_request)."""
    unit = MigrationType.Name(request.migration_type)
    order = MigrationReqPolicy.Name(request.migration_req_policy or MigrationReqPolicy.SR)
    return parse_rule(unit, order, getattr(request, request.WhichOneof("value") or "num_reqs"))


def epoch_of(message: types.Epoch) -> Epoch:
    return Epoch(message.term, message.hop)


def epoch_message(epoch: Epoch) -> types.Epoch:
    return types.Epoch(term=epoch.term, hop=epoch.hop)


def reason_of(number: types.Reason) -> Reason:
    """The protocol's word for a number; `INTERNAL` for one that this version does not know."""
    try:
        return Reason(types.reason_word(number))
    except ValueError:
        return Reason.INTERNAL


def reason_number(reason: str | None) -> types.Reason:
    """The number of a reason's word, and of none at all. Raises ValueError for a word that is no reason."""
    return types.parse_reason(reason or "")
