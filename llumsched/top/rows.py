# SPDX-License-Identifier: Apache-2.0
"""A snapshot as cells: a row per instance, a row per move."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.text import Text

from llumsched.console import output
from llumsched.top.source import Glance

INSTANCE_COLUMNS: Final = ("INSTANCE", "TYPE", "STATE", "KV CACHE", "RUNNING", "WAITING", "PREFILL", "IN", "OUT",
                           "PREEMPTED", "AGE")  # fmt: skip
MOVE_COLUMNS: Final = ("WHEN", "FROM", "TO", "POLICY", "OUTCOME", "REQUESTS", "TOKENS", "COPIED", "MS")
SORTS: Final = ("id", "kv", "running", "waiting")
_BAR_WIDTH: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_STATES: Final = {"open": "green", "closed": "yellow", "suspect": "yellow", "hung": "bold red", "silent": "dim"}
_OUTCOMES: Final = {"moved": "green", "open": "cyan", "nothing": "dim"}
_WARM, _HOT = 0.7, 0.9

Cells = tuple[Text, ...]


def headline(snapshot: Glance) -> Text:
    """Sums over all instances, and the age of the view."""
    loaded = [one for one in snapshot.instances if one["kv"] is not None]
    num_open = sum(one["state"] == "open" for one in snapshot.instances)
    line = Text.assemble(
        (f"{num_open}/{len(snapshot.instances)}", "bold"), " instances open   ",
        (str(sum(one["running"] for one in loaded)), "bold"), " running   ",
        (str(sum(one["waiting"] for one in loaded)), "bold"), " waiting   ",
    )  # fmt: skip
    if loaded:
        ratios = [one["kv"] for one in loaded]
        line.append(f"KV {sum(ratios) / len(ratios):.0%} (from {min(ratios):.0%} to {max(ratios):.0%})   ")
    if snapshot.connected:
        line.append("live", "green")
    else:
        line.append(f"view {output.duration(snapshot.age_s)} old", "bold red")
    for problem in snapshot.problems:
        line.append(f"\n{output.clean(problem)}", "red")
    return line


def instance_rows(snapshot: Glance, sort: str = "id") -> dict[str, Cells]:
    """Rows by instance id; the most loaded first if `sort` is not `id`."""
    ordered = snapshot.instances
    if sort != "id":
        ordered = sorted(ordered, key=lambda one: -1 if one[sort] is None else one[sort], reverse=True)
    return {one["id"]: _instance(one) for one in ordered}


def move_rows(snapshot: Glance, most: int) -> dict[str, Cells]:
    """Rows by move number, the newest first."""
    newest = list(reversed(snapshot.moves or []))[:most]
    return {str(move.get("number")): _move(move) for move in newest}


def bar(ratio: float) -> Text:
    """`████▌      45 %`"""
    eighths = round(min(1.0, max(0.0, ratio)) * _BAR_WIDTH * 8)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[part] if part else "")
    colour = "red" if ratio >= _HOT else "yellow" if ratio >= _WARM else "green"
    return Text.assemble((filled.ljust(_BAR_WIDTH, "·"), colour), f" {ratio:4.0%}")


def _instance(one: dict[str, Any]) -> Cells:
    def number(name: str) -> Text:
        return Text("" if one[name] is None else f"{one[name]:,}", justify="right")

    return (
        Text(output.clean(one["id"]), "bold"),
        Text(output.clean(one["type"])),
        Text(one["state"], _STATES.get(one["state"], "")),
        Text("") if one["kv"] is None else bar(one["kv"]),
        *map(number, ("running", "waiting", "prefill_tokens", "moves_in", "moves_out", "preemptions")),
        Text(output.duration(one["age_s"]), justify="right"),
    )


def _move(move: dict[str, Any]) -> Cells:
    outcome = str(move.get("outcome", ""))
    refusals = ", ".join(f"{reason} {count}" for reason, count in (move.get("refusals") or {}).items())
    why = "" if outcome == "moved" else str(move.get("error") or refusals)
    ago_s = max(0.0, time.time() - float(move.get("began_s") or 0.0))
    right = (
        f"{move.get('num_moved', 0)}/{move.get('num_selected', 0)}",
        f"{move.get('moved_tokens', 0):,}",
        output.size(float(move.get("copied_bytes") or 0)),
        "" if outcome == "open" else f"{float(move.get('seconds') or 0.0) * 1e3:.0f}",
    )
    return (
        Text(f"{output.duration(ago_s)} ago"),
        Text(output.clean(str(move.get("source", ""))), "bold"),
        Text(output.clean(str(move.get("destination", ""))), "bold"),
        Text(output.clean(str(move.get("policy", "")))),
        Text(output.clean(f"{outcome}: {why}" if why else outcome), _OUTCOMES.get(outcome, "yellow")),
        *(Text(word, justify="right") for word in right),
    )
