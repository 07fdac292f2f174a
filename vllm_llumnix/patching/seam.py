# SPDX-License-Identifier: Apache-2.0
"""Tables of attributes of vLLM's objects that are wrapped or set at run time: `vllm_llumnix.seams` has one per process.

`Seams.wrap` puts a wrapped method in place; one that vLLM does not have any more is an error with its name. Values are
set by plain assignments; `tests/engine/test_seam_tables.py` looks for those that no table has.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_llumnix.errors import PatchError


class SeamKind(StrEnum):
    """Change of the attribute. ADDED: vLLM has none of this name."""

    WRAPPED = "wrapped"
    REPLACED = "replaced"
    SET = "set"
    ADDED = "added"


@dataclass(frozen=True, slots=True)
class Seam:
    """An attribute of vLLM. `owner` is the class in `path` that defines it; `process` is api, core or worker."""

    path: str
    owner: str
    attribute: str
    kind: SeamKind
    why: str
    process: str
    remove_when: str
    test: str

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.attribute}"


class Seams:
    """A table, by name."""

    def __init__(self, *rows: Seam) -> None:
        self._rows = {row.name: row for row in rows}
        if len(self._rows) != len(rows):
            raise ValueError("a seam is in the table twice")

    def __iter__(self) -> Iterator[Seam]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def wrap(self, target: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Put `replacement` in the place of a method of `target`. `name` is the row's, `Owner.attribute`.

        Raises PatchError if `target` has no such attribute, KeyError if the table has no such row.
        """
        row = self._rows[name]
        if row.kind is not SeamKind.ADDED and not hasattr(target, row.attribute):
            raise PatchError(_complaint([row]))
        setattr(target, row.attribute, replacement)

    def require(self, objects: Mapping[str, Any]) -> None:
        """Raises PatchError naming every attribute that `objects`, by owner, do not have. Those of other owners, and of
        None, are not looked at.
        """
        missing = [
            row
            for row in self
            if row.kind is not SeamKind.ADDED
            and (target := objects.get(row.owner)) is not None
            and not hasattr(target, row.attribute)
        ]
        if missing:
            raise PatchError(_complaint(missing))


def _complaint(missing: list[Seam]) -> str:
    names = "; ".join(f"{row.name} ({row.why})" for row in missing)
    return (
        f"this vLLM does not have what the llumlet wraps or sets: {names}: install a vLLM against which "
        "`vllm-llumnix patch check` finds nothing, or follow docs/extend/upgrading.md"
    )


def absent(rows: Iterable[Seam], read: Callable[[str], bytes | str]) -> list[Seam]:
    """The rows whose attribute is not in the source of its class. `read` gives a file's content, or nothing.

    Without importing vLLM: methods, attributes of the class, and what its methods set on `self`.
    """
    found: dict[str, dict[str, set[str]]] = {}
    missing = []
    for row in rows:
        if row.path not in found:
            found[row.path] = _attributes(read(row.path))
        if row.kind is not SeamKind.ADDED and row.attribute not in found[row.path].get(row.owner, set()):
            missing.append(row)
    return missing


def _attributes(data: bytes | str) -> dict[str, set[str]]:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return {}
    return {node.name: set(_names(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _names(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
