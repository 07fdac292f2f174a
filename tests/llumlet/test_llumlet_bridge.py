# SPDX-License-Identifier: Apache-2.0
"""Every word of the protocol has its number in messages, and comes back from there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llumlet.contract import bridge, types
from llumlet.contract.types import MigrateRequest, Mode
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.events import Settlement
from llumlet.protocol.ids import Epoch
from llumlet.protocol.move.plan import Method
from llumlet.protocol.move.selection import ALL, Order, Rule, Unit
from llumlet.protocol.move.source import State


def test_every_word_has_a_number() -> None:
    assert set(bridge.HANDOVERS) == set(Settlement)
    assert set(bridge.PHASES) == set(State)
    assert set(bridge.MODES) == set(Method)
    assert set(bridge.HEALTHS) == set(wire.Health)
    for numbers in (bridge.HANDOVERS, bridge.MODES, bridge.HEALTHS):
        assert len(set(numbers.values())) == len(numbers)
    assert {bridge.METHODS[mode] for mode in bridge.MODES.values()} == set(Method)


@pytest.mark.parametrize("reason", Reason)
def test_reasons_come_back(reason: Reason) -> None:
    assert bridge.reason_of(bridge.reason_number(reason)) is reason


def test_reasons_that_are_none_or_new() -> None:
    assert bridge.reason_number(None) == bridge.reason_number("") == types.Reason.REASON_NONE
    assert bridge.reason_of(9999) is Reason.INTERNAL  # type: ignore[arg-type]  # of a newer version
    with pytest.raises(ValueError, match="GRAVITY"):
        bridge.reason_number("gravity")


@given(term=st.integers(0, 2**31 - 1), hop=st.integers(0, 2**31 - 1))
def test_epochs_come_back(term: int, hop: int) -> None:
    assert bridge.epoch_of(bridge.epoch_message(Epoch(term, hop))) == Epoch(term, hop)


def test_rules() -> None:
    asked = MigrateRequest(migration_type="RATIO", migration_req_policy="LR", kv_cache_usage_ratio=0.25)
    assert bridge.rule_of(asked) == Rule(Unit.RATIO, Order.LR, 0.25)
    without_an_order = MigrateRequest(migration_type="NUM_REQ", num_reqs=ALL, method=Mode.LIVE)
    assert bridge.rule_of(without_an_order) == Rule(Unit.NUM_REQ, Order.SR, ALL)
    with pytest.raises(Refused, match="invalid_request"):
        bridge.rule_of(MigrateRequest(migration_type="TOKEN", migration_req_policy="LR"))
