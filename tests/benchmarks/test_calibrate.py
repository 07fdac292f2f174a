# SPDX-License-Identifier: Apache-2.0
"""How the calibration compares, what its loads are, what engines write down; and, in the full suite, that it holds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.calibrate.comparison import (
    MEASURES,
    Outcome,
    errors,
    median_size,
    quantile_error,
    quantile_spread,
    rankings,
    run_spread,
    tpot,
    ttft,
)
from benchmarks.calibrate.engines import measured
from benchmarks.calibrate.load import LONG, SHORT, Counts, Played, Times, ramp, simulated, skewed
from benchmarks.calibrate.steps_on_cpu.steps_on_cpu import Batch, Device, StepRecord, batch_of
from llumsched.latency.fitting import MeasuredStep
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.run import ClusterConfig
from llumsim.engine.step_model import load_hardware

NOTHING = Counts(0, 0, 0)


def played(*ttfts_s: float) -> Played:
    return Played([Times(ttft_s, ttft_s / 10, ttft_s * 5) for ttft_s in ttfts_s], NOTHING)


def outcome(real: Sequence[Played], simulated: Sequence[Played], setting: str = "it") -> Outcome:
    return Outcome(2, "moderate", setting, real, simulated)


def test_errors_are_of_the_same_request_in_every_pair_of_runs() -> None:
    one = outcome([played(1.0, 2.0), played(2.0, 2.0)], [played(1.1, 1.0)])
    assert errors([one], ttft) == pytest.approx([0.1, -0.5, -0.45, -0.5])
    assert median_size(errors([one], tpot)) == pytest.approx(0.475)
    assert run_spread([one], ttft) == pytest.approx([1.0, 0.0, -0.5, 0.0])
    assert run_spread([outcome([played(1.0)], [played(1.0)])], ttft) == []


def test_distributions_are_over_all_runs() -> None:
    one = outcome([played(1.0, 3.0), played(2.0, 4.0)], [played(5.0, 5.0)])
    assert quantile_error(one, ttft, 0.5) == pytest.approx(1.0)
    assert quantile_spread(one, ttft, 0.5) == pytest.approx(0.5)


def test_settings_that_differ_less_than_runs_of_one_do_are_a_tie() -> None:
    """a and b are one behind the other in the two worlds, and nothing is wrong with that; c is told apart from both."""
    outcomes = [
        outcome([played(1.0), played(1.2)], [played(1.15)], "a"),
        outcome([played(1.25), played(1.25)], [played(1.1)], "b"),
        outcome([played(2.0), played(2.1)], [played(3.0)], "c"),
    ]
    first = rankings(outcomes)[0]
    assert [setting for setting, _ in first.real] == ["a", "b", "c"]
    assert [setting for setting, _ in first.simulated] == ["b", "a", "c"]
    assert (first.num_told_apart, first.wrong) == (2, [])
    assert first.real_spread == pytest.approx(0.2)
    assert [one.measure for one in rankings(outcomes)] == list(MEASURES)


def test_a_pair_in_the_wrong_order_is_told() -> None:
    outcomes = [
        outcome([played(1.0), played(1.1)], [played(3.0)], "a"),
        outcome([played(2.0), played(2.1)], [played(2.0)], "b"),
    ]
    assert [one.wrong for one in rankings(outcomes)] == [[("a", "b")]] * len(MEASURES)


def test_each_round_has_one_long_request() -> None:
    requests = skewed(rate=2.0, seconds=50.0, num_instances=3, seed=1)
    assert requests == skewed(rate=2.0, seconds=50.0, num_instances=3, seed=1)
    assert len(requests) == pytest.approx(300, rel=0.2)
    for number, one in enumerate(requests):
        lengths = LONG if number % 3 == 0 else SHORT
        assert lengths.prompt[0] <= len(one.prompt) <= lengths.prompt[1]
        assert lengths.output[0] <= one.num_output <= lengths.output[1]


def test_the_probe_has_each_rate_in_turn() -> None:
    times = [one.at_s for one in ramp([1.0, 20.0], 50.0, seed=0)]
    assert times == sorted(times)
    slow = [at_s for at_s in times if at_s < 50]
    assert (len(slow), len(times) - len(slow)) == (pytest.approx(50, rel=0.4), pytest.approx(1000, rel=0.2))


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """Of each request: how many tokens are computed, and how many this step computes."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=done) for name, (done, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[done for done, _ in cached.values()]
        ),
        num_scheduled_tokens={name: number for name, (_, number) in (new | cached).items()},
    )


