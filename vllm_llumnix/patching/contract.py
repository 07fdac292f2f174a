# SPDX-License-Identifier: Apache-2.0
"""The functions of one vLLM release that the engine side counts on, by what they do and not by how they are written.

`CONTRACT` beside a series holds

    vllm <version>
    <sha256>  <path>                       for each file with such functions, as released
    <hash> warns|refuses  <name>           for each of these functions in it

The hash of a function is that of its syntax tree: comments, docstrings and line breaks do not count. A file with the
released sha256 is not even parsed: the usual start costs the reading of the files.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.release import Release
from vllm_llumnix.patching.relied_on import RELIED_ON, Reliance
from vllm_llumnix.patching.series import Base, Series, directory_of, listed, sha256

FILE = "CONTRACT"
_FILE_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_FUNCTION_LINE = re.compile(r"([0-9a-f]{16}) (warns|refuses) +(\S+)")


@dataclass(frozen=True, slots=True)
class Function:
    """A function, method or class. `digest` is the hash of its syntax tree."""

    path: str
    name: str
    digest: str
    refuses: bool


@dataclass(frozen=True, slots=True)
class Contract:
    """`files` are the sha256 of the released files."""

    version: str
    files: dict[str, str]
    functions: tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A function that is not what it was in the release that the series is made for."""

    path: str
    name: str
    refuses: bool
    gone: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.path}) {'is gone' if self.gone else 'differs'}"


def load(directory: Path) -> Contract:
    """The contract of the series in `directory`. Raises PatchError if it is faulty."""
    try:
        return _parse((directory / FILE).read_text())
    except (OSError, ValueError) as error:
        raise PatchError(f"{directory / FILE} is damaged ({error}): reinstall vllm-llumnix") from error


def _parse(text: str) -> Contract:
    first, *rest = listed(text)
    files: dict[str, str] = {}
    functions: list[Function] = []
    path = ""
    for line in rest:
        if match := _FILE_LINE.fullmatch(line):
            path = match[2]
            files[path] = match[1]
        elif (match := _FUNCTION_LINE.fullmatch(line)) and path:
            functions.append(Function(path, match[3], match[1], match[2] == "refuses"))
        else:
            raise ValueError(f"neither a file nor a function: {line!r}")
    return Contract(first.removeprefix("vllm "), files, tuple(functions))


def compare(contract: Contract, root: Path, bases: Mapping[str, Base]) -> list[Difference]:
    """Differences in the files below `root`, the directory of the package. `bases`: files that may be patched there.

    Those that refuse come first.
    """
    found: list[Difference] = []
    for path, released in contract.files.items():
        try:
            data = (root / path).read_bytes()
        except FileNotFoundError:
            data = b""
        digest = sha256(data)
        if digest == released or (path in bases and digest == bases[path].after):
            continue
        theirs = digests(data)
        for function in contract.functions:
            if function.path == path and theirs.get(function.name) != function.digest:
                found.append(Difference(path, function.name, function.refuses, function.name not in theirs))
    return sorted(found, key=lambda difference: not (difference.refuses or difference.gone))


def refusal(differences: list[Difference], contract: Contract) -> str | None:
    """Why a vLLM with these differences is not to be used; None if a warning is enough. A function that is gone would
    be missed in the middle of a move, whichever it is.
    """
    grave = [str(one) for one in differences if one.refuses or one.gone]
    if not grave:
        return None
    return (
        f"vllm-llumnix relies on what these functions do in vLLM {contract.version}: {'; '.join(grave)}: install vLLM "
        f"{contract.version} as released, or read what has changed and take it into the contract: "
        "docs/extend/upgrading.md"
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """Result of comparing files with a contract: differences, and reasons not to use the files."""

    differences: tuple[Difference, ...]
    problem: str | None


def kept(series: Series, root: Path) -> Kept:
    """Compares the files below `root`, the directory of the package, with the contract of `series`."""
    try:
        signed = load(directory_of(series.version))
        differences = compare(signed, root, series.files)
    except PatchError as error:
        return Kept((), str(error))
    return Kept(tuple(differences), refusal(differences, signed))


def of(release: Release, version: str = "") -> str:
    """The text of the contract that a release keeps; `version` if it goes by another than the release's own.

    Raises PatchError naming what is not in it.
    """
    lines, gone = [f"vllm {version or release.version.partition('+')[0]}"], []
    for path in sorted({row.path for row in RELIED_ON}):
        text = release.text(path)
        lines.append(f"{sha256(text)}  {path}")
        here = digests(text.encode())
        for row in sorted(_rows_of(path), key=lambda row: row.name):
            if row.name in here:
                lines.append(f"{here[row.name]} {'refuses' if row.refuses else 'warns  '}  {row.name}")
            else:
                gone.append(f"{row.name} ({path}, used by {row.used_by})")
    if gone:
        raise PatchError(f"vLLM {release.version} does not have what the engine side uses: {'; '.join(gone)}")
    return "\n".join(lines) + "\n"


def _rows_of(path: str) -> list[Reliance]:
    return [row for row in RELIED_ON if row.path == path]


def digests(data: bytes) -> dict[str, str]:
    """The hash of each top-level function and class, and of each method, by name. Nothing for what is not Python."""
    return {name: _digest(nodes) for name, nodes in definitions(data).items()}


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(data: bytes) -> dict[str, list[_Definition]]:
    """Several of one name: overloads, or the parts of a property."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[_Definition]] = {}
    for node in tree.body:
        if isinstance(node, _Definition):
            found.setdefault(node.name, []).append(node)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, _Definition):
                    found.setdefault(f"{node.name}.{inner.name}", []).append(inner)
    return found


def _digest(nodes: list[_Definition]) -> str:
    return hashlib.sha256("\n".join("".join(_canonical(node)) for node in nodes).encode()).hexdigest()[:16]


def _canonical(node: ast.AST) -> Iterator[str]:
    """The syntax tree as text, the same in each version of Python: fields that are empty are left out, as newer
    versions add some.
    """
    yield f"{type(node).__name__}("
    for field in node._fields:
        value: Any = getattr(node, field, None)
        if field == "body" and isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if value is None or value == [] or field in ("ctx", "kind", "type_comment"):
            continue
        yield f"{field}="
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _canonical(item)
            else:
                yield repr(item)
            yield ","
    yield ")"
