# SPDX-License-Identifier: Apache-2.0
"""The experiments of the paper: each is played small. What they find is in docs/experiments.md; here, what holds at any
size."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import scale
from benchmarks.paper.lab import INFAAS, PACKING
from benchmarks.paper.prefixes import TRACE
from benchmarks.simulated import read_setting

Rows = list[dict[str, Any]]
Play = Callable[..., tuple[Rows, str]]
_OF_THE_MACHINE = ("cpu_s", "speed")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """Rows for machines, and what people are told."""

    def played(*arguments: str) -> tuple[Rows, str]:
        monkeypatch.setattr("sys.argv", ["paper", *arguments])
        paper.main()
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()], said.err

    return played


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    began = datetime(2023, 11, 16, 18, 15)
    rows = [f"{(began + timedelta(seconds=second)).isoformat(' ')}.0000000,600,20" for second in range(20)]
    for name in scale.RATES:
        (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    prompts = [
        {"timestamp": 1000 * second, "input_length": 2048, "output_length": 9, "hash_ids": [0, 1, 2, 10 + second]}
        for second in range(20)
    ]
    (tmp_path / TRACE).write_text("\n".join(map(json.dumps, prompts)))
    return tmp_path


@pytest.mark.parametrize("name", paper.EXPERIMENTS)
def test_an_experiment_says_what_it_played(name: str, play: Play, traces: Path) -> None:
    rows, said = play(name, "--quick", "--requests", "12", "--traces", str(traces))
    assert rows
    assert {(row["bench"], row["experiment"], row["seed"]) for row in rows} == {("paper", name, 0)}
    assert all(row["num_finished"] == row["num_requests"] > 0 for row in rows)
    assert name in said


@pytest.mark.parametrize("arguments", [["perpetuum-mobile"], ["bursts", "--settings", "perpetuum-mobile"]])
def test_what_is_unknown_is_refused(arguments: list[str], play: Play) -> None:
    with pytest.raises(SystemExit):
        play(*arguments)


def test_without_a_trace_its_experiments_are_left_out(play: Play, tmp_path: Path) -> None:
    rows, said = play("prefixes", "scale", "--traces", str(tmp_path))
    assert rows == []
    assert all(name in said for name in (TRACE, *scale.RATES))


def test_prefixes_are_cached_if_they_may_be(play: Play, traces: Path) -> None:
    rows, _ = play("prefixes", "--traces", str(traces), "--settings", "round-robin")
    assert [row["cached_share"] > 0.3 for row in rows] == [row["caching"] for row in rows]


def test_the_number_of_processes_does_not_matter(play: Play) -> None:
    arguments = ("motivation", "--requests", "30", "--seeds", "2")
    (one, _), (other, _) = play(*arguments), play(*arguments, "--jobs", "2")
    for row in (*one, *other):
        for name in _OF_THE_MACHINE:
            del row[name]
    assert one == other
    assert [row["seed"] for row in one] == [0, 1]


def test_one_instance_with_memory_to_spare_preempts(play: Play) -> None:
    rows, said = play("motivation", "--quick")
    (row,) = rows
    assert 0.4 < row["kv_used"] < 0.8
    assert row["preempted_share"] > 0.02
    assert row["tpot_p99_s"] > 2 * row["tpot_p50_s"]
    assert row["slowest_lost_share"] > 0.5
    assert "62 %" in said


def test_packed_instances_preempt_more(play: Play) -> None:
    rows, _ = play("fragmentation", "--quick", "--requests", "400", "--settings", INFAAS, PACKING)
    preempted = {(row["rate"], row["setting"]): row["preempted_share"] for row in rows}
    rates = {rate for rate, _ in preempted}
    assert len(rates) > 1
    for rate in rates:
        assert preempted[rate, "packing"] > preempted[rate, "infaas"]


def test_late_statuses_need_an_account(play: Play) -> None:
    rows, _ = play("staleness", "--quick", "--requests", "300", "--settings", INFAAS)
    ttft_p99_s = {(row["late_s"], row["account"]): row["ttft_p99_s"] for row in rows}
    late_s = max(late_s for late_s, _ in ttft_p99_s)
    assert ttft_p99_s[late_s, False] > 1.5 * ttft_p99_s[late_s, True]
    assert ttft_p99_s[late_s, True] < 1.5 * ttft_p99_s[0.0, True]


def test_a_setting_has_a_name_and_flags_of_its_own() -> None:
    plain = read_setting("load-balance")
    assert (plain.name, plain.policy, plain.rescheduling) == ("load-balance", "load-balance", None)
    moving = read_setting(
        "eager=load-balance+moves --rescheduling-horizon-seconds 7 --rescheduling-policies=decode_load"
    )
    assert (moving.name, moving.policy) == ("eager", "load-balance")
    assert moving.rescheduling is not None
    assert moving.rescheduling.horizon_s == 7
    assert moving.rescheduling.policies == ("decode_load",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("nothing-known", "unknown policy"),
        ("load-balance --rescheduling-horizon-seconds 7", r"needs \+moves"),
        ("load-balance+moves --rescheduling-horizon-seconds soon", "soon"),
        ("load-balance+moves --horizon 7", "--horizon"),
    ],
)
def test_what_is_no_setting_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_setting(text)
