# SPDX-License-Identifier: Apache-2.0
"""The output of `llumnix explain`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich.console import Console

from llumsched.console import output

_SINCE: Final = (
    ("num_used_gpu_tokens", "KV tokens"),
    ("scheduler_running_to_decode_requests_num", "decodes"),
    ("num_uncomputed_tokens_scheduler_running_prefills", "prefill tokens"),
    ("num_waiting_requests", "waiting"),
    ("sent_requests", "sent"),
)
"""Columns of estimated values, and their titles; the JSON has all."""
_HEADING: Final = 14
"""Largest width of a line in the title of a metric, unless one word is longer."""
_BESIDE: Final = 5
"""Number of metrics that fit beside the decision in one table."""
_PER_TABLE: Final = 8
"""Number of metrics in a table of their own."""
_REASON: Final = 60
"""Characters shown of a reason for which an instance neither gives nor takes."""
Column = tuple[str, Callable[[dict[str, Any]], str]]
"""A title, and the cell for an instance or move."""
_OTHER_TYPE: Final = "inferTypeFilter"
"""The reason that refuses instances of other infer types."""


# A decision


def show_decisions(answer: dict[str, Any]) -> None:
    """Shows an answer of `/debug/schedule`."""
    console = output.console()
    old = f", view {answer['view_age_s']:.1f} s old" if answer["view_age_s"] else ""
    old += ", warming up: nothing is placed yet" if answer["warming"] else ""
    for stage in answer["stages"]:
        second = ", no instance passed all filters" if stage["fallback"] else ""
        chosen = f"{stage['infer_type']}: {stage['chosen'] or 'nobody'}"
        _say(console, f"{chosen} ({answer['policy']}, {answer['mode']} mode, {stage['selector']}{second}{old})")
        _show_stage(console, stage)


def _show_stage(console: Console, stage: dict[str, Any]) -> None:
    instances, metrics = stage["instances"], stage["metrics"]
    compared = [metric["name"] for metric in metrics if metric.get("compared", True)]
    further = [metric["name"] for metric in metrics if not metric.get("compared", True)]
    beside, below = ([*compared, *further], []) if len(metrics) <= _BESIDE else (compared, further)
    columns: list[Column] = [("INSTANCE", _id), ("VERDICT", lambda one: one["verdict"]), *map(_metric, beside)]
    if any(one.get("kv_cache_hit_len") for one in instances):
        columns.append((">HIT", lambda one: str(one["kv_cache_hit_len"])))
    if any(one.get("predicted") for one in instances):
        columns.append((">TTFT", lambda one: _predicted(one.get("predicted"), "ttft")))
        columns.append((">TPOT", lambda one: _predicted(one.get("predicted"), "tpot")))
    if any(one.get("moved_on") for one in instances):
        columns.append(("SINCE", lambda one: _since(one.get("moved_on"))))
    chosen = next((one for one in instances if one["verdict"] == "chosen"), None)
    columns.append(("WHY NOT", lambda one: _why(one["refused_by"]) or _lost(one, chosen, compared)))
    _print(console, columns, instances)
    for begin in range(0, len(below), _PER_TABLE):
        _print(console, [("INSTANCE", _id), *map(_metric, below[begin : begin + _PER_TABLE])], instances)


def _print(console: Console, columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> None:
    table = output.table(title for title, _ in columns)
    for row in rows:
        table.add_row(*(output.clean(cell(row)) for _, cell in columns))
    console.print(table)


def _id(instance: dict[str, Any]) -> str:
    return str(instance["instance_id"])


def _metric(name: str) -> Column:
    return _heading(name), lambda one: _shown(one["metrics"][name])


def _heading(metric: str) -> str:
    """The title of a metric's column, wrapped so that long names leave room for numbers."""
    lines = [""]
    for word in re.findall(r"[^_]*_?", metric):
        if lines[-1] and len(lines[-1]) + len(word) > _HEADING:
            lines.append("")
        lines[-1] += word
    return ">" + "\n".join(lines)


def _shown(value: float | str | None) -> str:
    """A number with the digits that matter for comparison; other values unchanged."""
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else value


