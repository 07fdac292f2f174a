# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view and decisions against the truth, and several schedulers that share a cluster."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence
from llumsim.cluster.metrics import Metrics, Summary
from llumsim.cluster.run import ClusterConfig, Happening, What, run
from llumsim.cluster.truth import Regret
from llumsim.cluster.workload import LENGTHS, Arrival, clipped, made_up
from llumsim.engine.step_model import load_hardware

A10 = load_hardware("a10-llama-7b")
MEDIUM = LENGTHS["medium"], LENGTHS["medium"]


def played(late_s: float = 0.2, happenings: tuple[Happening, ...] = (), **control: Any) -> tuple[Summary, Metrics]:
    config = ClusterConfig(
        groups=[("", A10, 4)],
        control=ControlConfig(**{"rescheduling": None, **control}),
        cadence=Cadence(late_s=late_s, foretold=1.0),
        happenings=happenings,
    )
    return run(config, clipped(made_up(1.5, 120, MEDIUM, random.Random(1)), 13_616))


def test_hindsight_of_forwarding_changes_nothing() -> None:
    without, none = played()
    with_it, metrics = played(foresight_s=0.5)
    assert with_it == without
    assert not none.misses
    misses = metrics.misses[len(metrics.misses) // 4 :]
    assert sum(abs(one.moved_kv) for one in misses) * 3 < sum(abs(one.reported_kv) for one in misses)
    assert sum(abs(one.moved_batch) for one in misses) * 3 < sum(abs(one.reported_batch) for one in misses)
    assert all(0.2 < one.age_s < 0.7 or one.reported_batch == 0 for one in misses), "idle ones tell once a second"


def test_several_schedulers_share_a_failing_cluster() -> None:
    happenings = (Happening(20, What.FAIL, 1), Happening(30, What.STOP, 2), Happening(31, What.START, 2))
    summary, _ = played(0.0, happenings, num_schedulers=3)
    assert summary.num_finished == 120


@pytest.mark.parametrize(("number", "placed"), [(1, [2, 2, 2, 2]), (4, [4, 4]), (8, [8])])
def test_schedulers_choose_the_same_instances_before_a_status(number: int, placed: list[int]) -> None:
    """Eight requests at once, before a status shows any of them: each scheduler counts its own only."""
    records = io.StringIO()
    control = ControlConfig(rescheduling=None, num_schedulers=number)
    arrivals = [Arrival(5.0, 100, 20)] * 8
    run(ClusterConfig(groups=[("", A10, 4)], control=control, cadence=Cadence(late_s=1.0)), arrivals, records)
    chosen = Counter(json.loads(line)["instances"][0] for line in records.getvalue().splitlines())
    assert sorted(chosen.values()) == placed


def test_top_k_replaces_the_policys() -> None:
    best, _ = played(top_k=1)
    any_of_all, _ = played(top_k=4)
    assert best != any_of_all


BLOCK = 16 / 13_616


def looked_back(
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
    without, none = looked_back(happenings=happenings)
    with_it, regrets = looked_back(happenings=happenings, has_hindsight=True)
    assert with_it.moves > 0
    assert with_it == without
    assert not none
    assert len(regrets) >= with_it.num_requests


def test_young_statuses_mislead_by_a_few_blocks_at_most() -> None:
    _, regrets = looked_back(has_hindsight=True)
    misled = [one for one in regrets if one.is_misled]
    assert len(misled) < 0.1 * len(regrets)
    assert all(abs(one.memory) < 4 * BLOCK for one in misled)
    assert all(one.prefill_tokens == one.memory == 0 for one in regrets if not one.is_misled)


@pytest.mark.parametrize("account", [True, False])
def test_old_statuses_mislead_most_without_an_account(account: bool) -> None:
    _, regrets = looked_back(late_s=5.0, account=account, has_hindsight=True)
    misled = [one for one in regrets if one.is_misled]
    assert len(misled) > 0.5 * len(regrets)
    tokens = sum(one.prefill_tokens for one in misled) / len(misled)
    assert (tokens > 100) is not account
