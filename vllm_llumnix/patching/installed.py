# SPDX-License-Identifier: Apache-2.0
"""The vLLM that this interpreter would import, compared with the patch series. Nothing of vLLM is imported.

A series fits if each file that it changes has the hash that its BASE names, whatever version vLLM says it is. With
`adapt`, other files are taken, too, if every hunk is found in them word for word and the functions that the engine side
counts on are the ones of the series' release (`contract.py`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.contract import Kept
from vllm_llumnix.patching.release import Release, version_of
from vllm_llumnix.patching.series import Base, Series, available, load, load_base, sha256
from vllm_llumnix.switch import CONFIG_VARIABLE

ADAPT = "--llumlet-adapt"


class FileState(StrEnum):
    """State of a file on disk, by its hash. ADAPTED: another file than the released one, into which the patches fit."""

    ORIGINAL = "original"
    PATCHED = "patched"
    ADAPTED = "adapted"
    ALTERED = "altered"
    MISSING = "missing"

    @staticmethod
    def of(digest: str | None, base: Base) -> FileState:
        if digest is None:
            return FileState.MISSING
        return {base.before: FileState.ORIGINAL, base.after: FileState.PATCHED}.get(digest, FileState.ALTERED)


_RELEASED = (FileState.ORIGINAL, FileState.PATCHED)


@dataclass(frozen=True, slots=True)
class Installed:
    """`root` is the directory that holds the package `vllm`; `series` is None when there is no vLLM, or no series.

    There may be a series, the nearest, and a problem, too. `adapted` maps paths to the sha256 of the patched text.
    """

    root: Path | None
    version: str | None
    series: Series | None
    files: dict[str, FileState]
    problem: str | None
    adapted: dict[str, str] = field(default_factory=dict)

    @property
    def on_disk(self) -> bool:
        """True if all files on disk are patched."""
        return bool(self.files) and all(state is FileState.PATCHED for state in self.files.values())

    @property
    def digest(self) -> str | None:
        """Names the text of all patched modules: engines in which it differs refuse each other."""
        if self.series is None or not self.adapted:
            return self.series.digest if self.series is not None else None
        digest = hashlib.sha256(self.series.digest.encode())
        for path, text in sorted(self.adapted.items()):
            digest.update(f"\0{path}\0{text}".encode())
        return digest.hexdigest()[:16]

    def patched(self, path: str, data: bytes) -> str | None:
        """The patched text for a file with the content `data`; None if it is not what was examined.

        Raises PatchError if the series does not lead to what its own BASE says.
        """
        assert self.series is not None
        if path not in self.adapted:
            return self.series.patched(path, data)
        try:
            text = self.series.adapt(path, data.decode())
        except (PatchError, ValueError):
            return None
        return text if sha256(text) == self.adapted[path] else None

    def kept(self) -> Kept:
        """Compares the files with the contract of the series, of which there is one, and no problem with it."""
        assert self.series is not None
        assert self.root is not None
        return contract.kept(self.series, self.root)

    def as_released(self) -> Release:
        """The files without the patches that are in them. Raises PatchError if there is no vLLM."""
        root, series = self.root, self.series
        if root is None or self.version is None or series is None:
            raise PatchError(self.problem or "there is no vLLM")

        def read(path: str) -> bytes:
            data = (root / path).read_bytes()
            if self.files.get(path) is FileState.PATCHED:
                return series.revert(path, data.decode()).encode()
            return data

        return Release(self.version, read)


def find_vllm() -> Path | None:
    """The directory of the package `vllm`, or None."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in module without a spec
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def examine(package: Path | None, *, adapt: bool = False) -> Installed:
    """Compare the package in the directory `package` with every series, and take the one that fits."""
    if package is None:
        return Installed(None, None, None, {}, "vLLM is not installed: install it into this environment")
    version = version_of(package)
    if version is None:
        return Installed(package.parent, None, None, {}, f"{package / '_version.py'} does not tell vLLM's version")
    try:
        candidates = _candidates(package.parent, version)
        nearest, files = candidates[0]
        if all(state in _RELEASED for state in files.values()):
            return Installed(package.parent, version, load(nearest), files, None)
        if adapt:
            return _adapt(package.parent, version, candidates)
        problem = _problem(package.parent, version, nearest, files)
        return Installed(package.parent, version, load(nearest), files, problem)
    except PatchError as error:
        return Installed(package.parent, version, None, {}, str(error))


