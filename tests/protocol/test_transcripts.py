# SPDX-License-Identifier: Apache-2.0
"""Every scenario file prints what it says it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import transcript

SCENARIOS = Path(__file__).parent.parent / "scenarios"
FILES = transcript.files(SCENARIOS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, rewrite: bool) -> None:
    text = path.read_text()
    printed = transcript.run(text)
    if rewrite:
        path.write_text(printed)
    else:
        assert printed == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_says_what_it_shows(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    assert "VIOLATION" not in text
    assert "WRONG" not in text
    assert "no message" not in text
