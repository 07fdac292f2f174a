# SPDX-License-Identifier: Apache-2.0
"""What is found on disk, by hash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.patching.conftest import MINI_AFTER, Miniature
from vllm_llumnix.patching.installed import FileState, examine
from vllm_llumnix.patching.release import version_of
from vllm_llumnix.patching.series import sha256


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
        f"vLLM 9.9.9 is not as it was released: {one} is altered; {sub} is missing: reinstall vLLM 9.9.9; if these "
        "files are meant to be so, see whether --llumlet-adapt takes them: `vllm-llumnix patch check --adapt`"
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


@pytest.mark.parametrize("version", ["9.9.10", "9.9.9.post1", "10.0.0rc1.dev7+g1234567.cpu", "8.0.0"])
def test_the_hashes_decide_and_not_the_version(miniature_series: Miniature, version: str) -> None:
    miniature_series.file("vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
    found = examine(miniature_series.file("vllm"))
    assert (found.version, found.problem, found.adapted) == (version, None, {})
    assert found.series is not None
    assert (found.series.version, found.digest) == ("9.9.9", found.series.digest)


def test_of_two_series_that_fit_the_one_of_the_release_is_taken(miniature_series: Miniature) -> None:
    for other in ("9.9.8", "10.0.0"):
        shutil.copytree(miniature_series.patches / "v9.9.9", miniature_series.patches / f"v{other}")
        base = miniature_series.patches / f"v{other}" / "BASE"
        base.write_text(base.read_text().replace("9.9.9", other))
    for version, taken in {"9.9.9+cpu": "9.9.9", "9.9.8": "9.9.8", "9.9.7": "10.0.0"}.items():
        miniature_series.file("vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
        series = examine(miniature_series.file("vllm")).series
        assert series is not None
        assert series.version == taken


def test_a_release_that_no_series_fits(miniature_series: Miniature) -> None:
    miniature_series.file("vllm/_version.py").write_text("__version__ = version = '8.0.0'\n")
    miniature_series.file("vllm/one.py").write_text("")
    problem = examine(miniature_series.file("vllm")).problem
    assert problem is not None
    assert problem.startswith("there is no patch series for vLLM 8.0.0, only for 9.9.9 (")
    assert f"{miniature_series.file('vllm/one.py')} is altered): install one of these; if these" in problem


def test_a_damaged_series_beside_one_that_fits_does_no_harm(miniature_series: Miniature) -> None:
    (miniature_series.patches / "v9.9.10").mkdir()
    (miniature_series.patches / "v9.9.10" / "BASE").write_text("nonsense\n")
    assert examine(miniature_series.file("vllm")).problem is None


def test_an_altered_file_is_adapted_to(miniature_series: Miniature) -> None:
    """A vendor's line above the hunk: its lines are there, word for word, elsewhere."""
    one = miniature_series.file("vllm/one.py")
    one.write_text("import os\n\n" + one.read_text())
    assert examine(miniature_series.file("vllm")).problem is not None
    found = examine(miniature_series.file("vllm"), adapt=True)
    assert found.problem is None
    assert found.files == {"vllm/one.py": FileState.ADAPTED, "vllm/sub/__init__.py": FileState.ORIGINAL}
    text = "import os\n\n" + MINI_AFTER["vllm/one.py"]
    assert found.patched("vllm/one.py", one.read_bytes()) == text
    assert found.adapted == {"vllm/one.py": sha256(text)}
    assert found.patched("vllm/one.py", b"changed since\n") is None
    assert found.patched("vllm/one.py", one.read_bytes() + b"# changed since\n") is None
    assert found.patched("vllm/sub/__init__.py", b"NAME = 'stock'\n") == "NAME = 'patched'\n"


def test_adapted_engines_with_other_texts_have_other_digests(miniature_series: Miniature) -> None:
    one = miniature_series.file("vllm/one.py")
    stock, digests = one.read_text(), set()
    for added in ("", "import os\n", "import re\n", "import os\n"):
        one.write_text(added + stock)
        digests.add(examine(miniature_series.file("vllm"), adapt=True).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("changed", ["    value = 2\n    return value\n", "    value = 1 \n    return value\n"])
def test_there_is_no_fuzz(miniature_series: Miniature, changed: str) -> None:
    miniature_series.file("vllm/one.py").write_text("def answer():\n" + changed)
    problem = examine(miniature_series.file("vllm"), adapt=True).problem
    assert problem is not None
    assert "patches for 9.9.9: 0001-all.patch: the hunk at line 1 is 0 times in vllm/one.py" in problem
    assert "install vLLM 9.9.9, or make a series for 9.9.9: docs/extend/upgrading.md" in problem


def test_a_hunk_that_fits_twice_is_refused(miniature_series: Miniature) -> None:
    one = miniature_series.file("vllm/one.py")
    one.write_text(2 * one.read_text())
    assert "is 2 times in vllm/one.py" in str(examine(miniature_series.file("vllm"), adapt=True).problem)


def test_nothing_is_adapted_against_the_contract(miniature_series: Miniature) -> None:
    one, other = miniature_series.file("vllm/one.py"), miniature_series.file("vllm/other.py")
    one.write_text("import os\n" + one.read_text())
    other.write_text(other.read_text().replace("return 2", "return 3"))
    assert examine(miniature_series.file("vllm"), adapt=True).problem is None
    other.write_text(other.read_text().replace("return 1", "return 3"))
    problem = examine(miniature_series.file("vllm"), adapt=True).problem
    assert problem is not None
    assert "relies on what these functions do in vLLM 9.9.9: Pool.touch (vllm/other.py) differs: install" in problem


def test_released_files_need_no_adapting(miniature_series: Miniature) -> None:
    stock = examine(miniature_series.file("vllm"))
    assert examine(miniature_series.file("vllm"), adapt=True) == stock


def test_no_version(miniature_series: Miniature) -> None:
    miniature_series.file("vllm/_version.py").unlink()
    assert "does not tell vLLM's version" in str(examine(miniature_series.file("vllm")).problem)


def test_no_vllm() -> None:
    assert examine(None).problem == "vLLM is not installed: install it into this environment"
