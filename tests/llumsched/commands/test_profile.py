# SPDX-License-Identifier: Apache-2.0
"""What `llumnix profile` sends, and what it makes of what a client sees. Of a real engine: `tests/integration`."""

from __future__ import annotations

from pathlib import Path

import pytest

from llumsched import cli
from llumsched.console.exit_codes import ExitCode
from llumsched.latency.fitting import MeasuredStep
from llumsched.profiler import Cell, Target, _as_steps, cells


def target(most_tokens: int = 4096, capacity: int = 20_000) -> Target:
    return Target("http://127.0.0.1:1", "m", "", most_tokens, capacity)


@pytest.mark.parametrize(("most_tokens", "capacity"), [(4096, 20_000), (1000, 100_000), (40_000, 3_000)])
def test_no_cell_is_more_than_the_engine_has_room_for(most_tokens: int, capacity: int) -> None:
    plan = cells(target(most_tokens, capacity), most_requests=32)
    assert max(cell.number for cell in plan) <= 32
    for cell in plan:
        assert cell.prompt + cell.output <= most_tokens
        assert cell.number * (cell.prompt + cell.output) <= 0.8 * capacity
    alone = {cell.prompt for cell in plan if cell.output == 2}
    assert len(alone) >= 5
    batches = {cell.number for cell in plan if cell.output > 2}
    assert {1, 2, 4, 8} <= batches
    assert len({cell.prompt for cell in plan if cell.number == 1 and cell.output > 2}) >= 2


def test_client_s_view_stands_for_steps() -> None:
    assert _as_steps(Cell(1, 100, 2), [[0.05, 0.08]]) == [MeasuredStep(100, 5050, 0, 0, 0.05)]
    two = [[0.1, 0.2, 0.3], [0.2, 0.25, 0.3]]
    assert _as_steps(Cell(2, 100, 3), two) == [MeasuredStep(0, 0, 2, 2 * 101, pytest.approx(0.075))]


@pytest.mark.parametrize("given", [[], ["--llumlet", "127.0.0.1:7000", "--endpoint", "http://127.0.0.1:8000"]])
def test_profile_needs_exactly_one_engine(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *given]) == ExitCode.USAGE
    assert "exactly one of --llumlet and --endpoint is needed" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--llumlet", "127.0.0.1:1"], ["--endpoint", "http://127.0.0.1:1"]])
def test_profile_of_an_unreachable_engine_fails(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    assert cli.main(["profile", *flags, "--output", str(file)]) == ExitCode.UNREACHABLE
    assert "llumnix profile: " in capsys.readouterr().err
    assert not file.exists()
