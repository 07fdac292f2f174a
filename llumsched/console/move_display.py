# SPDX-License-Identifier: Apache-2.0
"""The output of `llumnix migrate`: the progress of moves, and their outcome."""

from __future__ import annotations

from typing import Self

from rich.table import Table
from rich.text import Text

from llumlet.contract import types
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import reason_word, word
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode
from llumsched.console.hints import HINTS

_GO_ON = "The moves go on; `llumnix ps` shows them."
_COLUMNS = (
    "REQUEST",
    "PHASE",
    "MODE",
    ">TOKENS",
    ">CACHED",
    ">ROUNDS",
    ">COPIED",
    ">RECOMPUTED",
    "VIA",
    ">MS",
)
_PHASES = {name.lower() for name, _ in types.MovePhase.items()}
"""Phases that add up to the whole move; the others are parts of them."""
_STYLES = {
    types.MovePhase.MOVED: "green",
    types.MovePhase.STAYED: "yellow",
    types.MovePhase.GONE: "dim",
    types.MovePhase.LOST: "red",
}


class JsonDisplay:
    """JSON objects on stdout, one per line.

    Like `TextDisplay`, a context manager around the moves; `failed` and `interrupted` also work outside.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, progress: types.MoveProgress) -> None:
        output.print_json({"event": "progress"} | output.to_dict(progress))

    def summary(self, summary: types.MoveSummary, code: ExitCode) -> None:
        document = {"event": "summary"} | output.to_dict(summary)
        output.print_json(document | {"exit_code": int(code)})

    def failed(self, failure: LlumletCallFailed) -> None:
        output.report_failure(failure, as_json=True)

    def interrupted(self) -> None:
        output.print_json({"event": "interrupted", "detail": _GO_ON})


class TextDisplay:
    """A line for each phase of a move on stderr; a table of all moves on stdout at the end."""

    def __init__(self) -> None:
        self._moves: dict[str, types.MoveProgress] = {}
        self._screen = output.console(stderr=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, progress: types.MoveProgress) -> None:
        before = self._moves.get(progress.request_id)
        self._moves[progress.request_id] = progress
        if before is None or before.phase != progress.phase:
            name = word(types.MovePhase, progress.phase)
            why = f" ({reason_word(progress.reason)})" if progress.reason else ""
            self._screen.print(output.clean(f"{progress.request_id}: {name}{why}"))

    def summary(self, summary: types.MoveSummary, code: ExitCode) -> None:
        self._print_moves()
        screen = output.console()
        if code == ExitCode.NOTHING_SELECTED:
            screen.print("nothing to move: no request fits; `llumnix ps` says which are movable")
            return
        others = {"stayed": summary.stayed, "gone": summary.gone, "lost": summary.lost}
        rest = "".join(f", {number} {name}" for name, number in others.items() if number)
        seconds = summary.total_ms / 1000
        recomputed = f" ({summary.recomputed} computed again there)" if summary.recomputed else ""
        screen.print(f"moved {summary.moved} of {summary.selected}{recomputed} in {seconds:.2f} s{rest}")

    def failed(self, failure: LlumletCallFailed) -> None:
        self._print_moves()
        output.print_failure(failure)
        if any(move.phase not in types.OUTCOMES for move in self._moves.values()):
            self._screen.print(f"  {_GO_ON}", style="dim")

    def interrupted(self) -> None:
        self._screen.print(f"interrupted. {_GO_ON}" if self._moves else "interrupted.")

    def _print_moves(self) -> None:
        if not self._moves:
            return
        output.console().print(_table(list(self._moves.values())))
        explained = {move.reason: move for move in self._moves.values() if move.reason}
        for move in self._moves.values():
            if move.detail:
                output.console().print(output.clean(f"{move.request_id}: {move.detail}"))
            if move.tokens_alone and move.phase == types.MovePhase.MOVED:
                output.console().print(output.clean(f"{move.request_id}: without its KV cache: {move.tokens_alone}"))
        for reason in explained:
            hint = HINTS.get(reason, "See the log of the source.")
            output.console().print(Text(f"{reason_word(reason)}: {hint}", style="dim"))


MoveDisplay = JsonDisplay | TextDisplay


def _table(moves: list[types.MoveProgress]) -> Table:
    rows = output.table(_COLUMNS)
    for move in moves:
        why = f" ({reason_word(move.reason)})" if move.reason != types.Reason.REASON_NONE else ""
        outcome = Text(word(types.MovePhase, move.phase) + why, style=_STYLES.get(move.phase, ""))
        total_ms = sum(ms for name, ms in move.phase_ms.items() if name in _PHASES)
        rows.add_row(
            output.clean(move.request_id),
            outcome,
            word(types.Mode, move.mode) if move.mode else "",
            str(move.context_tokens),
            str(move.hit_tokens),
            str(move.rounds),
            output.size(move.copied_bytes),
            str(move.recomputed_tokens),
            output.clean(move.transport),
            f"{total_ms:.1f}" if move.phase_ms else "",
        )
    return rows
