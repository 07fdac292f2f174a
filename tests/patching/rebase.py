# SPDX-License-Identifier: Apache-2.0
"""Write a patch series again for another release of vLLM, or after one of its patches was edited.

    python -m tests.patching.rebase WHEEL      # or a directory that holds `vllm`

Each hunk is searched by its text, which must be in the file exactly once. The new patches have the right line numbers,
and BASE and CONTRACT the new hashes. The output also lists the functions on which the engine side relies and that have
changed in that release. If a hunk does not fit or a function is gone, nothing is written and the exit code is 1: read
that code first.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.diff import Hunk
from vllm_llumnix.patching.installed import examine, find_vllm
from vllm_llumnix.patching.release import Release, open_release
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.seam import absent
from vllm_llumnix.patching.series import available, directory_of, listed, misfit, parse_patch, sha256, unified_diff
from vllm_llumnix.seams import ALL


@dataclass(frozen=True, slots=True)
class Misfit:
    """A hunk that is not in the file exactly once. `nearest`: the numbered lines that resemble it most."""

    patch: str
    path: str
    hunk: Hunk
    count: int
    nearest: list[tuple[int, str]]

    def __str__(self) -> str:
        return misfit(self.patch, self.path, self.hunk, self.count)


@dataclass(frozen=True, slots=True)
class Change:
    """A function that the engine side relies on and that has changed. `diff` is empty without the old files."""

    path: str
    name: str
    used_by: str
    refuses: bool
    gone: bool
    diff: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome. `written` is None if the new series was not written."""

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

    `before` has the files that `source` was made for; without it changed functions are named without their diffs. The
    report lists changes in the order in which they are best read. Raises PatchError for a series or a release that
    cannot be read.
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
    """Compare the release with the contract `signed`: functions that are gone first, then those that refuse."""
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
    old = _source_of(before.text_or_nothing(path), name) if before is not None else None
    if old is None:
        return []
    new = _source_of(after, name) or []
    return list(difflib.unified_diff(old, new, f"a/{path} {name}", f"b/{path} {name}"))


def _source_of(text: str, name: str) -> list[str] | None:
    """The lines of a definition with its decorators; None if the text does not have it."""
    nodes = contract.definitions(text.encode()).get(name)
    if nodes is None:
        return None
    lines = text.splitlines(keepends=True)
    taken: list[str] = []
    for node in nodes:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        taken += lines[first - 1 : node.end_lineno]
    return taken


def _nearest(text: str, hunk: Hunk) -> list[tuple[int, str]]:
    """The lines of the file that hold most of the hunk's lines, with three around them; empty if none is there."""
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
    """Report line by line, for a person."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if nothing was written."""
    parser = argparse.ArgumentParser("python -m tests.patching.rebase", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", type=Path, metavar="WHEEL", help="a wheel of vLLM, or a directory that holds `vllm`")
    parser.add_argument("--series", type=Path, metavar="DIR", help="the series to start from (default: the newest)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="directory to write to (default: patches/vVERSION)")
    parser.add_argument("--before", type=Path, metavar="WHEEL", help="vLLM of the old series (default: the installed)")
    args = parser.parse_args(argv)
    try:
        release = open_release(args.release)
        source = require_series(args.series or directory_of(available()[-1]))
        before = open_release(args.before) if args.before is not None else _installed(source)
        report = rebase(source, release, args.into or directory_of(release.version), before)
    except PatchError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print("\n".join(describe(report, source)))
    for row in absent(ALL, release.text_or_nothing):
        print(f"missing: {row.name} ({row.path}), {row.kind} at run time: {row.why}")
    return 0 if report.written else 1


def _installed(source: Path) -> Release | None:
    """The installed vLLM, if the series in `source` was made for it."""
    found = examine(find_vllm())
    if found.problem is not None or found.series is None or found.series.version != contract.load(source).version:
        return None
    return found.as_released()


if __name__ == "__main__":
    raise SystemExit(main())
