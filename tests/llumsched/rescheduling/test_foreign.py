# SPDX-License-Identifier: Apache-2.0
"""Selectors of pairs that others have written: what they get wrong stays theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.providers.status import Cargo
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.rescheduling.planning.pairs import Ends
from llumsched.rescheduling.planning.planner import Plan
from llumsched.rescheduling.planning.policies import load_policies
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from tests.llumsched.rescheduling.cluster import instance, pairs, planned

CONFIG = ReschedulingConfig(policies=("neutral_load", "neutral_failover"))
ONE = Selection(Unit.NUM_REQ, Order.SR, 1)


@dataclass(frozen=True)
class Foreign:
    """Has a function for its pairs; the instances' names are their rows."""

    chooses: Callable[[Draft], None]
    purpose: Purpose = Purpose.FAILOVER
    name: str = "foreign"

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        self.chooses(draft)
        return 1, 1


def move(draft: Draft, source: int, destination: int) -> None:
    ids = draft.snapshot.ids
    made = Move("foreign", Purpose.FAILOVER, ids[source], ids[destination], ONE, 100.0)
    draft.choose(source, destination, made, Cargo(1, 100.0))


def made_by(chooses: Callable[[Draft], None], config: ReschedulingConfig = CONFIG) -> Plan:
    """Its policy has the first turn, then those of the configuration."""
    own, *rest = load_policies(config)
    foreign = replace(own, name="foreign", selector=Foreign(chooses))
    cluster = [
        instance("a", 0.8),
        instance("b", 0.2),
        instance("c", 0.5, compatibility_digest="another"),
        instance("d", 0.5, max_migrations_in=1, num_migrate_in_reqs=1),
        instance("e", 0.7, schedulable=False),
        instance("f", 0.1),
    ]
    return planned(cluster, config, policies=[foreign, own, *rest])


A, B, C, D, E, F = range(6)


def test_raising_selector_does_not_stop_others() -> None:
    def chooses(draft: Draft) -> None:
        raise ZeroDivisionError("no instance")

    made = made_by(chooses)
    assert [repr(result.error) for result in made.results if result.error] == ["ZeroDivisionError('no instance')"]
    assert {move.source for move in made.moves} == {"e"}, "a failover needs all destinations"


def test_moves_chosen_before_an_exception_stay() -> None:
    def chooses(draft: Draft) -> None:
        move(draft, A, B)
        raise ValueError

    made = made_by(chooses)
    assert pairs(made)[0] == ("a", "b")
    assert "a" not in {move.source for move in made.moves[1:]}, "it has its move in this pass"


@pytest.mark.parametrize(
    ("chooses", "fault"),
    [
        (lambda draft: move(draft, A, A), "they are the same"),
        (lambda draft: move(draft, A, C), "they cannot exchange requests"),
        (lambda draft: move(draft, A, D), "one of them has as many moves as it may have"),
        (lambda draft: (move(draft, A, B), move(draft, F, A)), "the destination gives requests itself"),
        (lambda draft: (move(draft, A, B), move(draft, B, F)), "the source takes requests in this pass"),
    ],
)
def test_moves_that_no_pass_may_have(chooses: Callable[[Draft], None], fault: str) -> None:
    [error] = [result.error for result in made_by(chooses).results if result.error]
    assert isinstance(error, ValueError)
    assert str(error).endswith(fault)


def test_a_pass_ends_where_it_is_full() -> None:
    def chooses(draft: Draft) -> None:
        for _ in range(3):
            move(draft, A, B)

    made = made_by(chooses, replace(CONFIG, max_moves_per_pass=2))
    assert pairs(made) == [("a", "b")] * 2
    assert "the pass has all the moves that it may have" in str(made.results[0].error)
