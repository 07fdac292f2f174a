# SPDX-License-Identifier: Apache-2.0
"""The Python files of one vLLM, as released: from a wheel, or from an unpacked one."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_llumnix.errors import PatchError

_VERSION = re.compile(r"""^(?:__version__ = )?(?:version|__version__) = ['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Release:
    """`read` gives the content of a file by its path (`vllm/...`), and raises KeyError or OSError if there is none."""

    version: str
    read: Callable[[str], bytes]

    def text(self, path: str) -> str:
        """Raises PatchError for a file that this release does not have."""
        try:
            return self.read(path).decode()
        except (KeyError, OSError, ValueError) as error:
            raise PatchError(f"vLLM {self.version} has no file {path}") from error

    def text_or_nothing(self, path: str) -> str:
        """Empty for a file that this release does not have."""
        try:
            return self.text(path)
        except PatchError:
            return ""


def reader_of(root: Path) -> Callable[[str], bytes]:
    """Reads files below the directory that holds the package; nothing for those that are not there."""

    def read(path: str) -> bytes:
        try:
            return (root / path).read_bytes()
        except OSError:
            return b""

    return read


def open_release(where: Path) -> Release:
    """A wheel, the directory of the package `vllm`, or one that holds it. Raises PatchError for anything else."""
    if where.is_dir():
        root = where if (where / "vllm").is_dir() else where.parent
        version = version_of(root / "vllm")
        if version is None:
            raise PatchError(f"{where} is neither the package vllm nor a directory that holds it, or tells no version")
        return Release(version, lambda path: (root / path).read_bytes())
    try:
        wheel = zipfile.ZipFile(where)
        version = _find_version(wheel.read("vllm/_version.py").decode())
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise PatchError(f"{where} is neither a directory nor a wheel of vLLM: {error}") from error
    if version is None:
        raise PatchError(f"{where}: vllm/_version.py does not tell vLLM's version")
    return Release(version, wheel.read)


def version_of(package: Path) -> str | None:
    """vLLM's version as its build wrote it down. The name of the distribution differs between builds."""
    try:
        return _find_version((package / "_version.py").read_text())
    except FileNotFoundError:
        return None


def _find_version(text: str) -> str | None:
    """The version in the text of `_version.py`."""
    match = _VERSION.search(text)
    return match[1] if match else None
