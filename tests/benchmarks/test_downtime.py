# SPDX-License-Identifier: Apache-2.0
"""The downtime benchmark's figures, from streams that never happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import downtime
from benchmarks.downtime import Cell, largest_gap, parse, plot, sample_of, server, table_of, trace
from tests.support.model import PRESETS
from tests.support.timelines import move, stream

ISSUE_KEYS = {
    "method",
    "context_tokens",
    "moves",
    "link_gb_s",
    "mode",
    "stall_ms",
    "itl_ms_p50",
    "excess_ms_p50",
    "stall_over_itl_p50",
    "phase_ms",
    "copied_bytes",
    "recomputed_tokens",
    "rounds",
}


def cell(method: str, length: int, stalls_ms: list[float], gap_ms: float = 10.0) -> Cell:
    made = Cell(method, length)
    for stall_ms in stalls_ms:
        gaps = [gap_ms / 1e3] * 20 + [stall_ms / 1e3] + [gap_ms / 1e3] * 20
        moved = stream(gaps)
        made.add(sample_of(moved, move(21, moved.times[19], moved.times[22], mode=method)))
    return made


def test_a_cell_reports_every_move_but_the_first() -> None:
    values = cell("live", 256, [99.0, 12.0, 14.0, 13.0]).as_json(0.5)
    assert values.keys() >= ISSUE_KEYS
    assert values["moves"] == 3
    assert values["warm_up_stall_ms"] == pytest.approx(99.0)
    assert values["stall_ms"] == {"p50": 13.0, "p99": 13.98, "max": 14.0}
    assert values["itl_ms_p50"] == pytest.approx(10.0)
    assert values["excess_ms_p50"] == pytest.approx(3.0)
    assert values["stall_over_itl_p50"] == pytest.approx(1.3)
    assert values["phase_ms"] == {"committing": 2.0, "copying": 5.0}
    assert (values["link_gb_s"], values["mode"], values["rounds"]) == (0.5, "live", 2)


def test_a_cell_without_moves_says_why() -> None:
    made = Cell("blocking", 128, failures=["stayed: stall_budget"])
    values = made.as_json(None)
    assert (values["moves"], values["failures"]) == (0, ["stayed: stall_budget"])
    table_of([made], None)


def test_a_trace_shows_the_median_move() -> None:
    shown = trace(cell("live", 256, [0, 12.0, 14.0, 30.0]))
    assert "a stall of 14.0 ms" in shown
    assert "10.0 |14.0 10.0" in shown
    assert "committing 2.0, copying 5.0" in shown


def test_the_largest_gap_of_a_window_counts_gaps_that_reach_into_it() -> None:
    times = [0.0, 1.0, 1.5, 1.7, 4.0]
    assert largest_gap(times, 1.2, 1.6) == pytest.approx(0.5)
    assert largest_gap(times, 0.5, 0.6) == pytest.approx(1.0)
    assert largest_gap(times, 9.0, 10.0) == 0.0


def test_table_compares_with_live() -> None:
    cells = [cell("live", 256, [0, 15.0]), cell("blocking", 256, [0, 60.0])]
    console = Console(width=150)
    with console.capture() as shown:
        console.print(table_of(cells, None))
    row = next(line for line in shown.get().splitlines() if "blocking" in line).split("│")
    assert row[4].strip() == "60.0"
    assert row[10].strip() == "10.0", "an excess of 50 ms against 5 ms"


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    methods = ("live", "blocking", "recompute")
    cells = [cell(m, n, [0, 15.0, 18.0]) for n in (128, 4096) for m in methods]
    assert plot(cells, 0.5, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_servers_take_every_length(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downtime, "build", lambda model: Path("model"))
    spec = server(preset, 0.5, "tcp")
    model = PRESETS[preset]
    assert spec.max_model_len == model.max_position
    assert spec.kv_cache_gib << 30 >= model.max_position * model.kv_bytes_per_token
    assert "--no-enable-prefix-caching" in spec.flags
    assert spec.flags[-2:] == ("--llumlet-transport", "tcp")
    assert spec.bandwidth_limit == 500_000_000
    assert server(preset, None, "auto").bandwidth_limit is None


def test_flags_of_the_command_line(tmp_path: Path) -> None:
    options = parse(["--lengths", "128,7000", "--link", "0.5", "--json", str(tmp_path / "d.jsonl")])
    assert options.lengths == [128, 7000]
    assert options.link == 0.5
    assert options.plot == tmp_path / "d.png"
    assert options.methods == ["live", "blocking", "recompute"]


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "8192"], ["--methods", "magic"], ["--moves", "0"], ["--link", "-1"]],
)
def test_wrong_flags_are_refused(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error" in capsys.readouterr().err
