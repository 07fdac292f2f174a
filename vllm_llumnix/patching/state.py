# SPDX-License-Identifier: Apache-2.0
"""State of this process: does it run the patched vLLM?"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from vllm_llumnix.patching import importer
from vllm_llumnix.patching.contract import Kept
from vllm_llumnix.patching.installed import Installed, installed
from vllm_llumnix.patching.loader import MARK
from vllm_llumnix.patching.series import module_name


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
    """Patches of this process, and problems with them. Imports nothing of vLLM."""
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
        or _kept().problem
    )
    digest = None if problem else found.digest
    return PatchState(found.version, digest, frozenset(applied), problem, _remarks(found))


@functools.cache
def _kept() -> Kept:
    """Compares this process's vLLM, which a series fits, with its contract, once."""
    return installed().kept()


def _remarks(found: Installed) -> tuple[str, ...]:
    if found.problem is not None or found.series is None:
        return ()
    remarks = []
    if found.adapted:
        files = ", ".join(sorted(found.adapted))
        remarks.append(f"patched, adapted: in vLLM {found.version} not as released in {found.series.version}: {files}")
    remarks += [f"{one} from vLLM {found.series.version}, on which the llumlet relies" for one in _kept().differences]
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
