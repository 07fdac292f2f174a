# SPDX-License-Identifier: Apache-2.0
"""The links of all pages lead to files of this repository and their headings, and the site can be built."""

import os
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support import site

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    """The targets of a page's relative links that do not exist."""
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        path = Path(os.path.normpath(page.parent / target)) if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[here](#a-title) [there](page.md#none) [gone](gone.md) [web](https://example.org/x)\n")
    assert dead_links(page) == ["page.md#none", "gone.md"]


def test_pages_named_in_the_code_exist() -> None:
    named = re.compile(r"(?<![\w/])(?:docs|benchmarks)/[\w/-]+\.md")
    for folder in ("llumlet", "llumsched", "vllm_llumnix", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in named.findall(path.read_text()):
                assert (ROOT / page).exists(), f"{path.relative_to(ROOT)}: {page}"


def test_files_named_in_pages_exist() -> None:
    file = re.compile(r"`([a-z_]+(?:/[\w.-]+)*/[\w.-]+\.(?:py|proto|txt|yaml))`")
    packages = ("", "llumlet", "llumsched", "llumsim", "vllm_llumnix")
    for page in PAGES:
        for path in file.findall(page.read_text()) if page.name != "CHANGELOG.md" else ():
            is_ours = not path.startswith("vllm/")
            assert not is_ours or any((ROOT / package / path).exists() for package in packages), f"{page.name}: {path}"


@pytest.mark.parametrize(
    ("link", "fails"), [("[here](try/when.md#when-a-move-pays)", False), ("[gone](try/gone.md)", True)]
)
def test_site_builds_without_a_warning(link: str, fails: bool, tmp_path: Path) -> None:
    text = (ROOT / "docs/index.md").read_text()
    with pytest.raises(subprocess.CalledProcessError) if fails else nullcontext():
        site.build(tmp_path / "site", {"index.md": f"{text}\n{link}\n"})
    assert (tmp_path / "site/understand/theory.html").exists() is not fails


def test_pages_stay_short() -> None:
    words = [
        word for page in (ROOT / "docs").rglob("*.md") for word in page.read_text().split() if re.search(r"\w", word)
    ]
    assert len(words) <= 45_000
