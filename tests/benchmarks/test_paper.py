# SPDX-License-Identifier: Apache-2.0
"""The experiments of the paper: each is played small. What they find is in benchmarks/experiments.md; here, what
holds at any size."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import blind, cost, day, priorities, scale
from benchmarks.paper.lab import INFAAS, PACKING, RANDOM, RANDOM_MOVES
from benchmarks.paper.prefixes import TRACE
from benchmarks.simulated import add_rescheduling, read_setting
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.metrics import Metrics, RequestRecord, Slo

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


@pytest.mark.parametrize(
    "arguments",
    [
        ["perpetuum-mobile"],
        ["bursts", "--settings", "perpetuum-mobile"],
        ["priorities", "--urgent", "1.5"],
        ["priorities", "--urgent", "half"],
    ],
)
def test_unknown_arguments_are_refused(arguments: list[str], play: Play) -> None:
    with pytest.raises(SystemExit):
        play(*arguments)


def test_without_a_trace_its_experiments_are_left_out(play: Play, tmp_path: Path) -> None:
    rows, said = play("prefixes", "scale", "--traces", str(tmp_path))
    assert rows == []
    assert all(name in said for name in (TRACE, *scale.RATES))


@pytest.mark.rest
def test_prefixes_are_cached_if_they_may_be(play: Play, traces: Path) -> None:
    rows, _ = play("prefixes", "--traces", str(traces), "--settings", "round-robin")
    assert [row["cached_share"] > 0.3 for row in rows] == [row["caching"] for row in rows]


@pytest.mark.rest
def test_the_number_of_processes_does_not_matter(play: Play) -> None:
    arguments = ("motivation", "--requests", "30", "--seeds", "2")
    (one, _), (other, _) = play(*arguments), play(*arguments, "--jobs", "2")
    for row in (*one, *other):
        for name in _OF_THE_MACHINE:
            del row[name]
    assert one == other
    assert [row["seed"] for row in one] == [0, 1]


@pytest.mark.rest
def test_instance_with_free_memory_preempts(play: Play) -> None:
    rows, said = play("motivation", "--quick")
    (row,) = rows
    assert 0.4 < row["kv_used"] < 0.8
    assert row["preempted_share"] > 0.02
    assert row["tpot_p99_s"] > 2 * row["tpot_p50_s"]
    assert row["slowest_lost_share"] > 0.5
    assert "62 %" in said


@pytest.mark.rest
def test_packed_instances_preempt_more(play: Play) -> None:
    rows, _ = play("fragmentation", "--quick", "--requests", "400", "--settings", INFAAS, PACKING)
    preempted = {(row["rate"], row["setting"]): row["preempted_share"] for row in rows}
    rates = {rate for rate, _ in preempted}
    assert len(rates) > 1
    for rate in rates:
        assert preempted[rate, "packing"] > preempted[rate, "infaas"]


@pytest.mark.rest
def test_late_statuses_need_an_account(play: Play) -> None:
    rows, _ = play("staleness", "--quick", "--requests", "300", "--settings", INFAAS)
    ttft_p99_s = {(row["late_s"], row["account"]): row["ttft_p99_s"] for row in rows}
    late_s = max(late_s for late_s, _ in ttft_p99_s)
    assert ttft_p99_s[late_s, False] > 1.5 * ttft_p99_s[late_s, True]
    assert ttft_p99_s[late_s, True] < 1.5 * ttft_p99_s[0.0, True]


def test_the_fewest_are_found_in_few_tries() -> None:
    tried: list[int] = []

    def is_enough(size: int) -> bool:
        tried.append(size)
        return size >= 13

    assert cost.fewest(range(9, 21), is_enough) == 13
    assert len(tried) <= 4
    assert cost.fewest(range(9, 13), is_enough) is None


@pytest.mark.full
@pytest.mark.rest
def test_fewer_instances_do_what_packed_ones_do(play: Play) -> None:
    rows, said = play("cost", "--requests", "150", "--seeds", "2", "--settings", PACKING, "load-balance")
    tails_s = {
        (row["setting"], row["size"], row["seed"]): row["ttft_p99_s"] for row in rows if row["rate"] == 9.0
    }  # fmt: skip
    (told,) = [line.strip(" |\n").split("|") for line in said.splitlines() if line.startswith("| 9 ")]
    size, saved = int(told[5].split()[0]), float(told[8])
    assert size < 16
    assert saved == pytest.approx(100 * (1 - size / 16), rel=0.01)

    def tail_s(setting: str, size: int) -> float:
        return math.sqrt(tails_s[setting, size, 0] * tails_s[setting, size, 1])

    assert tail_s("load-balance", size) <= 1.05 * tail_s("packing", 16)
    assert float(told[6]) == pytest.approx(tail_s("load-balance", size), rel=0.01)


@pytest.mark.rest
def test_urgent_requests_wait_less_where_engines_obey_priorities(play: Play) -> None:
    rows, said = play("priorities", "--quick", "--requests", "1000", "--settings", PACKING)
    found = {row["priorities"]: row for row in rows if row["cv"] == 8}
    assert found[True]["urgent_ttft_p99_s"] < 0.5 * found[False]["urgent_ttft_p99_s"]
    assert found[True]["other_ttft_mean_s"] > found[False]["other_ttft_mean_s"]
    assert "1.2 to 1.5" in said


@pytest.mark.rest
def test_each_kind_has_a_share_and_objectives_of_its_own(play: Play) -> None:
    rows, said = play("priorities", "--quick", "--requests", "200", "--urgent", "0.5", "--settings", "load-balance")
    assert {row["urgent"] for row in rows} == {0.5}
    assert "in time" in said
    assert "staying" not in said, "nothing moves"

    def one(name: str, priority: int, ttft_s: float | None, tpot_s: float | None) -> RequestRecord:
        outcome = "refused" if ttft_s is None else "finished"
        return RequestRecord(name, 0.0, "", priority, 10, 5, outcome, ["i0"], ttft_s, tpot_s, 3.0)

    urgent, other = priorities.OBJECTIVES["urgent"], priorities.OBJECTIVES["other"]
    records = [
        one("a", -1, urgent.ttft_s, urgent.tpot_s),
        one("b", -1, urgent.ttft_s, None),
        one("c", -1, other.ttft_s, urgent.tpot_s),
        one("d", -1, None, None),
        one("e", 0, other.ttft_s, urgent.tpot_s),
        one("f", 0, urgent.ttft_s, 2 * other.tpot_s),
    ]
    found = priorities.measure_kinds(Metrics(Slo()), records)
    assert (found["urgent_slo_attainment"], found["other_slo_attainment"]) == (0.5, 0.5)


@pytest.mark.rest
def test_moved_requests_are_compared_with_runs_without_moves(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priorities, "_LOADS", ((7.4, 8),))
    _, said = play("priorities", "--requests", "100", "--settings", "load-balance", "load-balance+moves")
    moved = said[said.index("staying") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in moved if "load-balance+moves" in line]
    assert len(rows) == 2 * 2, "priorities, kinds"
    assert any(float(cells[6]) > 0 for cells in rows)

    def one(name: str, num_moves: int, outcome: str = "finished") -> RequestRecord:
        return RequestRecord(name, 0.0, "", 0, 10, 5, outcome, ["i0"], 0.1, 0.05, 3.0, num_moves)

    moving = [one("a", 1), one("b", 0), one("c", 2), one("d", 1, "lost")]
    staying = [one("d", 0), one("c", 0, "refused"), one("b", 0), one("a", 0)]
    assert priorities.moved_and_same(moving, staying) == [(moving[0], staying[3])]


@pytest.mark.rest
def test_a_day_has_a_valley_and_a_peak(play: Play) -> None:
    (row,), _ = play("day", "--quick", "--settings", "load-balance")
    rates, used = ([row[f"{part}_{name}"] for part in ("valley", "slope", "peak")] for name in ("rate", "kv_used"))
    assert rates == pytest.approx([3.3, 5.3, 7.3], rel=0.1)
    assert used[0] < used[1] < used[2]


@pytest.mark.parametrize(
    ("at_s", "part"),
    [(0, "valley"), (15, "valley"), (18, "slope"), (35, "peak"), (65, "peak"), (70, "slope"), (84, "valley")],
)
def test_the_parts_of_a_day(at_s: float, part: str) -> None:
    assert day.part_of(at_s, 100.0) == part
    assert day.part_of(at_s + 300.0, 100.0) == part


@pytest.mark.full
@pytest.mark.rest
def test_moves_mend_what_random_dispatch_does(play: Play) -> None:
    rows, _ = play("blind", "--quick", "--requests", "600", "--settings", RANDOM, RANDOM_MOVES)
    took_s = {(row["rate"], row["setting"]): row["e2e_mean_s"] for row in rows}
    rates = {rate for rate, _ in took_s}
    assert len(rates) == 2
    for rate in rates:
        assert took_s[rate, "random+moves"] < took_s[rate, "random"]


def test_prompts_behind_are_those_of_the_same_instance_and_second() -> None:
    sent = [("a", 0.0, "i0", 10), ("b", 0.5, "i1", 20), ("c", 0.9, "i0", 30), ("d", 1.5, "i0", 40)]
    records = [
        RequestRecord(name, at_s, "", 0, num_prompt, 5, "finished", [instance, "i9"])
        for name, at_s, instance, num_prompt in reversed(sent)
    ]
    assert blind.prompts_behind(records) == {"a": 30, "b": 0, "c": 40, "d": 0}


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


@pytest.mark.parametrize("policy", ["virtual-usage", "load-balance+moves"])
def test_room_beside_urgent_requests_is_one_number_for_a_setting(policy: str) -> None:
    parser = argparse.ArgumentParser()
    add_rescheduling(parser)
    setting = read_setting(policy, parser.parse_args(["--priority-headroom", "0.2"]))
    control = ControlConfig(policy=setting.policy, rescheduling=setting.rescheduling)
    assert setting.priority_headroom == 0.2
    assert control.headroom == (0.2 if setting.rescheduling else 0.5)
    assert ControlConfig(priority_headroom=0.3, rescheduling=setting.rescheduling).headroom == 0.3


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
def test_invalid_settings_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_setting(text)
