# SPDX-License-Identifier: Apache-2.0
"""The series on disk, on the files of a released vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import disk
from vllm_llumnix.patching.installed import FileState, Installed, examine


def texts(package: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}


def test_apply_and_revert(vllm_033: Path) -> None:
    before = texts(vllm_033)
    changed = disk.apply(examine(vllm_033))
    found = examine(vllm_033)
    assert found.on_disk
    assert sorted(changed) == sorted(found.files)
    assert disk.apply(found) == []
    assert sorted(disk.revert(found)) == sorted(changed)
    assert texts(vllm_033) == before
    assert disk.revert(examine(vllm_033)) == []


@pytest.mark.parametrize("finish", [disk.apply, disk.revert])
def test_an_interrupted_run_is_finished(
    vllm_033: Path, monkeypatch: pytest.MonkeyPatch, finish: Callable[[Installed], list[str]]
) -> None:
    replaced: list[object] = []

    def replace(source: str, target: Path) -> None:
        if len(replaced) == 3:
            raise OSError("disk full")
        replaced.append(target)
        shutil.move(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="disk full"):
            disk.apply(examine(vllm_033))
    found = examine(vllm_033)
    assert sorted(found.files.values()) == [FileState.ORIGINAL] * 5 + [FileState.PATCHED] * 3
    assert len(finish(found)) == (5 if finish is disk.apply else 3)
    assert len(set(examine(vllm_033).files.values())) == 1
    assert not list(vllm_033.rglob(".*"))


def test_nothing_is_changed_beside_an_altered_file(vllm_033: Path) -> None:
    (vllm_033 / "v1/engine/core.py").write_text("mine\n")
    before = texts(vllm_033)
    for change in (disk.apply, disk.revert):
        with pytest.raises(PatchError, match=r"core.py is altered: reinstall vLLM 0.33.0"):
            change(examine(vllm_033))
    assert texts(vllm_033) == before


def test_linked_files_and_modes(vllm_033: Path, tmp_path: Path) -> None:
    """Installers link files from their cache: the cached one must keep its content."""
    file, cached = vllm_033 / "v1/engine/core.py", tmp_path / "cached.py"
    os.link(file, cached)
    file.chmod(0o640)
    content = file.read_bytes()
    disk.apply(examine(vllm_033))
    assert cached.read_bytes() == content
    assert file.read_bytes() != content
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("on_disk", [False, True])
def test_export(vllm_033: Path, tmp_path: Path, on_disk: bool) -> None:
    originals = texts(vllm_033)
    if on_disk:
        disk.apply(examine(vllm_033))
    target = tmp_path / "export"
    written = disk.export(examine(vllm_033), target)
    assert all(path.is_file() for path in written)
    found = examine(vllm_033)
    if not on_disk:
        disk.apply(found)
    for path in found.files:
        assert (target / path).read_bytes() == (vllm_033.parent / path).read_bytes()
    program = shutil.which("patch")
    if program is None:
        pytest.skip("there is no program `patch`")
    for file, content in originals.items():
        file.write_bytes(content)
    subprocess.run([program, "-s", "-p1", "-F0", "-i", target / "series.diff"], cwd=vllm_033.parent, check=True)
    assert examine(vllm_033).on_disk
