# SPDX-License-Identifier: Apache-2.0
"""The scheduler's answers to `llumnix explain`, as tables: a row for each instance or move of the JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llumsched.console import output

_SINCE: Final = {
    "num_used_gpu_tokens": "KV tokens",
    "scheduler_running_to_decode_requests_num": "decodes",
    "num_uncomputed_tokens_scheduler_running_prefills": "prefill tokens",
    "num_waiting_requests": "waiting",
    "sent_requests": "sent",
}
"""Names for the columns that are shown as moved on; the JSON has all."""
_HEADING: Final = 14
"""Characters in a line of a metric's name, unless one of its words is longer."""
_REASON: Final = 60
"""Characters shown of a reason why an instance neither gives nor takes."""
_OTHER_TYPE: Final = "inferTypeFilter"
"""The filter that refuses the instances of other infer types than the rescheduling policy's."""

Row = Mapping[str, str]
"""Cells by the titles of their columns."""


def show_decisions(answer: dict[str, Any]) -> None:
    """Prints the answer of `/debug/schedule`."""
    old = f", view {answer['view_age_s']:.1f} s old" if answer["view_age_s"] else ""
    old += ", warming up: nothing is placed yet" if answer["warming"] else ""
    for stage in answer["stages"]:
        second = ", no instance passed all filters" if stage["fallback"] else ""
        chosen = f"{stage['infer_type']}: {stage['chosen'] or 'nobody'}"
        _say(f"{chosen} ({answer['policy']}, {answer['mode']} mode, {stage['selector']}{second}{old})")
        compared = [metric["name"] for metric in stage["metrics"] if metric.get("compared", True)]
        best = next((one for one in stage["instances"] if one["verdict"] == "chosen"), None)
        _print([_decided(one, best, compared) for one in stage["instances"]])


def _decided(one: dict[str, Any], best: dict[str, Any] | None, compared: Sequence[str]) -> Row:
    return {
        "INSTANCE": one["instance_id"],
        "VERDICT": one["verdict"],
        **{_heading(name): _shown(value) for name, value in one["metrics"].items()},
        ">HIT": str(one.get("kv_cache_hit_len") or ""),
        ">TTFT": _predicted(one.get("predicted"), "ttft"),
        ">TPOT": _predicted(one.get("predicted"), "tpot"),
        "SINCE": _since(one.get("moved_on") or {}),
        "WHY NOT": _why(one["refused_by"]) or _lost(one, best, compared),
    }


def _predicted(predicted: dict[str, Any] | None, name: str) -> str:
    """A prediction, and how far the step model may be off for want of steps like these."""
    if predicted is None or not isinstance(value := predicted[f"{name}_ms"], int | float):
        return ""
    deviation = predicted[f"{name}_deviation"]
    return f"{value:.0f} ms ± {f'{100 * deviation:.0f} %' if isinstance(deviation, int | float) else '?'}"


def _since(moved: dict[str, list[float]]) -> str:
    return ", ".join("{} {:g} → {:g}".format(said, *moved[name]) for name, said in _SINCE.items() if name in moved)


def _why(refused_by: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"({one['reason']})" if one.get("skipped") else one["reason"] for one in refused_by)


def _lost(one: dict[str, Any], best: dict[str, Any] | None, compared: Sequence[str]) -> str:
    """The first metric in which an instance that nothing refused differs from the chosen one."""
    if best is None or one is best or not compared:
        return ""
    own, chosen = one["metrics"], best["metrics"]
    differing = next((name for name in compared if own[name] != chosen[name]), "")
    if not differing:
        return f"as good as {best['instance_id']}"
    return f"{differing} {_shown(own[differing])}, not {_shown(chosen[differing])}"


def show_dry_run(answer: dict[str, Any]) -> None:
    """Prints the answer of `/debug/rescheduling/plan`."""
    if answer["skipped"]:
        _say(f"nothing would be planned: {answer['skipped']}")
    for policy in answer["policies"]:
        _say(f"{policy['policy']}: {_summary(policy)}")
        _print([_able(one, policy["metric"]) for one in policy["instances"] if not _is_of_another_type(one)])
        _print([_move(one) for one in policy["moves"]])


def _summary(policy: dict[str, Any]) -> str:
    """The outcome of one policy's turn in a line."""
    if policy["error"]:
        return f"it fails: {policy['error']}"
    refused = ", ".join(f"{reason} {number}" for reason, number in sorted(policy["refused"].items()) if number)
    moves = "1 move" if policy["num_moves"] == 1 else f"{policy['num_moves']} moves"
    return f"{moves} ({policy['selector']}{'; refused: ' if refused else ''}{refused})"


def _able(one: dict[str, Any], metric: str | None) -> Row:
    return {
        "INSTANCE": one["instance_id"],
        **({_heading(metric): _shown(one["load"])} if metric else {}),
        "GIVES": _briefly(one["source"]["refused_by"]) or "yes",
        "TAKES": _briefly(one["destination"]["refused_by"]) or "yes",
        "FAILED": _briefly(one["failed_by"]),
    }


def _briefly(refused_by: Sequence[dict[str, Any]]) -> str:
    """Reasons without the ends of long ones, which list the numbers that a condition has read."""
    reasons = [one["reason"] for one in refused_by]
    return "; ".join(reason if len(reason) <= _REASON else f"{reason[: _REASON - 1]}…" for reason in reasons)


def _is_of_another_type(instance: dict[str, Any]) -> bool:
    return any(one["by"] == _OTHER_TYPE for one in instance["source"]["refused_by"])


def _move(move: dict[str, Any]) -> Row:
    return {
        "FROM": move["source"],
        "TO": move["destination"],
        ">REQUESTS": _shown(move["expected_requests"]),
        ">TOKENS": _shown(move["expected_tokens"]),
        "WHICH": "{rule} {order} {value:g}".format_map(move),
        ">GAIN": f"{move['gain']:.3g}",
        ">COST": f"{move['cost']:.3g}",
    }


def _heading(metric: str) -> str:
    """The title of a metric's column, in lines, so that a long name leaves room for the numbers."""
    lines = [""]
    for word in re.findall(r"[^_]*_?", metric):
        if lines[-1] and len(lines[-1]) + len(word) > _HEADING:
            lines.append("")
        lines[-1] += word
    return ">" + "\n".join(lines)


def _shown(value: float | str | None) -> str:
    """A number with as many digits as people compare; a word as it is."""
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else value


def _print(rows: Sequence[Row]) -> None:
    """Prints a table without the columns that are empty."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)] if rows else []
    table = output.table(titles)
    for row in rows:
        table.add_row(*(output.clean(row[title]) for title in titles))
    if titles:
        output.console().print(table)


def _say(text: str) -> None:
    output.console().print(output.clean(text), markup=False)
