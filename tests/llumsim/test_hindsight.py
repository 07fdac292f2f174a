# SPDX-License-Identifier: Apache-2.0
"""Decisions that are made twice: on what the scheduler sees, and on what was so."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from llumsim.cluster.control import ControlConfig
from llumsim.cluster.lengths import LENGTHS
from llumsim.cluster.member import Cadence
from llumsim.cluster.metrics import Summary
from llumsim.cluster.run import ClusterConfig, Happening, What, run
from llumsim.cluster.truth import Regret
from llumsim.cluster.workload import clipped, made_up
from llumsim.engine.step_model import load_hardware

A10 = load_hardware("a10-llama-7b")
MEDIUM = LENGTHS["medium"], LENGTHS["medium"]
BLOCK = 16 / 13_616


def played(
    *, late_s: float = 0.0, happenings: Sequence[Happening] = (), **control: bool
) -> tuple[Summary, Sequence[Regret]]:
    config = ClusterConfig(
        groups=[("", A10, 6)],
        control=ControlConfig(**control),  # type: ignore[arg-type]  # switches all of them
        cadence=Cadence(late_s=late_s),
        happenings=happenings,
    )
    summary, metrics = run(config, clipped(made_up(3, 250, MEDIUM, random.Random(1)), 13_616))
    return summary, metrics.regrets


def test_hindsight_changes_nothing() -> None:
    happenings = [Happening(20, What.FAIL, 1), Happening(30, What.STOP, 2)]
    without, none = played(happenings=happenings)
    with_it, regrets = played(happenings=happenings, has_hindsight=True)
    assert with_it.moves > 0
    assert with_it == without
    assert not none
    assert len(regrets) >= with_it.num_requests


def test_young_statuses_mislead_by_a_block_if_at_all() -> None:
    _, regrets = played(has_hindsight=True)
    misled = [one for one in regrets if one.is_misled]
    assert len(misled) < 0.1 * len(regrets)
    assert all(abs(one.memory) < 4 * BLOCK for one in misled)
    assert all(one.prefill_tokens == one.memory == 0 for one in regrets if not one.is_misled)


@pytest.mark.parametrize("account", [True, False])
def test_old_ones_mislead_most_where_nothing_is_remembered(account: bool) -> None:
    _, regrets = played(late_s=5.0, account=account, has_hindsight=True)
    misled = [one for one in regrets if one.is_misled]
    assert len(misled) > 0.5 * len(regrets)
    tokens = sum(one.prefill_tokens for one in misled) / len(misled)
    assert (tokens > 100) is not account
