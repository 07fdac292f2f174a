# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, applied exactly: every line of context must be where the hunk says, or nothing is changed.

`apply_by_text` is for files other than the one that a diff was made for: every line of context must be there as it is,
once, wherever that may be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_llumnix.errors import PatchError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Hunk:
    """`before` replaced by `after`; both hold the lines of context. Line numbers start at 1."""

    before_start: int
    before: tuple[str, ...]
    after_start: int
    after: tuple[str, ...]
    num_added: int
    num_removed: int

    def reversed(self) -> Hunk:
        return Hunk(self.after_start, self.after, self.before_start, self.before, self.num_removed, self.num_added)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """Change of one existing file by one patch; `path` begins with the package (`vllm/...`)."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, text: str) -> str:
        """The text of the changed file. Raises PatchError naming the file and the first line that differs."""
        lines = text.split("\n")
        result: list[str] = []
        position = 0
        for hunk in self.hunks:
            start = hunk.before_start - 1
            if start < position:
                raise PatchError(f"{self.path}: hunks overlap at line {hunk.before_start}")
            for offset, expected in enumerate(hunk.before):
                number = start + offset
                if number >= len(lines) or lines[number] != expected:
                    found = repr(lines[number]) if number < len(lines) else "the end of the file"
                    raise PatchError(f"{self.path}:{number + 1}: expected {expected!r}, found {found}")
            result += lines[position:start]
            if len(result) != hunk.after_start - 1:
                raise PatchError(f"{self.path}: the hunk at line {hunk.before_start} counts its lines wrongly")
            result += hunk.after
            position = start + len(hunk.before)
        return "\n".join(result + lines[position:])

    def apply_by_text(self, text: str) -> tuple[str, list[tuple[Hunk, int]]]:
        """The text of the changed file, and the hunks that do not fit: how often each one's lines are there, not once.

        Line numbers do not count; there is no fuzz.
        """
        misfits: list[tuple[Hunk, int]] = []
        lines = text.split("\n")
        for hunk in self.hunks:
            length = len(hunk.before)
            heads = (at for at, line in enumerate(lines) if hunk.before[:1] == (line,))
            starts = [at for at in heads if tuple(lines[at : at + length]) == hunk.before]
            if len(starts) == 1:
                lines[starts[0] : starts[0] + length] = hunk.after
            else:
                misfits.append((hunk, len(starts)))
        return "\n".join(lines), misfits


def parse(text: str, name: str) -> tuple[FileDiff, ...]:
    """The changes in `text`, in which everything before the first `--- a/` is a header.

    Raises PatchError (with `name`) for what is no plain change of an existing file.
    """
    diffs: list[FileDiff] = []
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    number = 0
    while number < len(lines) and not lines[number].startswith("--- a/"):
        number += 1
    while number < len(lines):
        path = lines[number].removeprefix("--- a/")
        if not lines[number].startswith("--- a/") or lines[number + 1 : number + 2] != [f"+++ b/{path}"]:
            raise PatchError(f"{name}:{number + 1}: expected '--- a/PATH' and '+++ b/PATH' with one path")
        number += 2
        hunks: list[Hunk] = []
        while number < len(lines) and lines[number].startswith("@@"):
            hunk, number = _parse_hunk(lines, number, name)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"{name}: no hunk for {path}")
        diffs.append(FileDiff(path, tuple(hunks)))
    if not diffs:
        raise PatchError(f"{name}: no change in it")
    return tuple(diffs)


def _parse_hunk(lines: list[str], number: int, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[number])
    if match is None:
        raise PatchError(f"{name}:{number + 1}: not the head of a hunk")
    before_start, num_before, after_start, num_after = (int(group or 1) for group in match.groups())
    before: list[str] = []
    after: list[str] = []
    num_added = num_removed = 0
    number += 1
    while len(before) < num_before or len(after) < num_after:
        line = lines[number] if number < len(lines) else ""
        mark, content = line[:1], line[1:]
        if mark == " ":
            before.append(content)
            after.append(content)
        elif mark == "-":
            before.append(content)
            num_removed += 1
        elif mark == "+":
            after.append(content)
            num_added += 1
        else:
            raise PatchError(f"{name}:{number + 1}: a line of a hunk begins with ' ', '+' or '-'")
        number += 1
    if (len(before), len(after)) != (num_before, num_after):
        raise PatchError(f"{name}:{number}: the hunk has more lines than its head says")
    return Hunk(before_start, tuple(before), after_start, tuple(after), num_added, num_removed), number
