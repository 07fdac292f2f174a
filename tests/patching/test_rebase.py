# SPDX-License-Identifier: Apache-2.0
"""The day a new vLLM comes: the series written again, and the list of what to read. Here from 0.32.0 to 0.33.0."""

from __future__ import annotations

import gzip
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.patching.conftest import DATA
from tests.patching.rebase import main, rebase
from tests.patching.store import store
from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.installed import examine, find_vllm
from vllm_llumnix.patching.release import Release, open_release
from vllm_llumnix.patching.series import Series, directory_of

Output = pytest.CaptureFixture[str]
OLD, NEW = directory_of("0.32.0"), directory_of("0.33.0")


@pytest.fixture
def wheel(vllm_033: Path, tmp_path: Path) -> Path:
    path = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in vllm_033.rglob("*.py"):
            archive.write(file, file.relative_to(vllm_033.parent))
    return path


@pytest.fixture
def before() -> Release:
    """vLLM 0.32.0, the installed one."""
    found = examine(find_vllm())
    if found.series is None or found.series.version != "0.32.0":
        pytest.skip("vLLM 0.32.0 is not installed")
    return found.as_released()


def contents(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in directory.iterdir()}


def test_written_again_it_is_the_same(series: Series, release: Release, tmp_path: Path) -> None:
    source = directory_of(series.version)
    report = rebase(source, release, tmp_path / "again")
    assert (report.misfits, report.changes, report.written) == ([], [], tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)


def test_onto_the_next_release(wheel: Path, before: Release, tmp_path: Path, capsys: Output) -> None:
    """Hunks are found by their text. Those that are not are shown with what is there, and nothing is written."""
    target = tmp_path / "v0.33.0"
    assert main([str(wheel), "--series", str(OLD), "--into", str(target)]) == 1
    output = capsys.readouterr().out
    assert not target.exists()
    heads = [line.partition(": the hunk")[0] for line in output.splitlines() if line.startswith("does not fit")]
    assert heads == [f"does not fit: {name}.patch" for name in ("0005-core-step", *["0009-ready-digest"] * 2)]
    assert "    patch          # Step the engine core.\n" in output
    assert re.search(r"^     \d{4}          get_watch_dog\(\)\.feed\(\)$", output, re.MULTILINE)
    assert f"3 hunks do not fit, nothing is written: copy {OLD}, edit the lines" in output


def test_changed_context_is_shown(wheel: Path, before: Release, tmp_path: Path, capsys: Output) -> None:
    """Exactly the functions whose code differs; those that refuse come first."""
    report = rebase(OLD, open_release(wheel), tmp_path / "next", before)
    changes = {(change.path, change.name): change for change in report.changes}
    old, new = contract.load(OLD), contract.load(NEW)
    differing = set(old.functions) - set(new.functions)
    assert changes.keys() == {(function.path, function.name) for function in differing}
    assert 5 < len(changes) < len(old.functions) / 2
    assert [change.refuses for change in report.changes] == sorted((c.refuses for c in report.changes), reverse=True)
    assert all(change.diff and not change.gone for change in report.changes)
    touch = changes["vllm/v1/core/block_pool.py", "BlockPool.touch"].diff
    assert "+            if block.is_null:\n" in touch
    assert (report.written, len(report.misfits)) == (None, 3)
    main([str(wheel), "--series", str(OLD), "--into", str(tmp_path / "next")])
    assert (
        "changed: BlockPool.touch (vllm/v1/core/block_pool.py), used by engine/blocks/scheduler_port.py; refuses\n"
        in (output := capsys.readouterr().out)
    )
    assert "    +            if block.is_null:\n" in output


def test_edited_patches_are_taken(wheel: Path, before: Release, tmp_path: Path, capsys: Output) -> None:
    """As the message says: a copy of the series in which the hunks that did not fit were edited."""
    copy = tmp_path / "v0.33.0"
    shutil.copytree(OLD, copy)
    for name in ("0005-core-step.patch", "0009-ready-digest.patch"):
        shutil.copyfile(NEW / name, copy / name)
    assert main([str(wheel), "--series", str(copy), "--into", str(copy)]) == 0
    assert f"12 patches fit; wrote {copy}\n" in capsys.readouterr().out
    assert contents(copy) == contents(NEW)


def test_a_function_that_is_gone_stops_it(vllm_033: Path, tmp_path: Path, capsys: Output) -> None:
    pool = vllm_033 / "v1/core/block_pool.py"
    pool.write_text(pool.read_text().replace("def touch(", "def touch_all("))
    assert main([str(vllm_033), "--series", str(NEW), "--into", str(tmp_path / "next")]) == 1
    output = capsys.readouterr().out
    assert output.startswith(
        "is gone: BlockPool.touch (vllm/v1/core/block_pool.py), used by engine/blocks/scheduler_port.py"
    )
    assert "1 functions are gone, nothing is written: change what uses them" in output
    assert not (tmp_path / "next").exists()


def test_without_the_old_files_changes_are_named_alone(wheel: Path, tmp_path: Path) -> None:
    report = rebase(OLD, open_release(wheel), tmp_path / "next")
    assert report.changes
    assert not any(change.diff for change in report.changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.whl", "is neither a directory nor a wheel of vLLM"),
        ("empty", "is neither the package vllm nor a directory that holds it"),
        ("text.whl", "is neither a directory nor a wheel of vLLM: File is not a zip file"),
    ],
)
def test_invalid_release_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(PatchError, match=message):
        open_release(tmp_path / name)


def test_the_files_of_a_release_are_stored(vllm_033: Path, tmp_path: Path) -> None:
    written = store(open_release(vllm_033), tmp_path / "data")
    assert {file.relative_to(tmp_path / "data") for file in written} == {
        file.relative_to(DATA) for file in (DATA / "v0.33.0").rglob("*.gz")
    }
    for file in written:
        kept = DATA / file.relative_to(tmp_path / "data")
        assert gzip.decompress(file.read_bytes()) == gzip.decompress(kept.read_bytes())
