# SPDX-License-Identifier: Apache-2.0
"""Writes a series in the one form in which it is stored, and carries it over to another vLLM release.

A series whose files differ from its own export was edited by hand and not checked; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import diff
from vllm_llumnix.patching.series import Patch, Series, sha256

_CONTEXT = 3


def export(series: Series, source: Path) -> dict[str, str]:
    """File names of a series directory and their texts, made from the series and the released files in `source`.

    `source` is the directory that holds `vllm/`. Raises PatchError if a file there is not the one of BASE.
    """
    texts = {path: _stock(series, source, path).decode() for path in series.base}
    files = {"BASE": base_text(series), "series": "".join(patch.name + "\n" for patch in series.patches)}
    for patch in series.patches:
        body = ""
        for change in patch.diffs:
            before = texts[change.path]
            texts[change.path] = change.apply(before)
            body += make_diff(change.path, before, texts[change.path])
        files[patch.name] = f"{patch.header_text}---\n{body}"
    return files


def carry_over(series: Series, source: Path, version: str) -> Series:
    """The same patches for another release, whose files are in `source`: same lines, zero fuzz, other line numbers.

    Raises PatchError when a hunk's lines are not there exactly once.
    """
    data = {path: (source / path).read_bytes() for path in series.base}
    texts = {path: content.decode() for path, content in data.items()}
    patches = []
    for patch in series.patches:
        moved = []
        for change in patch.diffs:
            try:
                moved.append(relocate(change, texts[change.path]))
            except diff.DiffError as error:
                raise PatchError(f"{patch.name} does not fit vLLM {version}: {error}") from None
            texts[change.path] = moved[-1].apply(texts[change.path])
        patches.append(dataclasses.replace(patch, diffs=tuple(moved)))
    base = {path: sha256(content) for path, content in data.items()}
    return dataclasses.replace(series, version=version, base=base, patches=tuple(patches))


def base_text(series: Series) -> str:
    lines = ["# What the series is for, and the SHA-256 of each file that it changes, as released.",
             f"version {series.version}",
             *(f"distribution {name}" for name in series.distributions),
             *(f"{sha} {path}" for path, sha in sorted(series.base.items()))]
    return "\n".join(lines) + "\n"


def make_diff(path: str, before: str, after: str) -> str:
    """The unified diff of two texts: three lines of context, no section headings, no dates."""
    return "".join(
        difflib.unified_diff(
            diff.split_lines(before), diff.split_lines(after), f"a/{path}", f"b/{path}", n=_CONTEXT
        )
    )


def relocate(change: diff.FileDiff, text: str) -> diff.FileDiff:
    """The same change at the lines where `text` holds it. Raises DiffError unless that is one place for each hunk."""
    lines = diff.split_lines(text)
    hunks: list[diff.Hunk] = []
    begin = shift = 0
    for hunk in change.hunks:
        places = [at for at in range(begin, len(lines)) if diff.fits(lines, at, hunk.old)]
        if len(places) != 1:
            where = f"{change.path}: the lines around {hunk.old_start}"
            raise diff.DiffError(f"{where} occur {len(places)} times, not once")
        at = places[0]
        hunks.append(dataclasses.replace(hunk, old_start=at + 1, new_start=at + 1 + shift))
        begin = at + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
    return diff.FileDiff(change.path, tuple(hunks))


def _stock(series: Series, source: Path, path: str) -> bytes:
    data = (source / path).read_bytes()
    return data if sha256(data) == series.base[path] else series.revert(path, data)


def write(files: dict[str, str], directory: Path) -> None:
    """Write an export. Patches that are there and not in the export are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in set(directory.glob("*.patch")) - {directory / name for name in files}:
        stale.unlink()
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def patch_text(patch: Patch) -> str:
    return f"{patch.header_text}---\n{patch.body}"
