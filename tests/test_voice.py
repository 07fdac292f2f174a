# SPDX-License-Identifier: Apache-2.0
"""The openings of docstrings, help texts and test names: each text begins with a noun phrase or a verb.

The allowances count today's offenders. They may only shrink.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llumlet.process.settings import all_entries
from tests.test_settings import PROGRAMS

ROOT = Path(__file__).parents[1]
DOCSTRINGS = {"llumlet": 1, "llumsched": 2, "llumsim": 0, "vllm_llumnix": 1}
"""Docstrings that may begin with a word of DANGLING, by package."""
TEST_NAMES = 0
"""Tests whose names may begin like a riddle."""
DANGLING = frozenset(["of", "what", "who", "whose", "whom", "whether", "those", "that", "one", "nobody", "how"])
NO_HELP = DANGLING | frozenset(
    ["for", "as", "at", "to", "in", "and", "or", "if", "where", "within", "between", "until", "it", "its"]
)
RIDDLE = re.compile(r"^ *(?:async )?def (test_(?:who|what|nobody|one|those)_\w+)", re.MULTILINE)


def first_word(text: str) -> str:
    return (re.findall(r"[\w'-]+", text) or [""])[0]


def docstrings(path: Path) -> Iterator[ast.Constant]:
    """The texts that stand alone as statements."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize("package", DOCSTRINGS)
def test_docstrings_stand_alone(package: str) -> None:
    dangling = [
        f"{path.relative_to(ROOT)}:{text.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in docstrings(path)
        if first_word(str(text.value)).lower() in DANGLING
    ]
    assert len(dangling) <= DOCSTRINGS[package], f"begin them with a noun or a verb: {dangling}"


def test_test_names_state_a_claim() -> None:
    riddles = [name for path in sorted((ROOT / "tests").rglob("*.py")) for name in RIDDLE.findall(path.read_text())]
    assert len(riddles) <= TEST_NAMES, f"name the thing that the test is about: {riddles}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_stands_alone(program: str) -> None:
    for entry in all_entries(PROGRAMS[program]):
        first = first_word(entry.setting.help)
        assert first.lower() not in NO_HELP, entry.setting
        assert first.islower() or first.isupper() or program == "llumlet", entry.setting
