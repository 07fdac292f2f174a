# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site. Warnings of the generator (dead links among them) are errors.

    python -m tests.support.site build/site

The pages beside the benchmarks are part of it. Links to other files of the repository, which the site does not have,
become plain text; `tests/test_docs.py` checks these.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[([^][]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def build(out: Path, changed: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes the site to `out`, with `changed` texts of some pages. Raises subprocess.CalledProcessError if the
    generator has anything to say."""
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory)
        shutil.copytree(ROOT / "docs", stage / "docs")
        shutil.copytree(ROOT / "benchmarks", stage / "docs" / "benchmarks", ignore=_all_but_pages)
        for name, text in changed.items():
            (stage / "docs" / name).write_text(text)
        for page in (stage / "docs").rglob("*.md"):
            page.write_text(_with_links(page.read_text(), page.relative_to(stage / "docs")))
        shutil.copy(ROOT / "zensical.toml", stage)
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
        subprocess.run(command, cwd=stage, check=True, env={**os.environ, "NO_COLOR": "1"})
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stage / "site", out)


def _all_but_pages(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".md")]


def _with_links(text: str, page: Path) -> str:
    """`text` with links as they are in the site. `page`: its path there."""
    here = page.parent if page.parts[0] == "benchmarks" else "docs" / page.parent

    def link(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        path = Path(os.path.normpath(here / target))
        if path.parts[0] not in ("docs", "benchmarks") or path.suffix not in (".md", ".svg"):
            return label
        there = path.relative_to("docs") if path.parts[0] == "docs" else path
        return f"{image}[{label}]({os.path.relpath(there, page.parent)}{anchor or ''})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
