# SPDX-License-Identifier: Apache-2.0
"""What `llumnix explain` shows of an answer. The command itself: `tests/llumsched/scheduler/test_cli.py`."""

from __future__ import annotations

from typing import Any

import pytest

from llumsched.commands import explain


def answer(*predicted: dict[str, Any] | None) -> dict[str, Any]:
    instances = [
        {"instance_id": f"i{number}", "verdict": "not chosen", "metrics": {"m": 1.5}, "refused_by": [], "age_s": 0.1,
         "predicted": each}
        for number, each in enumerate(predicted)
    ]  # fmt: skip
    stage = {"infer_type": "neutral", "chosen": None, "fallback": False, "selector": "s", "instances": instances,
             "metrics": [{"name": "m", "better": "less"}]}  # fmt: skip
    return {"policy": "p", "mode": "full", "warming": False, "view_age_s": 0.0, "stages": [stage]}


KNOWN = {"ttft_ms": 123.4, "tpot_ms": 41.6, "ttft_deviation": 0.031, "tpot_deviation": 0.004}


def test_predictions_say_how_sure_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    explain._show(answer(KNOWN, None, KNOWN | {"ttft_deviation": "inf"}, KNOWN | {"ttft_ms": "inf"}))
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["INSTANCE", "VERDICT", "m", "TTFT", "TPOT", "WHY", "NOT"]
    assert [row.split()[4:] for row in rows] == [
        ["123", "ms", "±", "3", "%", "42", "ms", "±", "0", "%"],
        ["-", "-"],
        ["123", "ms", "±", "?", "42", "ms", "±", "0", "%"],
        ["-", "42", "ms", "±", "0", "%"],
    ]


def test_what_was_moved_on_is_shown_as_it_was_told_and_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(None, None)
    moved = {"num_used_gpu_tokens": [8160.0, 8544.0], "num_free_blocks": [3.0, 2.0], "sent_requests": [1.0, 0.0]}
    for instance, each in zip(said["stages"][0]["instances"], (moved, {}), strict=True):
        instance["moved_on"] = each
    explain._show(said)
    _, head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[3:] == ["SINCE", "WHY", "NOT"]
    assert "KV tokens 8160 → 8544, sent 1 → 0" in first
    assert "→" not in second


def test_before_anything_is_known_there_is_no_column_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    explain._show(answer(None, None))
    assert "TTFT" not in capsys.readouterr().out