def _predicted(predicted: dict[str, Any] | None, name: str) -> str:
    """A prediction with the model's uncertainty."""
    if predicted is None:
        return "-"
    value, deviation = predicted[f"{name}_ms"], predicted[f"{name}_deviation"]
    sure = f"± {100 * deviation:.0f} %" if isinstance(deviation, int | float) else "± ?"
    return f"{value:.0f} ms {sure}" if isinstance(value, int | float) else "-"


def _since(moved: dict[str, list[float]] | None) -> str:
    known = moved or {}
    return ", ".join("{} {:g} → {:g}".format(said, *known[name]) for name, said in _SINCE if name in known)


def _why(refused_by: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"({one['reason']})" if one.get("skipped") else one["reason"] for one in refused_by)


def _lost(instance: dict[str, Any], chosen: dict[str, Any] | None, compared: Sequence[str]) -> str:
    """The first metric in which an instance that passed the filters differs from the chosen one."""
    if chosen is None or instance is chosen:
        return ""
    own, best = instance["metrics"], chosen["metrics"]
    differing = next((name for name in compared if own[name] != best[name]), "")
    if not differing:
        return f"as good as {_id(chosen)}" if compared else ""
    return f"{differing} {_shown(own[differing])}, not {_shown(best[differing])}"


# A pass of the rescheduler


def show_dry_run(answer: dict[str, Any]) -> None:
    """Shows an answer of `/debug/rescheduling/plan`."""
    console = output.console()
    if answer["skipped"]:
        _say(console, f"nothing would be planned: {answer['skipped']}")
    for policy in answer["policies"]:
        _say(console, f"{policy['policy']}: {_summary(policy)}")
        _show_instances(console, policy)
        if policy["moves"]:
            _print(console, _MOVE, policy["moves"])


def _summary(policy: dict[str, Any]) -> str:
    """One policy's outcome, in a line."""
    if policy["error"]:
        return f"it fails: {policy['error']}"
    refused = ", ".join(f"{reason} {number}" for reason, number in sorted(policy["refused"].items()) if number)
    moves = "1 move" if policy["num_moves"] == 1 else f"{policy['num_moves']} moves"
    return f"{moves} ({policy['selector']}{'; refused: ' if refused else ''}{refused})"


def _show_instances(console: Console, policy: dict[str, Any]) -> None:
    instances = [one for one in policy["instances"] if not _is_of_another_type(one)]
    if not instances:
        return
    columns: list[Column] = [("INSTANCE", _id)]
    if policy["metric"]:
        columns.append((_heading(policy["metric"]), lambda one: _shown(one["load"])))
    columns.append(("GIVES", lambda one: _briefly(one["source"]["refused_by"]) or "yes"))
    columns.append(("TAKES", lambda one: _briefly(one["destination"]["refused_by"]) or "yes"))
    if any(one["failed_by"] for one in instances):
        columns.append(("FAILED", lambda one: _briefly(one["failed_by"])))
    _print(console, columns, instances)


def _briefly(refused_by: Sequence[dict[str, Any]]) -> str:
    """Reasons, shortened at the end, where the numbers of a condition are; the JSON has them."""
    reasons = [one["reason"] for one in refused_by]
    return "; ".join(reason if len(reason) <= _REASON else f"{reason[: _REASON - 1]}…" for reason in reasons)


def _is_of_another_type(instance: dict[str, Any]) -> bool:
    return any(one["by"] == _OTHER_TYPE for one in instance["source"]["refused_by"])


_MOVE: Final[Sequence[Column]] = (
    ("FROM", lambda move: move["source"]),
    ("TO", lambda move: move["destination"]),
    (">REQUESTS", lambda move: _shown(move["expected_requests"])),
    (">TOKENS", lambda move: _shown(move["expected_tokens"])),
    ("WHICH", lambda move: "{rule} {order} {value:g}".format_map(move)),
    (">GAIN", lambda move: f"{move['gain']:.3g}"),
    (">COST", lambda move: f"{move['cost']:.3g}"),
)


def _say(console: Console, text: str) -> None:
    console.print(output.clean(text), markup=False)
