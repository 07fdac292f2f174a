# SPDX-License-Identifier: Apache-2.0
"""The parts of the check that need no engine, and nothing of vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch

from benchmarks.gpu_check import device, ipc, pulls
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.verdicts import Part
from tests.support.progress import Say
from vllm_llumnix.kv.kernels import Backend

Check = Callable[[], Part]


def parts(stand_in: bool) -> dict[str, tuple[Check, str | None]]:
    """Each of them with the reason why it cannot run here, if there is one. The kernels come first, as engines copy
    with them."""
    no_gpu = None if torch.cuda.is_available() else "torch sees no GPU"
    where = torch.device("cpu") if stand_in else torch.device("cuda", 0)
    compiled: tuple[Backend, ...] = ("cpp",) if stand_in else ("cuda", "triton")
    any_device = None if stand_in else no_gpu
    return {
        "self_test": (partial(device.self_test, where, compiled), any_device),
        "kernels": (partial(device.check_kernels, where, (*compiled, "torch")), any_device),
        "ipc": (ipc.check_ipc, no_gpu),
        "ipc_killed_source": (ipc.check_killed_source, no_gpu),
        **{f"pull_{name}": (partial(pulls.check_pull, where, name), any_device) for name in pulls.TRANSPORTS},
        "seals": (partial(device.check_seals, where), any_device),
    }


def chosen(stand_in: bool, named: Sequence[str] | None) -> dict[str, tuple[Check, str | None]]:
    """Raises ValueError for a name that no part has."""
    there = parts(stand_in)
    if unknown := [name for name in named or () if name not in there]:
        raise ValueError(f"no part is called {', '.join(unknown)}; there are: {', '.join(there)}")
    return there if named is None else {name: there[name] for name in named}


def run_parts(checks: dict[str, tuple[Check, str | None]], say: Say, budget: Budget) -> Generator[Part]:
    """The row of each, as soon as it is known."""
    for name, (check, obstacle) in checks.items():
        say(name)
        began = time.monotonic()
        left = not budget.left
        found = carried_out(check, "no time is left" if left else obstacle)
        yield {"part": name, **found, "left": left, "seconds": round(time.monotonic() - began, 1)}


def carried_out(check: Check, obstacle: str | None) -> Part:
    """The part, or why it did not come to an end."""
    if obstacle is not None:
        return {"verdict": "unrun", "why": obstacle}
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a report about what does not work
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {error}"}
