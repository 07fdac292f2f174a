# SPDX-License-Identifier: Apache-2.0
"""Who may import whom. Imports are read from the source, those inside functions and `TYPE_CHECKING` blocks included."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("llumlet", "llumsched", "vllm_llumnix")
PACKAGES = (*PRODUCT, "llumsim")
FORBIDDEN = {
    "llumlet/protocol": {"asyncio", "socket", "time", "datetime", "threading", "torch", "vllm", "zmq", "grpc", "google",
                         "llumsched", "vllm_llumnix", "llumlet.contract", "llumlet.process"},
    "llumlet/protocol/move": {"llumlet.protocol.origin", "llumlet.protocol.recovery"},
    "llumlet/protocol/origin": {"llumlet.protocol.move"},
    "llumlet/protocol/recovery": {"llumlet.protocol.move", "llumlet.protocol.origin"},
    "llumlet/process": {"grpc", "google", "llumlet.contract", "llumlet.protocol"},
    "vllm_llumnix/kv": {"llumlet", "llumsched", "vllm_llumnix.engine", "vllm_llumnix.frontend"},
    "vllm_llumnix/engine": {"llumsched", "vllm_llumnix.frontend"},
    # What a second engine could use: the engine is `EnginePort`, its request a protocol in `vllm_types`.
    "vllm_llumnix/engine/moves": {"vllm", "torch", "vllm_llumnix.engine.loop", "vllm_llumnix.engine.load",
                                  "vllm_llumnix.engine.queue", "vllm_llumnix.engine.blocks.scheduler_port",
                                  "vllm_llumnix.engine.blocks.reservations"},
    "vllm_llumnix/frontend": {"llumsched", "vllm_llumnix.engine", "vllm_llumnix.kv"},
    "vllm_llumnix/patching": {"vllm", "torch", "msgspec", "vllm_llumnix.engine", "vllm_llumnix.frontend"},
    "llumlet": {"vllm", "torch", "vllm_llumnix", "llumsched", "llumsim"},
    "llumsched": {"vllm", "torch", "vllm_llumnix", "llumsim"},
    "vllm_llumnix": {"llumsched", "llumsim"},
    "llumsim": {"vllm", "torch", "vllm_llumnix"},
    "llumsim/engine": {"llumsim.moves", "llumsim.cluster", "llumsim.live"},
    "llumsim/moves": {"llumsim.cluster", "llumsim.live"},
    "llumsim/live": {"llumsim.cluster"},
    "llumsim/cluster": {"llumsim.live"},
}  # fmt: skip

WITHIN_LLUMSCHED = {
    "causes": set(),
    "endpoints": set(),
    "extensions": set(),
    "http_form": set(),
    "request": set(),
    "contract": {"causes", "request"},
    "latency": set(),
    "model_memory": set(),
    "cluster": {"extensions", "latency", "request"},
    "cms": {"cluster"},
    "policy": {"cluster", "extensions", "request"},
    "prefix": {"cluster", "request"},
    "foresight": {"cluster", "latency"},
    "dispatch": {"causes", "cluster", "foresight", "latency", "model_memory", "policy", "prefix", "request"},
    "rescheduling": {"cluster", "cms", "extensions", "foresight", "http_form", "policy", "prefix"},
    "scaling": {"cluster", "policy"},
    "summary": {"cluster"},
    "scheduler_access": {"endpoints"},
    "scheduler": {"cluster", "cms", "contract", "dispatch", "endpoints", "foresight", "http_form", "latency", "policy",
                  "prefix", "rescheduling", "scaling", "scheduler_access", "summary"},
    "gateway": {"causes", "contract", "descriptors", "endpoints", "model_memory", "request"},
}  # fmt: skip
"""What of llumsched each of these may import; who else is there starts, shows or plays them."""


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


@pytest.mark.parametrize("package", WITHIN_LLUMSCHED)
def test_the_scheduler_side_has_layers(package: str) -> None:
    wrong = {
        f"{module} imports {name}"
        for module, names in product_imports().items()
        if module.split(".")[:2] == ["llumsched", package]
        for name in names
        if name.startswith("llumsched.") and name.split(".")[1] not in WITHIN_LLUMSCHED[package] | {package}
    }
    assert not wrong


@pytest.mark.parametrize("module", ["hooks", "switch"])
def test_hooks_import_the_standard_library_only(module: str) -> None:
    tree = ast.parse((ROOT / f"vllm_llumnix/{module}.py").read_text())
    top = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
           for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert top <= {"__future__", "os", "sys", "typing", "vllm_llumnix.switch"}


@functools.cache
def product_imports() -> dict[str, set[str]]:
    """Every module of the product, and the modules of the product that it imports, wherever in the file. A package is
    its `__init__`: who imports a module of it depends on that one alone."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    found = {}
    for module, path in modules.items():
        names = imports(path)
        # `from package import module` names both; of a module, `from module import name` only the module exists.
        within = {name for name in names if any(other.startswith(f"{name}.") for other in names & modules.keys())}
        found[module] = (names & modules.keys()) - within - {module}
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules each of which is reached from every other: Tarjan's strongly connected components."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = path.index(module)
            circle, path[at:] = frozenset(path[at:]), []
            if len(circle) > 1:
                found.add(circle)

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = product_imports()
    assert len(graph) > 200
    found = ["; ".join(sorted(circle)) for circle in circles(graph)]
    assert not found, f"circles of imports: {found}"


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == {frozenset("abc")}
    assert not circles(graph | {"c": {"d"}})


TWICE = {"llumlet": (2, 2), "llumsched": (0, 0), "vllm_llumnix": (0, 0)}
"""Names of classes, and of modules, that a package still defines more than once. These numbers may only shrink."""


@pytest.mark.parametrize("package", PRODUCT)
def test_names_are_unique_in_a_package(package: str) -> None:
    classes: defaultdict[str, set[str]] = defaultdict(set)
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" in path.name:
            continue
        where = str(path.relative_to(ROOT))
        modules[path.parent.name if path.name == "__init__.py" else path.stem].add(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(f"{where}:{node.lineno}")
    twice = [{name: places for name, places in sorted(of.items()) if len(places) > 1} for of in (classes, modules)]
    assert all(len(found) <= most for found, most in zip(twice, TWICE[package], strict=True)), twice


def test_nothing_is_printed_as_markup() -> None:
    """Rich would take `[mooncake]` in somebody's words for a style, and leave it out."""
    found = set[str]()
    for path in sorted(path for top in (*PACKAGES, "benchmarks") for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Console", "TextColumn"):
                plain = any(word.arg == "markup" and ast.unparse(word.value) == "False" for word in node.keywords)
                found |= set() if plain else {f"{path.relative_to(ROOT)}:{node.lineno}"}
    assert not found
