# SPDX-License-Identifier: Apache-2.0
"""Whether this process runs the patched vLLM."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract, importer
from vllm_llumnix.patching.contract import Difference
from vllm_llumnix.patching.installed import Installed, installed
from vllm_llumnix.patching.loader import MARK
from vllm_llumnix.patching.series import directory_of, module_name


@dataclass(frozen=True, slots=True)
class PatchState:
    """`applied` names the patched modules imported so far. `problem`, if any, tells what to do; there is a `digest`
    exactly when there is no problem. `remarks` is what somebody should know nevertheless.
    """

    version: str | None
    digest: str | None
    applied: frozenset[str]
    problem: str | None
    remarks: tuple[str, ...] = ()


def current() -> PatchState:
    """The state of this process now."""
    found = installed()
    if found.series is None:
        return PatchState(found.version, None, frozenset(), found.problem)
    imported = {name: sys.modules[name] for name in map(module_name, found.series.files) if name in sys.modules}
    applied = {name for name, module in imported.items() if getattr(module, MARK, None) == found.digest}
    if found.on_disk:
        applied |= imported.keys()
    finder = importer.finder()
    problem = (
        found.problem
        or (finder and finder.problem)
        or _not_patched(found, finder is not None, imported.keys() - applied)
        or held().problem
    )
    digest = None if problem else found.digest
    return PatchState(found.version, digest, frozenset(applied), problem, _remarks(found))


@dataclass(frozen=True, slots=True)
class Held:
    """How the installed vLLM keeps the contract of its series."""

    differences: tuple[Difference, ...]
    problem: str | None


def holds(found: Installed) -> Held:
    """Compare; `found` has a series and no problem."""
    assert found.series is not None
    assert found.root is not None
    try:
        signed = contract.load(directory_of(found.series.version))
        differences = contract.compare(signed, found.root, found.series.files)
    except PatchError as error:
        return Held((), str(error))
    return Held(tuple(differences), contract.refusal(differences, signed))


@functools.cache
def held() -> Held:
    """Of this process's vLLM, compared once."""
    return holds(installed())


def _remarks(found: Installed) -> tuple[str, ...]:
    if found.problem is not None or found.series is None:
        return ()
    remarks = []
    if found.adapted:
        files = ", ".join(sorted(found.adapted))
        remarks.append(f"patched, adapted: in vLLM {found.version} not as released in {found.series.version}: {files}")
    remarks += [f"{one} from vLLM {found.series.version}, on which the llumlet relies" for one in held().differences]
    return tuple(remarks)


def _not_patched(found: Installed, hook_active: bool, stock: set[str]) -> str | None:
    if stock:
        return (
            f"vLLM {found.version} is only partly patched in this process: {', '.join(sorted(stock))} came in as "
            "released; restart Python, and see `vllm-llumnix doctor` if that does not help"
        )
    if not found.on_disk and not hook_active:
        return (
            "the import hook of vllm-llumnix is not active (Python ran without site, or vllm-llumnix.pth is missing): "
            "reinstall vllm-llumnix, or patch the files with `vllm-llumnix patch apply`"
        )
    return None
