# SPDX-License-Identifier: Apache-2.0
"""How things are written."""

from __future__ import annotations

import pytest

from llumlet.contract.errors import LlumletError, LlumletUnreachable, NotALlumlet
from llumlet.contract.types import Epoch, MoveProgress, Reason
from llumsched.console import output
from llumsched.console.hints import HINTS
from llumsched.console.move_display import TextDisplay


def test_every_reason_has_a_hint() -> None:
    assert HINTS.keys() == set(Reason.values()) - {Reason.REASON_NONE}


def test_json_form_of_a_message() -> None:
    progress = MoveProgress(request_id="r", phase="MOVED", reason=999, copied_bytes=1 << 60, epoch=Epoch(hop=1))
    document = output.to_dict(progress)
    assert document["phase"] == "moved"
    assert document["reason"] == 999
    assert document["mode"] is None
    assert document["copied_bytes"] == 1 << 60
    assert document["rounds"] == 0
    assert document["epoch"] == {"term": 0, "hop": 1}
    assert document["phase_ms"] == {}
    assert output.to_dict(MoveProgress())["epoch"] is None


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (LlumletError(Reason.BARRED, "no"), "refused", 5),
        (LlumletUnreachable("h:1", "refused"), "unreachable", 4),
        (LlumletUnreachable("h:1", "late", timed_out=True), "timed_out", 4),
        (NotALlumlet("h:1", "web"), "not_a_llumlet", 4),
    ],
)
def test_kinds_of_failure(failure: LlumletError, kind: str, code: int) -> None:
    assert output.failure_dict(failure)["kind"] == kind
    assert output.exit_code(failure) == code


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert output.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0s"), (0.42, "0.4s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_each_phase_of_a_move_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    display = TextDisplay()
    for phase in ("COPYING", "COPYING", "MOVED"):
        display.progress(MoveProgress(request_id="r-0", phase=phase))
    assert capsys.readouterr().err.splitlines() == ["r-0: copying", "r-0: moved"]
