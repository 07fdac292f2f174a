# SPDX-License-Identifier: Apache-2.0
"""Translates between the words of `llumlet.protocol` and the numbers of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from llumlet.contract import types
from llumlet.contract.types import Handover, MigrateRequest, MigrationReqPolicy, MigrationType, Mode, MovePhase
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Settlement
from llumlet.protocol.ids import Epoch
from llumlet.protocol.move.plan import Method
from llumlet.protocol.move.selection import Rule, parse_rule
from llumlet.protocol.move.source import State

HANDOVERS: Final = {each: cast(Handover.State, Handover.State.Value(each.name)) for each in Settlement}
_OTHER_NAMES: Final = {State.PLANNED: "SELECTED", State.PINNING: "COPYING"}
PHASES: Final = {each: cast(MovePhase, MovePhase.Value(_OTHER_NAMES.get(each, each.name))) for each in State}
"""The source's states as callers see them."""
MODES: Final = {each: cast(Mode, Mode.Value(each.name)) for each in Method}
METHODS: Final[Mapping[Mode, Method]] = {mode: method for method, mode in MODES.items()}
HEALTHS: Final = {each: cast(types.Health, types.Health.Value(each.name)) for each in wire.Health}


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
