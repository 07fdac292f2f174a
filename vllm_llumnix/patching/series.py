# SPDX-License-Identifier: Apache-2.0
"""A patch series: `patches/v<version>/` with

    BASE      "vllm <version>", then "<sha256 before>  <sha256 after>  <path>" for each file that the series changes
    series    the names of the patches, in the order in which they are applied
    *.patch   header fields ("Subject: ...", continued by indented lines), "---", a unified diff
    CONTRACT  what else the engine side counts on: see contract.py

The digest identifies a series: two processes with the same digest have the same text in each changed module.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import diff

HEADER_FIELDS = ("Subject", "Why", "Why-not-plugin", "Process", "Forwarded", "Remove-when", "Test")
_FIELD = re.compile(r"([A-Z][A-Za-z-]*): (.*)")
_HUNK_HEAD = re.compile(r"@@ -(\d+)[^@]*@@\n")
_HEADING = re.compile(r"class |( {4})?(async )?def ")
_BASE_LINE = re.compile(r"([0-9a-f]{64})  ([0-9a-f]{64})  (\S+)")


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch file."""

    name: str
    header: dict[str, str]
    diffs: tuple[diff.FileDiff, ...]

    @property
    def num_added(self) -> int:
        """Added lines."""
        return sum(hunk.num_added for change in self.diffs for hunk in change.hunks)


@dataclass(frozen=True, slots=True)
class Base:
    """sha256 of one file before and after the series."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Series:
    """A loaded series. `files` maps paths below the directory that holds the package (`vllm/...`)."""

    version: str
    files: dict[str, Base]
    patches: tuple[Patch, ...]
    digest: str

    def apply(self, path: str, text: str) -> str:
        """The patched text of the file `path`. Raises PatchError where a line of context differs."""
        for patch in self.patches:
            for change in patch.diffs:
                if change.path == path:
                    text = change.apply(text)
        return text

    def patched(self, path: str, data: bytes) -> str | None:
        """The patched text for a file with the content `data`, patched already or not; None if it is neither.

        Raises PatchError if the series does not lead to what its own BASE says.
        """
        base = self.files[path]
        found = sha256(data)
        if found == base.after:
            return data.decode()
        if found != base.before:
            return None
        text = self.apply(path, data.decode())
        if sha256(text) != base.after:
            raise PatchError(f"the patch series for vLLM {self.version} is damaged ({path}): reinstall vllm-llumnix")
        return text

    def adapt(self, path: str, text: str) -> str:
        """The patched text of a file that is not the released one: each hunk has to be there as it is, exactly once.

        Raises PatchError naming all that are not.
        """
        faults: list[str] = []
        for patch in self.patches:
            for change in patch.diffs:
                if change.path == path:
                    text, misfits = change.apply_by_text(text)
                    faults += [misfit(patch.name, change.path, *one) for one in misfits]
        if faults:
            raise PatchError("; ".join(faults))
        return text

    def revert(self, path: str, text: str) -> str:
        """The inverse of `apply`."""
        for patch in reversed(self.patches):
            for change in reversed(patch.diffs):
                if change.path == path:
                    text = change.reversed().apply(text)
        return text

    def as_one_diff(self, originals: dict[str, str]) -> str:
        """The whole series as one diff for `patch -p1`; `originals` holds the text of each file."""
        parts: list[str] = []
        for path in self.files:
            after = self.apply(path, originals[path])
            parts += unified_diff(path, originals[path], after)
        return "".join(parts)


def misfit(patch: str, path: str, hunk: diff.Hunk, count: int) -> str:
    """Description of what is wrong with a hunk whose lines are in a file `count` times, not once."""
    return f"{patch}: the hunk at line {hunk.before_start} is {count} times in {path}"


def module_name(path: str) -> str:
    """`vllm/v1/engine/core.py` -> `vllm.v1.engine.core`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unified_diff(path: str, before: str, after: str) -> list[str]:
    """The lines of the diff between two texts of the file `path`, with three lines of context.

    As in git's diffs, the head of a hunk repeats the class or function that was begun last.
    """
    lines = _lines(before)
    result = list(difflib.unified_diff(lines, _lines(after), f"a/{path}", f"b/{path}"))
    for number, line in enumerate(result):
        if match := _HUNK_HEAD.fullmatch(line):
            above = [text for text in lines[: int(match[1]) - 1] if _HEADING.match(text)]
            result[number] = f"{line.rstrip()} {above[-1].strip()}\n" if above else line
    return result


