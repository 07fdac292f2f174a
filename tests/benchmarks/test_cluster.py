# SPDX-License-Identifier: Apache-2.0
"""The command line of the cluster simulation. What it simulates is tested in tests/llumsim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cluster

PROMISED = {
    "bench", "trace", "instances", "rate", "policy", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "gap_p99_s",
    "preemption_loss", "moves", "goodput", "slo_attainment", "virtual_s", "wall_s",
}  # fmt: skip


def play(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["cluster", *arguments])
    cluster.main()


def test_settings_are_compared_on_the_same_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(
        monkeypatch, "--rate", "6", "--requests", "40", "--instances", "4", "--settings", "round-robin",
        "load-balance+moves", "--fail", "2:1", "--start", "3:1", "--urgent", "0.1", "--by-priority",
        "--rescheduling-interval-ms", "200", "--records", str(tmp_path), "--plots", str(tmp_path / "plots"),
        "--json", str(tmp_path / "all.jsonl"),
    )  # fmt: skip
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["policy"] for row in rows] == ["round-robin", "load-balance+moves"]
    assert all(row.keys() >= PROMISED for row in rows)
    assert all(row["num_requests"] == 40 for row in rows)
    assert "TTFT p99" in said.err
    assert (tmp_path / "all.jsonl").read_text() == said.out
    for setting in ("round-robin", "load-balance+moves"):
        records = [json.loads(line) for line in (tmp_path / f"{setting}.jsonl").read_text().splitlines()]
        assert len(records) == 40
        assert (tmp_path / "plots" / f"{setting}.png").stat().st_size > 10_000
    assert (tmp_path / "plots" / "distributions.png").exists()


def test_a_wave_has_fewer_requests_a_second_than_its_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(
        monkeypatch, "--rate", "6", "--requests", "180", "--valley", "0.2", "--period", "50",
        "--settings", "load-balance",
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out)["rate"] == pytest.approx(0.6 * 6, rel=0.2)


def test_a_trace_is_cut_and_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0000000,100,5" for second in range(60)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    play(
        monkeypatch, "--trace", str(trace), "--seconds", "30", "--rate", "2", "--settings", "load-balance",
        "--model", "a:2:1", "--model", "b:2:3",
    )  # fmt: skip
    row = json.loads(capsys.readouterr().out)
    assert row["trace"] == "trace.csv"
    assert row["num_finished"] == pytest.approx(60, abs=5)
    assert row["instances"] == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "m-m"],
        ["--trace", "/nowhere"],
        ["--rate", "1", "--valley", "1.5"],
        ["--rate", "1", "--hardware", "abacus"],
        ["--rate", "1", "--rescheduling-interval-ms", "x"],
    ],
)
def test_impossible_arguments_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        play(monkeypatch, *arguments)
