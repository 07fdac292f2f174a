# SPDX-License-Identifier: Apache-2.0
"""Who may import whom. Imports are read from the source, those inside functions and `TYPE_CHECKING` blocks included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "llumlet/protocol": {"asyncio", "socket", "time", "datetime", "threading", "torch", "vllm", "zmq", "grpc", "google",
                         "llumsched", "vllm_llumnix"},
    "vllm_llumnix/kv": {"llumlet", "llumsched", "vllm_llumnix.engine", "vllm_llumnix.frontend"},
    "vllm_llumnix/engine": {"llumsched", "vllm_llumnix.frontend"},
    "vllm_llumnix/frontend": {"llumsched", "vllm_llumnix.engine", "vllm_llumnix.kv"},
    "vllm_llumnix/patching": {"vllm", "torch", "msgspec", "vllm_llumnix.engine", "vllm_llumnix.frontend"},
    "llumlet": {"vllm", "torch", "vllm_llumnix", "llumsched"},
    "llumsched": {"vllm", "torch", "vllm_llumnix"},
}  # fmt: skip


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_keeps_to_its_side(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    for module in modules:
        wrong = {
            name
            for name in imports(module)
            for forbidden in FORBIDDEN[package]
            if name == forbidden or name.startswith(forbidden + ".")
        }
        assert not wrong, f"{module.relative_to(ROOT)} imports {sorted(wrong)}"


def test_hooks_import_the_standard_library_only() -> None:
    tree = ast.parse((ROOT / "vllm_llumnix/hooks.py").read_text())
    top = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
           for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert top <= {"__future__", "os", "sys", "typing"}
