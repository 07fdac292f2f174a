# SPDX-License-Identifier: Apache-2.0
"""The series in patches/: complete, small, and exact for the releases that they are made for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patching.conftest import DATA, VERSIONS, Miniature, Originals
from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.diff import parse
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.series import HEADER_FIELDS, Series, load, load_directory, root, sha256

REPOSITORY = Path(__file__).parents[2]
MAX_PATCHES, MAX_ADDED_LINES, MAX_FILES = 12, 300, 12
NOT_A_HOOK = {
    "        version=vllm.__version__,",
    "    queue_server_address: str | None = None",
    "    patch_digest: str | None = None",
    "                    req._all_token_ids if req.num_output_tokens else None,",
    # Around the calls of a hook:
    "",
    "        has_work = (",
    "                self.output_queue.put_nowait(output)",
    "                    continue",
}


def test_versions() -> None:
    assert VERSIONS == ["0.32.0", "0.33.0"]
    assert [load(version).version for version in VERSIONS] == VERSIONS


def test_budget(series: Series) -> None:
    assert len(series.patches) <= MAX_PATCHES
    assert len(series.files) <= MAX_FILES
    assert sum(patch.num_added for patch in series.patches) <= MAX_ADDED_LINES


def test_headers(series: Series) -> None:
    for patch in series.patches:
        assert tuple(patch.header) == HEADER_FIELDS, patch.name
        assert all(patch.header.values()), patch.name
        assert set(patch.header["Process"].split(", ")) <= {"api", "core", "worker"}, patch.name
        assert (REPOSITORY / patch.header["Test"]).is_file(), patch.name


def test_every_patch_file_is_listed(series: Series) -> None:
    files = {path.name for path in (root() / f"v{series.version}").glob("*.patch")}
    assert files == {patch.name for patch in series.patches}


def test_all_versions_have_the_same_patches() -> None:
    first, *others = (load(version) for version in VERSIONS)
    for other in others:
        assert [(p.name, p.header) for p in other.patches] == [(p.name, p.header) for p in first.patches]


def test_a_patch_is_a_hook(series: Series) -> None:
    """Each added line calls a hook or the connector, or is one of few others."""
    for patch in series.patches:
        for change in patch.diffs:
            for hunk in change.hunks:
                for line in set(hunk.after) - set(hunk.before):
                    assert re.search(r"\b(hooks|kvconn|kvconn_outputs)\b", line) or line in NOT_A_HOOK, line


def test_applies_exactly(series: Series, originals: Originals) -> None:
    for path, text in originals(series).items():
        assert sha256(text) == series.files[path].before, path
        patched = series.apply(path, text)
        assert sha256(patched) == series.files[path].after, path
        assert series.patched(path, text.encode()) == series.patched(path, patched.encode()) == patched
        assert series.revert(path, patched) == text
        compile(patched, path, "exec", dont_inherit=True)


def test_another_file_is_refused(series: Series, originals: Originals) -> None:
    for path, text in originals(series).items():
        assert series.patched(path, text.encode() + b"#\n") is None
        with pytest.raises(PatchError, match=path):
            series.apply(path, "\n" + text)


def test_the_patch_program_agrees(series: Series, originals: Originals, tmp_path: Path) -> None:
    program = shutil.which("patch")
    if program is None:
        pytest.skip("there is no program `patch`")
    for path, text in originals(series).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, newline="")
    for patch in series.patches:
        file = root() / f"v{series.version}" / patch.name
        done = subprocess.run(
            [program, "-p1", "-F0", "--no-backup-if-mismatch", "-i", file], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout, done.stdout
    for path, base in series.files.items():
        assert sha256((tmp_path / path).read_bytes()) == base.after, path


def test_single_diff_joins_all_patches(series: Series, originals: Originals) -> None:
    texts = originals(series)
    changes = parse(series.as_one_diff(texts), "series.diff")
    assert {change.path for change in changes} == set(series.files)
    for change in changes:
        assert sha256(change.apply(texts[change.path])) == series.files[change.path].after


def test_stored_originals_are_complete() -> None:
    for directory in DATA.glob("v*"):
        series = load(directory.name.removeprefix("v"))
        assert all((directory / f"{path}.gz").is_file() for path in {*series.files, *(row.path for row in RELIED_ON)})


def test_local_version_does_not_count() -> None:
    assert load("0.32.0+cpu").version == "0.32.0"


def test_unknown_version() -> None:
    with pytest.raises(PatchError, match=r"no patch series for vLLM 0.31.0, only for 0.32.0, 0.33.0"):
        load("0.31.0")


def test_digest_depends_on_every_byte(miniature: Miniature) -> None:
    directory = miniature.patches / "v9.9.9"
    digest = load_directory(directory).digest
    patch = directory / "0001-all.patch"
    patch.write_text(patch.read_text().replace("Why: text", "Why: Text"))
    assert load_directory(directory).digest != digest


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("series", "0002-missing.patch\n", "is damaged .*0002-missing.patch.*: reinstall"),
        ("BASE", "vllm 9.9.9\n", "BASE and the patches name different files"),
        ("BASE", "vllm 9.9.9\nabc  def  vllm/one.py\n", "not a line with two hashes"),
        ("BASE", "9.9.9\n", "the first line names the version"),
        ("BASE", "", "is damaged"),
        ("0001-all.patch", "no header\n---\n", "not a header line"),
    ],
)
def test_damaged(miniature: Miniature, name: str, text: str, message: str) -> None:
    directory = miniature.patches / "v9.9.9"
    (directory / name).write_text(text)
    with pytest.raises(PatchError, match=message):
        load_directory(directory)