def test_a_batch_is_counted_as_the_step_model_counts_it() -> None:
    one = scheduled({"whole": (0, 4), "one token": (0, 1)}, {"decode": (99, 1), "chunk": (10, 3)})
    assert batch_of(one) == Batch(7, 4 * 5 // 2 + 3 * 10 + 3 * 4 // 2, 2, 1 + 100)


def test_a_device_takes_what_its_description_says() -> None:
    decode = [Device(seed, 0.0).seconds(Batch(0, 0, 3, 600)) for seed in range(200)]
    assert statistics.mean(decode) == pytest.approx(0.006 + 0.030 + 8 * 0.000216 + 600 * 2e-6, rel=0.01)
    assert statistics.stdev(decode) / statistics.mean(decode) == pytest.approx(Device.NOISE, rel=0.2)
    prefill = Batch(100, 5050, 0, 0)
    added, hidden = (Device(0, overlap).seconds(prefill) for overlap in (0.0, 1.0))
    assert hidden / added == pytest.approx((0.006 + 0.030) / (0.006 + 0.030 + 112 * 0.000216 + 5050 * 8.4e-9))


def test_a_step_lasts_until_the_next_one_that_follows() -> None:
    records = [
        StepRecord(1.0, 1.5, False, 100, 5050, 0, 0),
        StepRecord(1.6, 1.8, True, 0, 0, 1, 101),
        StepRecord(9.0, 9.1, False, 50, 1275, 0, 0),
        StepRecord(9.2, 9.3, True, 0, 0, 1, 51),
    ]
    assert list(measured(records, 0.0, 9.0)) == [MeasuredStep(100, 5050, 0, 0, pytest.approx(0.6))]


def test_the_simulator_gets_the_same_requests() -> None:
    hardware = load_hardware("a10-llama-7b")
    config = ClusterConfig(groups=[("", hardware, 2)], control=ControlConfig(policy="round-robin", rescheduling=None))
    requests = skewed(rate=0.5, seconds=30.0, num_instances=2, seed=1)
    first, again = simulated(config, requests, seeds=(0, 1))
    assert first.requests == again.requests  # round robin draws nothing
    assert len(first.requests) == len(requests)
    assert first.counts.statuses == pytest.approx(6, abs=3)
    # Prefill and decodes of an engine that is not full.
    assert min(times.ttft_s for times in first.requests) > 0.05
    assert all(0.037 < times.tpot_s < 0.2 for times in first.requests)


@pytest.mark.full
def test_the_simulator_is_true(tmp_path: Path) -> None:
    model = tmp_path / "mine.json"
    command = [sys.executable, "-m", "benchmarks.calibrate", "--quick", "--logs", str(tmp_path), "--write", str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["bench"] == "calibrate"
    assert row["ttft_median_error"] < 0.25
    assert row["tpot_median_error"] < 0.25
    assert row["ttft_p50_error"] < 0.25
    assert isinstance(row["ranking_same"], bool)
    assert row["probe"]["held_out_error"] < 0.1
    assert row["requests"] > 40
    hardware = load_hardware(str(model))
    assert hardware.step.a == pytest.approx(row["probe"]["step_s"]["a"] * 1e12, rel=0.01)
    assert 0.03 < row["probe"]["step_s"]["a"] < 0.06
