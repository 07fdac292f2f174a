# SPDX-License-Identifier: Apache-2.0
"""Instances that come and go as the production scaler says, on the simulator's clock."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.metrics import Metrics, Summary
from llumsim.cluster.run import ClusterConfig, Happening, What, run
from llumsim.cluster.workload import Arrival
from llumsim.engine.step_model import load_hardware

A10 = replace(load_hardware("a10-llama-7b"), cold_start_s=5.0)
SCALING = ScalingConfig(bounds=Bounds(1, 4), low_freeness=160, high_freeness=320, cold_start_s=5.0, settle_s=10.0)


def wave() -> list[Arrival]:
    """Many for a minute, and hardly any for two: outputs of up to a minute."""
    draw, at_s, made = random.Random(4), 0.0, []
    while at_s < 180.0:
        at_s += draw.expovariate(1.2 if at_s < 60 else 0.05)
        made.append(Arrival(at_s, draw.randint(50, 600), draw.randint(50, 1200)))
    return made


@functools.cache
def played(*, moves: bool) -> tuple[Summary, Metrics]:
    control = ControlConfig() if moves else ControlConfig(rescheduling=None)
    return run(ClusterConfig(groups=[("", A10, 4)], control=control, scaling=SCALING), wave())


def numbers(metrics: Metrics, begin_s: float, end_s: float) -> list[int]:
    return [one.num_instances for one in metrics.samples if begin_s <= one.at_s < end_s]


def test_instances_follow_the_load_and_nothing_is_lost() -> None:
    summary, metrics = played(moves=True)
    assert summary.num_finished == summary.num_requests == len(wave())
    assert min(numbers(metrics, 12, 20)) <= 2, "all four were there at first"
    assert max(numbers(metrics, 45, 60)) >= 3
    assert max(numbers(metrics, 150, 180)) == 1
    assert summary.instance_s < 0.75 * 4 * summary.virtual_s


def test_moves_let_instances_leave_sooner() -> None:
    """The load is the same, and so is the scaler."""
    (with_moves, of_moves), (without, of_waits) = played(moves=True), played(moves=False)
    assert without.num_finished == with_moves.num_finished == len(wave())
    assert sum(numbers(of_moves, 60, 180)) < 0.95 * sum(numbers(of_waits, 60, 180))
    assert with_moves.instance_s < without.instance_s


def test_a_new_instance_is_filled_by_moves_at_once() -> None:
    """Nobody arrives after it: what it gets, it gets from others, and has its share of it within five seconds."""
    arrivals = [Arrival(number * 0.02, 200, 1500) for number in range(60)]
    happenings = [Happening(0.0, What.STOP, 2), Happening(1.0, What.START, 2)]
    _, metrics = run(ClusterConfig(groups=[("", A10, 3)], happenings=happenings), arrivals)
    before = next(one for one in metrics.samples if one.at_s >= 5)
    after = next(one for one in metrics.samples if one.at_s >= 11)
    assert len(before.loads) == 2
    assert len(after.loads) == 3
    assert min(after.loads) > 0.85 * sum(after.loads) / 3