def _lines(text: str) -> list[str]:
    # Not splitlines, which also splits at form feeds.
    return [line + "\n" for line in text.removesuffix("\n").split("\n")]


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def root() -> Path:
    """The directory of all series: inside an installed package, or `patches/` of a source tree."""
    here = Path(__file__).resolve().parent
    packaged = here / "series_data"
    return packaged if packaged.is_dir() else here.parents[1] / "patches"


def available() -> list[str]:
    """The vLLM versions for which there is a series, oldest first."""
    versions = (path.parent.name.removeprefix("v") for path in root().glob("v*/BASE"))
    return sorted(versions, key=lambda version: [int(number) for number in re.findall(r"\d+", version)])


def directory_of(version: str) -> Path:
    """The directory in which the series for a vLLM version is, or would be; a local part of the version ("+cpu") does
    not count."""
    return root() / f"v{version.partition('+')[0]}"


def load(version: str) -> Series:
    """The series for a vLLM version. Raises PatchError if there is none, or if it is faulty."""
    directory = directory_of(version)
    if not (directory / "BASE").is_file():
        raise PatchError(f"there is no patch series for vLLM {version}, only for {', '.join(available()) or 'none'}")
    return load_directory(directory)


def load_base(version: str) -> dict[str, Base]:
    """The hashes of the files that the series for a vLLM version changes. Raises PatchError if they are damaged."""
    directory = directory_of(version)
    try:
        return _parse_base((directory / "BASE").read_text())[1]
    except (OSError, ValueError) as error:
        raise _damaged(directory, error) from error


def _damaged(directory: Path, error: Exception) -> PatchError:
    return PatchError(f"the patch series in {directory} is damaged ({error}): reinstall vllm-llumnix")


def load_directory(directory: Path) -> Series:
    """The series in `directory`. Raises PatchError if it is faulty."""
    try:
        return _load(directory)
    except (OSError, ValueError) as error:
        raise _damaged(directory, error) from error


def _load(directory: Path) -> Series:
    version, files = _parse_base((directory / "BASE").read_text())
    names = listed((directory / "series").read_text())
    digest = hashlib.sha256((directory / "BASE").read_bytes())
    patches: list[Patch] = []
    for name in names:
        data = (directory / name).read_bytes()
        digest.update(f"\0{name}\0".encode() + data)
        patches.append(parse_patch(data.decode(), name))
    changed = {change.path for patch in patches for change in patch.diffs}
    if changed != files.keys():
        raise PatchError(f"{directory}: BASE and the patches name different files: {sorted(changed ^ files.keys())}")
    return Series(version, files, tuple(patches), digest.hexdigest()[:16])


def parse_patch(text: str, name: str) -> Patch:
    """Parses the text of a patch file."""
    header: dict[str, str] = {}
    field = ""
    for line in text.partition("\n---\n")[0].splitlines():
        if match := _FIELD.fullmatch(line):
            field = match[1]
            header[field] = match[2]
        elif line.startswith(" ") and field:
            header[field] += " " + line.strip()
        else:
            raise PatchError(f"{name}: not a header line: {line!r}")
    return Patch(name, header, diff.parse(text, name))


def _parse_base(text: str) -> tuple[str, dict[str, Base]]:
    first, *rest = listed(text)
    if not first.startswith("vllm "):
        raise PatchError(f"BASE: the first line names the version, 'vllm X.Y.Z': {first!r}")
    files: dict[str, Base] = {}
    for line in rest:
        match = _BASE_LINE.fullmatch(line)
        if match is None:
            raise PatchError(f"BASE: not a line with two hashes and a path: {line!r}")
        files[match[3]] = Base(match[1], match[2])
    return first.removeprefix("vllm "), files


def listed(text: str) -> list[str]:
    """The lines of a list file, without comments and empty lines."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
