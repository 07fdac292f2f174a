# SPDX-License-Identifier: Apache-2.0
"""What `llumnix explain` asks, and what it shows of an answer. Against a scheduler:
`tests/llumsched/scheduler/test_cli.py` and `tests/llumsched/rescheduling/test_dry_run.py`."""

from __future__ import annotations

from typing import Any

import pytest

from llumsched.cli import prepare
from llumsched.commands import explain_command as explain
from llumsched.console import explained


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
    explained.show_decisions(answer(KNOWN, None, KNOWN | {"ttft_deviation": "inf"}, KNOWN | {"ttft_ms": "inf"}))
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["INSTANCE", "VERDICT", "m", "TTFT", "TPOT"]
    assert [row.split()[4:] for row in rows] == [
        ["123", "ms", "±", "3", "%", "42", "ms", "±", "0", "%"],
        [],
        ["123", "ms", "±", "?", "42", "ms", "±", "0", "%"],
        ["42", "ms", "±", "0", "%"],
    ]


def test_explain_shows_reported_and_estimated_values(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(None, None)
    moved = {"num_used_gpu_tokens": [8160.0, 8544.0], "num_free_blocks": [3.0, 2.0], "sent_requests": [1.0, 0.0]}
    for instance, each in zip(said["stages"][0]["instances"], (moved, {}), strict=True):
        instance["moved_on"] = each
    explained.show_decisions(said)
    _, head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[3:] == ["SINCE"]
    assert "KV tokens 8160 → 8544, sent 1 → 0" in first
    assert "→" not in second


def test_before_anything_is_known_there_is_no_column_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    explained.show_decisions(answer(None, None))
    assert "TTFT" not in capsys.readouterr().out


def with_metrics(values: dict[str, float | str]) -> dict[str, Any]:
    """An answer of which the first metric is compared, and the others were asked for."""
    said = answer(None)
    (stage,) = said["stages"]
    stage["metrics"] = [{"name": name, "better": "less", "compared": number == 0} for number, name in enumerate(values)]
    stage["instances"][0]["metrics"] = values
    return said


def test_a_long_name_takes_no_more_room_than_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"num_requests": 12.0, "kv_cache_usage_ratio_projected": 0.123456, "predicted_ttft": "inf"}
    explained.show_decisions(with_metrics(values))
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["kv_cache_"],
        ["usage_ratio_"],
        ["INSTANCE", "VERDICT", "num_requests", "projected", "predicted_ttft"],
        ["i0", "not", "chosen", "12", "0.123", "inf"],
    ]


def test_explain_shows_the_losing_metric(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(None, None, None, None)
    (stage,) = said["stages"]
    stage["metrics"].append({"name": "n", "better": "less"})
    for instance, m, n in zip(stage["instances"], (1.0, 1.0, 1.0, 9.0), (2.0, 2.0, 3.0, 0.0), strict=True):
        instance["metrics"] = {"m": m, "n": n}
    stage["instances"][0]["verdict"] = stage["chosen"] = "chosen"
    explained.show_decisions(said)
    _, _, *lines = capsys.readouterr().out.splitlines()
    ends = ["chosen", "as good as i0", "n 3, not 2", "m 9, not 1"]
    assert [line.rstrip().endswith(end) for line, end in zip(lines[1:], ends[1:], strict=True)] == [True] * 3
    assert not lines[0].rstrip().endswith("not 1")


def policy(**more: Any) -> dict[str, Any]:
    return {
        "policy": "p", "num_sources": 0, "num_destinations": 0, "num_moves": 0, "refused": {}, "error": "",
        "selector": "metricBalanceSelector", "metric": "num_requests", "instances": [], "moves": [],
    } | more  # fmt: skip


def end(*reasons: str, by: str = "f") -> dict[str, Any]:
    return {"able": not reasons, "refused_by": [{"by": by, "reason": reason} for reason in reasons]}


def test_a_dry_run_says_who_could_give_and_take_and_what_would_move(capsys: pytest.CaptureFixture[str]) -> None:
    failed, long = [{"by": "schedulabilityFilter", "reason": "takes no new requests"}], "has room: " + "x is 1, " * 20
    instances = [
        {"instance_id": "hot", "load": 20.0, "failed_by": [], "source": end(), "destination": end("is late itself")},
        {"instance_id": "sick", "load": "inf", "failed_by": failed, "source": end("failed itself", long),
         "destination": end("failed itself")},
        {"instance_id": "other", "load": 0.0, "failed_by": [], "source": end("is decode", by="inferTypeFilter"),
         "destination": end("is decode", by="inferTypeFilter")},
    ]  # fmt: skip
    move = {"source": "hot", "destination": "cold", "rule": "TOKEN", "order": "SR", "value": 400.0,
            "expected_tokens": 380, "expected_requests": 1.5, "gain": 1.23456, "cost": 0.0001}  # fmt: skip
    explained.show_dry_run(
        {
            "skipped": "",
            "policies": [
                policy(num_moves=1, num_sources=2, num_destinations=3, refused={"no_room": 2, "not_worth_it": 1},
                       instances=instances, moves=[move]),
                policy(error="KeyError('x')"),
            ],
        }
    )  # fmt: skip
    said, *table, failing = capsys.readouterr().out.splitlines()
    assert said == "p: 1 move (metricBalanceSelector; refused: no_room 2, not_worth_it 1)"
    assert [line.split("  ")[0] for line in table] == ["INSTANCE", "hot", "sick", "FROM", "hot"]
    assert table[0].split() == ["INSTANCE", "num_requests", "GIVES", "TAKES", "FAILED"]
    assert table[1].split() == ["hot", "20", "yes", "is", "late", "itself"]
    assert f"failed itself; {long[:59]}…" in table[2]
    assert table[2].endswith("takes no new requests")
    assert table[4].split() == ["hot", "cold", "1.5", "380", "TOKEN", "SR", "400", "1.23", "0.0001"]
    assert failing == "p: it fails: KeyError('x')"


def test_a_pass_that_would_plan_nothing_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    explained.show_dry_run({"skipped": "sched-2 leads", "policies": []})
    assert capsys.readouterr().out == "nothing would be planned: sched-2 leads\n"


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (["--rescheduling", "--model=m", "--metric=x"],
         ["--model has no effect with --rescheduling", "--metric has no effect with --rescheduling"]),
        (["--policy=neutral_load"], ["--policy has no effect without --rescheduling"]),
        (["--rescheduling", "--policy=neutral_load", "--scheduler=h:1", "--json"], []),
    ],
)  # fmt: skip
def test_useless_flag_is_a_fault(arguments: list[str], faults: list[str]) -> None:
    assert prepare("explain", ["explain", *arguments], {}).faults == faults


def test_metrics_may_be_given_one_by_one_and_with_commas() -> None:
    arguments = ["explain", "--metric", "freeness, num_requests", "--metric=num_requests,virtual_usage"]
    explanation, _, faults = prepare("explain", arguments, {})
    assert not faults
    asked = explanation.asked
    assert isinstance(asked, explain.RequestQuestion)
    assert explain._body(asked)["metrics"] == ("freeness", "num_requests", "virtual_usage")