def _candidates(root: Path, version: str) -> list[tuple[str, dict[str, FileState]]]:
    """The versions that there is a series for, with the states of its files: those that fit come first, then by the
    number of files that fit; of equals the same release, then the newest.

    Raises PatchError if there is none.
    """
    found: list[tuple[str, dict[str, FileState]]] = []
    hashes: dict[str, str | None] = {}
    fault: PatchError | None = None
    for known in reversed(available()):
        try:
            base = load_base(known)
        except PatchError as error:
            fault = error
            continue
        for path in base.keys() - hashes.keys():
            hashes[path] = sha256((root / path).read_bytes()) if (root / path).is_file() else None
        found.append((known, {path: FileState.of(hashes[path], one) for path, one in base.items()}))
    if not found:
        raise fault or PatchError("vllm-llumnix has no patch series: reinstall vllm-llumnix")
    release = version.partition("+")[0]
    return sorted(found, key=lambda one: (-sum(s in _RELEASED for s in one[1].values()), one[0] != release))


def _adapt(root: Path, version: str, candidates: list[tuple[str, dict[str, FileState]]]) -> Installed:
    """The first series that goes into these files word for word, and whose contract they keep."""
    problems: list[str] = []
    for known, files in candidates:
        series = load(known)
        faults, adapted = [], dict[str, str]()
        for path in (path for path, state in files.items() if state not in _RELEASED):
            try:
                adapted[path] = sha256(series.adapt(path, (root / path).read_bytes().decode()))
            except (PatchError, OSError, ValueError) as error:
                faults.append(f"{root / path} is missing" if isinstance(error, OSError) else str(error))
        problem = "; ".join(faults) if faults else contract.kept(series, root).problem
        if problem is None:
            states = {path: FileState.ADAPTED if path in adapted else state for path, state in files.items()}
            return Installed(root, version, series, states, None, adapted)
        problems.append(f"patches for {known}: {problem}")
    advice = f"install vLLM {' or '.join(available())}, or make a series for {version}: docs/extend/upgrading.md"
    nearest, files = candidates[0]
    problem = f"vLLM {version} cannot be adapted to ({'; '.join(problems)}): {advice}"
    return Installed(root, version, load(nearest), files, problem)


def _problem(root: Path, version: str, nearest: str, files: dict[str, FileState]) -> str:
    faults = "; ".join(f"{root / path} is {state}" for path, state in files.items() if state not in _RELEASED)
    otherwise = f"if these files are meant to be so, see whether {ADAPT} takes them: `vllm-llumnix patch check --adapt`"
    if version.partition("+")[0] == nearest:
        return f"vLLM {version} is not as it was released: {faults}: reinstall vLLM {version}; {otherwise}"
    known = ", ".join(available())
    problem = f"there is no patch series for vLLM {version}, only for {known} ({faults})"
    return f"{problem}: install one of these; {otherwise}"


def adapt_asked() -> bool:
    """True if this process, or the one that started it, was given `--llumlet-adapt`; before flags are parsed."""
    if any(argument.replace("_", "-") == ADAPT for argument in sys.argv):
        return True
    config = os.environ.get(CONFIG_VARIABLE)
    if not config:
        return False
    import json

    return bool(json.loads(config).get("adapt"))


@functools.cache
def installed() -> Installed:
    """The vLLM of this process, examined once."""
    return examine(find_vllm(), adapt=adapt_asked())
