# SPDX-License-Identifier: Apache-2.0
"""The vLLM that this interpreter would import, compared with its patch series. Nothing of vLLM is imported."""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.series import Base, Series, load, sha256

_VERSION = re.compile(r"""^(?:__version__ = )?(?:version|__version__) = ['"]([^'"]+)['"]""", re.MULTILINE)


class FileState(StrEnum):
    """What a file on disk is, by its hash."""

    ORIGINAL = "original"
    PATCHED = "patched"
    ALTERED = "altered"
    MISSING = "missing"

    @staticmethod
    def of(path: Path, base: Base) -> FileState:
        try:
            found = sha256(path.read_bytes())
        except FileNotFoundError:
            return FileState.MISSING
        return {base.before: FileState.ORIGINAL, base.after: FileState.PATCHED}.get(found, FileState.ALTERED)


@dataclass(frozen=True, slots=True)
class Installed:
    """`root` is the directory that holds the package `vllm`; `series` is None when `problem` says why."""

    root: Path | None
    version: str | None
    series: Series | None
    files: dict[str, FileState]
    problem: str | None

    @property
    def on_disk(self) -> bool:
        """Whether all files on disk are patched ones."""
        return bool(self.files) and all(state is FileState.PATCHED for state in self.files.values())


def find_vllm() -> Path | None:
    """The directory of the package `vllm`, or None."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in module without a spec
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def version_of(package: Path) -> str | None:
    """vLLM's version as its build wrote it down. The name of the distribution differs between builds."""
    try:
        match = _VERSION.search((package / "_version.py").read_text())
    except FileNotFoundError:
        return None
    return match[1] if match else None


def examine(package: Path | None) -> Installed:
    """Compare the package in the directory `package` with the series for its version."""
    if package is None:
        return Installed(None, None, None, {}, "vLLM is not installed: install it into this environment")
    version = version_of(package)
    if version is None:
        return Installed(package.parent, None, None, {}, f"{package / '_version.py'} does not tell vLLM's version")
    try:
        series = load(version)
    except PatchError as error:
        return Installed(package.parent, version, None, {}, str(error))
    files = {path: FileState.of(package.parent / path, base) for path, base in series.files.items()}
    return Installed(package.parent, version, series, files, _problem(package.parent, version, files))


def _problem(root: Path, version: str, files: dict[str, FileState]) -> str | None:
    faults = [
        f"{root / path} is {state}" for path, state in files.items() if state in (FileState.ALTERED, FileState.MISSING)
    ]
    if not faults:
        return None
    return f"vLLM {version} is not as it was released: {'; '.join(faults)}: reinstall vLLM {version}"


@functools.cache
def installed() -> Installed:
    """The vLLM of this process, examined once."""
    return examine(find_vllm())
