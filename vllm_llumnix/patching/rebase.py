# SPDX-License-Identifier: Apache-2.0
"""A series written again, for another release of vLLM or after one of its patches was edited; and what to read of that
release: the functions that the engine side counts on and that have changed.

Each hunk is looked for by its text, which must be in the file exactly once. The new patches have the right line
numbers, and BASE and CONTRACT the new hashes. If a hunk is missing or there twice, or a function is gone, nothing is
written: somebody has to read that code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.diff import Hunk
from vllm_llumnix.patching.release import Release
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.series import listed, misfit, parse_patch, sha256, unified_diff


@dataclass(frozen=True, slots=True)
class Misfit:
    """A hunk that is not in the file exactly once. `nearest`: where most of its lines are, as numbered lines."""

    patch: str
    path: str
    hunk: Hunk
    count: int
    nearest: list[tuple[int, str]]

    def __str__(self) -> str:
        return misfit(self.patch, self.path, self.hunk, self.count)


@dataclass(frozen=True, slots=True)
class Change:
    """A function that the engine side counts on and that is another one now. `diff` is empty if it is not known."""

    path: str
    name: str
    used_by: str
    refuses: bool
    gone: bool
    diff: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """`written` is None if something stands against the new series."""

    version: str
    written: Path | None
    num_patches: int
    misfits: list[Misfit]
    changes: list[Change]

    @property
    def gone(self) -> list[Change]:
        return [change for change in self.changes if change.gone]


def rebase(source: Path, release: Release, target: Path, before: Release | None = None) -> Report:
    """Write the series in `source` to `target`, for `release`. The hashes and line numbers of `source` are not used.

    `before` has the files that `source` was made for; without it changed functions are named, and not shown. The order
    of the report's changes is that in which they are best read.

    Raises PatchError for a series or a release that cannot be read.
    """
    originals: dict[str, str] = {}
    texts: dict[str, str] = {}
    written: dict[str, str] = {}
    misfits: list[Misfit] = []
    for name in listed((source / "series").read_text()):
        text = (source / name).read_text()
        parts = [text.partition("\n---\n")[0] + "\n---\n"]
        for change in parse_patch(text, name).diffs:
            if change.path not in texts:
                texts[change.path] = originals[change.path] = release.text(change.path)
            old = texts[change.path]
            texts[change.path], wrong = change.apply_by_text(old)
            misfits += [Misfit(name, change.path, hunk, count, _nearest(old, hunk)) for hunk, count in wrong]
            parts += unified_diff(change.path, old, texts[change.path])
        written[name] = "".join(parts)
    changes = review(release, before, contract.load(source))
    report = Report(release.version, None, len(written), misfits, changes)
    if misfits or report.gone:
        return report
    base = [f"{sha256(originals[path])}  {sha256(texts[path])}  {path}\n" for path in sorted(texts)]
    written |= {
        "series": "".join(f"{name}\n" for name in written),
        "BASE": f"vllm {release.version.partition('+')[0]}\n" + "".join(base),
        contract.FILE: contract.of(release),
    }
    target.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (target / name).write_text(text)
    return Report(release.version, target, report.num_patches, misfits, changes)


def review(release: Release, before: Release | None, signed: contract.Contract) -> list[Change]:
    """The functions that are not what `signed` says: gone ones first, then those that refuse."""
    expected = {(function.path, function.name): function.digest for function in signed.functions}
    changes = []
    for path in sorted({row.path for row in RELIED_ON}):
        text = release.text_or_nothing(path)
        here = contract.digests(text.encode())
        for row in (row for row in RELIED_ON if row.path == path):
            if here.get(row.name) == expected.get((path, row.name)):
                continue
            diff = _diff(row.path, row.name, before, text)
            changes.append(Change(path, row.name, row.used_by, row.refuses, row.name not in here, diff))
    return sorted(changes, key=lambda change: (not change.gone, not change.refuses))


def _diff(path: str, name: str, before: Release | None, after: str) -> list[str]:
    old = contract.source_of(before.text_or_nothing(path), name) if before is not None else None
    if old is None:
        return []
    new = contract.source_of(after, name) or []
    return list(difflib.unified_diff(old, new, f"a/{path} {name}", f"b/{path} {name}"))


def _nearest(text: str, hunk: Hunk) -> list[tuple[int, str]]:
    """The lines of the file around where most of the hunk's lines are; nothing if none of them is there."""
    lines, wanted = text.split("\n"), {line for line in hunk.before if line.strip()}
    hits = [line in wanted for line in lines]
    count = sum(hits[: len(hunk.before)])
    best, start = count, 0
    for end in range(len(hunk.before), len(lines)):
        count += hits[end] - hits[end - len(hunk.before)]
        if count > best:
            best, start = count, end - len(hunk.before) + 1
    if not best:
        return []
    first = max(0, start - 3)
    return list(enumerate(lines[first : start + len(hunk.before) + 3], first + 1))


def describe(report: Report, source: Path) -> Iterator[str]:
    """The report, line by line."""
    for one in report.misfits:
        yield f"does not fit: {one}"
        yield from (f"    patch  {line}" for line in one.hunk.before)
        yield from (f"    {number:5}  {line}" for number, line in one.nearest)
    for change in report.changes:
        kind = "is gone" if change.gone else "changed"
        yield f"{kind}: {change.name} ({change.path}), used by {change.used_by}{'; refuses' * change.refuses}"
        yield from (f"    {line.rstrip()}" for line in change.diff)
    num_rows = len(RELIED_ON)
    yield f"vLLM {report.version}: {len(report.changes)} of {num_rows} functions that the engine side relies on changed"
    if report.written is not None:
        yield f"vLLM {report.version}: {report.num_patches} patches fit; wrote {report.written}"
        return
    if report.misfits:
        yield (
            f"vLLM {report.version}: {len(report.misfits)} hunks do not fit, nothing is written: copy {source}, edit "
            "the lines that begin with ' ' and '-' there to what the new file has, and name the copy with --series"
        )
    if report.gone:
        yield f"vLLM {report.version}: {len(report.gone)} functions are gone, nothing is written: change what uses them"


def require_series(directory: Path) -> Path:
    """Raises PatchError for a directory without a series."""
    if not (directory / "series").is_file():
        raise PatchError(f"{directory} holds no patch series: a directory such as patches/v0.33.0 is expected")
    return directory
