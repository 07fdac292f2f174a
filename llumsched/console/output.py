# SPDX-License-Identifier: Apache-2.0
"""Output of `llumnix`: tables and words for people, JSON lines for machines.

Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable, NotALlumlet
from llumlet.contract.types import reason_word
from llumsched.cms.look import CmsUnreachable
from llumsched.console.exit_codes import ExitCode
from llumsched.console.hints import HINTS

_UNPIPED_WIDTH = 200
"""Width of output that is not a terminal: nothing is cut."""


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNPIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def table(columns: Iterable[str]) -> Table:
    """A table. Headers that begin with `>` align their column to the right."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.startswith(">")
        # Ids are there to be copied: other columns give way first.
        result.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=name == "REQUEST",
        )
    return result


def clean(text: str) -> str:
    """A client's text, such as a request id, without control characters."""
    return "".join(char if char.isprintable() else "�" for char in text)


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def to_dict(message: Message) -> dict[str, Any]:
    """All fields, including defaults: numbers as numbers, enums as words, absent ones as null.

    (protobuf's own JSON form writes 64-bit numbers as strings and omits zeros.)
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = dict(value)
        elif field.is_repeated:
            result[field.name] = [_plain(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            result[field.name] = None
        else:
            result[field.name] = _plain(field, value)
    return result


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is None:
        return value
    if value == 0:
        return None
    member = field.enum_type.values_by_number.get(value)
    return member.name.lower() if member else value


def exit_code(failure: LlumletCallFailed) -> ExitCode:
    return ExitCode.REFUSED if isinstance(failure, LlumletError) else ExitCode.UNREACHABLE


def failure_dict(failure: LlumletCallFailed) -> dict[str, Any]:
    """The JSON form of a failed call: `kind` is refused, unreachable, timed_out or not_a_llumlet."""
    reason = status = None
    if isinstance(failure, LlumletError):
        reason, status = reason_word(failure.reason), failure.code.name
    return {"kind": _described(failure)[0], "reason": reason, "status": status, "detail": failure.detail}


def report_failure(failure: LlumletCallFailed, *, as_json: bool) -> ExitCode:
    """Reports a failure as a JSON event, or for people."""
    if as_json:
        print_json({"event": "error", "error": {"address": failure.address} | failure_dict(failure)})
    else:
        print_failure(failure)
    return exit_code(failure)


def print_failure(failure: LlumletCallFailed) -> None:
    """Prints the failure and the remedy."""
    _, what, hint = _described(failure)
    screen = console(stderr=True)
    screen.print(Text.assemble(("llumnix: ", "bold red"), clean(what)))
    screen.print(Text(f"  {hint}", style="dim"))


def _described(failure: LlumletCallFailed) -> tuple[str, str, str]:
    """Kind, description and remedy of a failure."""
    address, detail = failure.address, failure.detail
    match failure:
        case LlumletError():
            hint = HINTS.get(failure.reason, "The instance's log says more.")
            return "refused", f"{address} refused: {failure}", hint
        case NotALlumlet():
            hint = (
                "Is that the API server's port? The llumlet has one of its own: --llumlet-port of "
                "`vllm serve`, or the one it logs at start."
            )
            return "not_a_llumlet", f"{address} is not a llumlet: {detail}", hint
        case CmsUnreachable():
            hint = (
                "Is it the scheduler's CMS address, or the Redis, that the instances report to with --llumlet-cms? "
                "--cluster HOST[:PORT] (or LLUMNIX_CLUSTER) names another cluster, --cms a CMS or a Redis; "
                "--llumlet HOST:PORT asks an instance itself."
            )
            return "unreachable", f"the CMS at {address}: {detail}", hint
        case LlumletUnreachable(timed_out=True):
            hint = "The engine may be hung or overloaded; what was asked may have been done."
            return "timed_out", f"{address}: {detail}", hint
    hint = "Is the engine running, and was it started with --enable-llumlet? It logs the llumlet's address at start."
    return "unreachable", f"cannot reach {address}: {detail}", hint


def size(num_bytes: float) -> str:
    """`3.2 MiB`"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`"""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
