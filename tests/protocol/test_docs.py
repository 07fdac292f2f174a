# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/understand/protocol.md are current."""

from __future__ import annotations

import ast
from pathlib import Path

from llumlet import protocol
from tests.support import diagram

PROTOCOL = Path(__file__).parents[2] / "docs" / "understand" / "protocol.md"


def test_protocol_page_is_current() -> None:
    assert diagram.main(["--check", str(PROTOCOL)]) == 0, "run python -m tests.support.diagram"


def test_every_part_is_on_the_page() -> None:
    text = PROTOCOL.read_text()
    for name in diagram.PARTS:
        assert f"<!-- begin {name} -->" in text


def test_old_part_is_noticed_and_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin source table -->\nold\n<!-- end source table -->\nafter\n")
    assert diagram.main(["--check", str(page)]) == 1
    assert "old" in page.read_text()
    assert diagram.main([str(page)]) == 0
    assert diagram.main(["--check", str(page)]) == 0
    assert "| planned | Start |  | reserving |" in page.read_text()


def test_the_protocol_is_pure() -> None:
    """No I/O, no clock, no chance, nothing of vLLM: what decides can be run anywhere, and twice."""
    allowed = {"__future__", "collections", "dataclasses", "enum", "hashlib", "math", "typing", "msgspec", "llumlet"}
    for path in Path(protocol.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                assert module.split(".")[0] in allowed, (path.name, module)
                if module.startswith("llumlet"):
                    assert module.startswith("llumlet.protocol"), (path.name, module)
