# SPDX-License-Identifier: Apache-2.0
"""How outcomes are judged and told; and, in the full suite, that predictions come near on real engines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.objectives import forward, latency
from benchmarks.objectives.__main__ import main
from benchmarks.objectives.latency import IDLE, Load, Seen
from benchmarks.objectives.outcome import Outcome, table
from llumsched.simulator.foresight import Miss


@pytest.mark.parametrize(("ours", "target", "held"), [(0.04, 0.05, True), (0.06, 0.05, False), (0.06, None, None)])
def test_an_outcome_is_held_against_what_was_to_be_reached(
    ours: float, target: float | None, held: bool | None
) -> None:
    row = Outcome("c", "f", 0.2, ours, target, {"p90": 0.123456}).to_dict()
    assert (row["bench"], row["case"], row["baseline"], row["ours"], row["held"]) == (
        "objectives",
        "c",
        0.2,
        ours,
        held,
    )
    assert row["ratio"] == pytest.approx(ours / 0.2)
    assert row["p90"] == 0.1235
    assert table([Outcome("c", "f", 0.2, ours, target)]).row_count == 1


def test_errors_are_of_the_prediction_and_the_way_of_one_that_knows_the_median_only() -> None:
    seen = [Seen((90.0, 100.0), (40.0, 50.0)), Seen((190.0, 200.0), (50.0, 50.0)), Seen((290.0, 330.0), (66.0, 60.0))]
    ttft, tpot = latency._outcomes(Load("moderate", 1.0, 1.0, has_target=True), seen, way_ms=10.0)
    assert ttft.ours == pytest.approx(0.0)
    assert ttft.more["p90"] == pytest.approx(0.8 * 30 / 330)
    assert ttft.baseline == pytest.approx(1 - 200 / 330)  # of 1, 0 and 0.39
    assert ttft.target == latency.TARGET
    assert tpot.ours == pytest.approx(0.1)
    assert tpot.more["bias"] == pytest.approx(0.0)
    assert latency._outcomes(IDLE, seen, 0.0)[0].target is None


def test_a_view_is_to_be_three_times_nearer_than_what_was_reported() -> None:
    misses = [Miss(-0.03, 0.01, -2.0, 0.0, 0.25, 0), Miss(0.06, -0.01, 1.0, -1.0, 0.25, 1)]
    kv, batch = forward._outcomes(forward.SCENES[0], 0.2, 0.5, misses)
    assert (kv.case, kv.baseline, kv.ours) == ("forward: a10 moderate, 200 ms, 50% foretold", 4.5, 1.0)
    assert kv.held
    assert (batch.baseline, batch.ours, batch.held) == (1.5, 0.5, True)
    assert batch.more["nobody_ended_stale"] == 2.0
    assert batch.more["nobody_ended_moved"] == 0.0
    assert batch.more["gone"] == 0.5


def test_a_case_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["latencies"])
    assert "latencies: no such case; there are latency, forward, engines" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_is_moved_on_is_nearer() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.objectives", "forward", "--quick"],
        capture_output=True, text=True, timeout=290, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["held"] for row in rows if row["target"] is not None] == [True, True]
    assert {row["figure"] for row in rows} >= {"TTFT p99, s", "KV usage: spread between instances"}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_predictions_come_near() -> None:
    """Within more than what is to be reached: of a few requests on a machine that does other things, too."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.objectives", "latency", "--quick"],
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    rows = {row["case"]: row for row in map(json.loads, run.stdout.splitlines())}
    assert rows.keys() == {"latency: TTFT, moderate", "latency: TPOT, moderate"}
    for row in rows.values():
        assert row["ours"] < 3 * latency.TARGET
    assert rows["latency: TTFT, moderate"]["ratio"] < 0.5
