# SPDX-License-Identifier: Apache-2.0
"""The series on disk: for images that are to hold patched files, and for people who want to read them.

`apply` and `revert` take any mixture of original and patched files, so a run that was interrupted is finished by
another one. They change nothing if one file is neither, and each result is compared with its hash in BASE.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.installed import FileState, Installed
from vllm_llumnix.patching.series import Series, sha256


def apply(found: Installed) -> list[str]:
    """Patch the files; returns the paths of those that were changed. Raises PatchError, OSError."""
    series, root = _usable(found)
    return _rewrite(found, root, FileState.ORIGINAL, series.apply, {p: b.after for p, b in series.files.items()})


def revert(found: Installed) -> list[str]:
    """Take the series from the files; returns the paths of those that were changed. Raises PatchError, OSError."""
    series, root = _usable(found)
    return _rewrite(found, root, FileState.PATCHED, series.revert, {p: b.before for p, b in series.files.items()})


def export(found: Installed, target: Path) -> list[Path]:
    """Write vLLM's files with the series applied, and `series.diff` for `patch -p1`, below `target`."""
    series, root = _usable(found)
    originals = {path: original(found, root, path) for path in series.files}
    written = [target / path for path in series.files] + [target / "series.diff"]
    for path, text in originals.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(series.apply(path, text), newline="")
    written[-1].write_text(series.as_one_diff(originals), newline="")
    return written


def original(found: Installed, root: Path, path: str) -> str:
    """The released text of a file that may be patched on disk."""
    series, _ = _usable(found)
    text = (root / path).read_bytes().decode()
    return series.revert(path, text) if found.files[path] is FileState.PATCHED else text


def _usable(found: Installed) -> tuple[Series, Path]:
    if found.problem or found.series is None or found.root is None:
        raise PatchError(found.problem or "there is no patch series")
    return found.series, found.root


def _rewrite(
    found: Installed, root: Path, source: FileState, change: Callable[[str, str], str], expected: dict[str, str]
) -> list[str]:
    """Change the files that are in the state `source`: all texts are made and checked before the first is written."""
    texts: dict[str, str] = {}
    for path, state in found.files.items():
        if state is source:
            texts[path] = change(path, (root / path).read_bytes().decode())
            if sha256(texts[path]) != expected[path]:
                raise PatchError(f"{path}: the series does not give what its BASE says: reinstall vllm-llumnix")
    for path, text in texts.items():
        _replace(root / path, text)
    for path in texts:
        if sha256((root / path).read_bytes()) != expected[path]:
            raise PatchError(f"{root / path} was changed by somebody else meanwhile: run the command again")
    return list(texts)


def _replace(file: Path, text: str) -> None:
    """Replace a file in one step. Package managers link files from a cache: the old content must not be written to."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", newline="") as temporary:
            temporary.write(text)
        shutil.copymode(file, name)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
