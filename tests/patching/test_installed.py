# SPDX-License-Identifier: Apache-2.0
"""What is found on disk, by hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patching.conftest import MINI_AFTER, Miniature
from vllm_llumnix.patching.installed import FileState, examine, version_of


def test_original_files(vllm_033: Path) -> None:
    found = examine(vllm_033)
    assert (found.version, found.problem, found.on_disk) == ("0.33.0", None, False)
    assert set(found.files.values()) == {FileState.ORIGINAL}


def test_an_altered_and_a_missing_file_are_named(miniature_series: Miniature) -> None:
    one, sub = miniature_series.file("vllm/one.py"), miniature_series.file("vllm/sub/__init__.py")
    one.write_text("")
    sub.unlink()
    found = examine(miniature_series.file("vllm"))
    assert found.problem == (
        f"vLLM 9.9.9 is not as it was released: {one} is altered; {sub} is missing: reinstall vLLM 9.9.9"
    )


def test_patched_files(miniature_series: Miniature) -> None:
    for path, text in MINI_AFTER.items():
        assert not examine(miniature_series.file("vllm")).on_disk
        miniature_series.file(path).write_text(text)
    found = examine(miniature_series.file("vllm"))
    assert (found.on_disk, found.problem) == (True, None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = version = '0.32.0'\n", "0.32.0"),
        ("version = '0.32.0+cpu'\n", "0.32.0+cpu"),
        ('__version__ = "1.2"\n', "1.2"),
        ("__version__: str\nversion: str\n__version__ = version = '3.4.5'\n", "3.4.5"),
        ("nothing\n", None),
    ],
)
def test_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "_version.py").write_text(text)
    assert version_of(tmp_path) == version


def test_unknown_version(miniature_series: Miniature) -> None:
    miniature_series.file("vllm/_version.py").write_text("__version__ = version = '8.0.0'\n")
    found = examine(miniature_series.file("vllm"))
    assert found.series is None
    assert found.problem == (
        "there is no patch series for vLLM 8.0.0, only for 9.9.9: install one of these versions of vLLM"
    )


def test_no_version(miniature_series: Miniature) -> None:
    miniature_series.file("vllm/_version.py").unlink()
    assert "does not tell vLLM's version" in str(examine(miniature_series.file("vllm")).problem)


def test_no_vllm() -> None:
    assert examine(None).problem == "vLLM is not installed: install it into this environment"
