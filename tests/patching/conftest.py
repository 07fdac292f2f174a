# SPDX-License-Identifier: Apache-2.0
"""Released vLLM files to patch, and a miniature package `vllm` with a series of its own."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_llumnix.patching import contract
from vllm_llumnix.patching import series as series_module
from vllm_llumnix.patching.disk import original
from vllm_llumnix.patching.installed import examine, find_vllm
from vllm_llumnix.patching.release import Release, open_release
from vllm_llumnix.patching.series import HEADER_FIELDS, Series, available, load, sha256, unified_diff

DATA = Path(__file__).parent / "data"
VERSIONS = available()
Originals = Callable[[Series], dict[str, str]]


@pytest.fixture(params=VERSIONS)
def series(request: pytest.FixtureRequest) -> Series:
    """Each series in turn."""
    return load(request.param)


@pytest.fixture
def originals() -> Originals:
    """The released files that a series changes: stored ones, or those of the installed vLLM."""

    def of(series: Series) -> dict[str, str]:
        stored = DATA / f"v{series.version}"
        if stored.is_dir():
            return {path: gzip.decompress((stored / f"{path}.gz").read_bytes()).decode() for path in series.files}
        found = examine(find_vllm())
        if found.version != series.version or found.root is None:
            pytest.skip(f"vLLM {series.version} is not installed")
        assert found.problem is None
        return {path: original(found, found.root, path) for path in series.files}

    return of


@pytest.fixture
def vllm_033(tmp_path: Path) -> Path:
    """The directory of a package `vllm` 0.33.0 that holds the files of series and contract only. Not to be imported."""
    stored = DATA / "v0.33.0"
    package = tmp_path / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for source in stored.rglob("*.gz"):
        target = package.parent / source.relative_to(stored).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.decompress(source.read_bytes()))
    return package


@pytest.fixture
def release(series: Series, tmp_path: Path, request: pytest.FixtureRequest) -> Release:
    """The release that each series is for: its stored files, or the installed ones."""
    if (DATA / f"v{series.version}").is_dir():
        return open_release(request.getfixturevalue("vllm_033"))
    found = examine(find_vllm())
    if found.version is None or found.version.partition("+")[0] != series.version:
        pytest.skip(f"vLLM {series.version} is not installed")
    return found.as_released()


MINI_BEFORE = {
    "vllm/one.py": "def answer():\n    value = 1\n    return value\n",
    "vllm/sub/__init__.py": "NAME = 'stock'\n",
}
MINI_AFTER = {
    "vllm/one.py": "def answer():\n    value = 1\n    value = 1 / (value - 1)\n    return value\n",
    "vllm/sub/__init__.py": "NAME = 'patched'\n",
}


MINI_OTHER = """\
NAME = 'other'


class Pool:
    def touch(self):
        # Comments do not count.
        return 1

    def size(self):
        return 2
"""


@dataclass(frozen=True)
class Miniature:
    """`site` holds the package, `patches` its series, for version 9.9.9."""

    site: Path
    patches: Path

    def file(self, path: str) -> Path:
        return self.site / path


@pytest.fixture
def miniature(tmp_path: Path) -> Miniature:
    """A package `vllm` of two listed modules and an unlisted one, which has two functions that are relied on."""
    mini = Miniature(tmp_path / "site", tmp_path / "patches")
    directory = mini.patches / "v9.9.9"
    directory.mkdir(parents=True)
    (mini.site / "vllm" / "sub").mkdir(parents=True)
    for path, text in {
        **MINI_BEFORE,
        "vllm/__init__.py": "from ._version import __version__\n",
        "vllm/_version.py": "__version__ = version = '9.9.9'\n",
        "vllm/other.py": MINI_OTHER,
    }.items():
        mini.file(path).write_text(text)
    header = "".join(f"{field}: text\n" for field in HEADER_FIELDS)
    changes = [line for path in MINI_BEFORE for line in unified_diff(path, MINI_BEFORE[path], MINI_AFTER[path])]
    (directory / "0001-all.patch").write_text(f"{header}---\n{''.join(changes)}")
    (directory / "series").write_text("0001-all.patch\n")
    hashes = [f"{sha256(MINI_BEFORE[path])}  {sha256(MINI_AFTER[path])}  {path}\n" for path in MINI_BEFORE]
    (directory / "BASE").write_text("vllm 9.9.9\n" + "".join(hashes))
    functions = contract.digests(MINI_OTHER.encode())
    lines = [f"{functions['Pool.touch']} refuses  Pool.touch\n", f"{functions['Pool.size']} warns    Pool.size\n"]
    (directory / "CONTRACT").write_text(f"vllm 9.9.9\n{sha256(MINI_OTHER)}  vllm/other.py\n{''.join(lines)}")
    return mini


@pytest.fixture
def miniature_series(miniature: Miniature, monkeypatch: pytest.MonkeyPatch) -> Miniature:
    """The same, its series being the only one that this process knows."""
    monkeypatch.setattr(series_module, "root", lambda: miniature.patches)
    return miniature
