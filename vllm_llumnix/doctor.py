# SPDX-License-Identifier: Apache-2.0
"""The checks of `vllm-llumnix doctor`: what `--enable-llumlet` needs, found out without starting an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from llumlet.process.setting_sources import unknown_variables
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.kv.networks import mooncake as mooncake_engine
from vllm_llumnix.kv.networks import nixl_process
from vllm_llumnix.kv.networks.nixl import environment_of
from vllm_llumnix.patching.installed import Installed, examine, find_vllm
from vllm_llumnix.patching.release import reader_of
from vllm_llumnix.patching.seam import absent
from vllm_llumnix.seams import ALL

_MODULES = ("grpc", "grpc_health", "grpc_reflection", "google.protobuf", "msgspec", "numpy", "zmq", "torch")
_START_TIMEOUT_S = 60
_BUILD_TIMEOUT_S = 300


class Level(StrEnum):
    OK = "ok"
    OPTIONAL = "optional"
    """Something does not work that --enable-llumlet can do without."""
    PROBLEM = "problem"
    """--enable-llumlet would fail, or move nothing."""


@dataclass(frozen=True, slots=True)
class Check:
    """`problem` is empty, or says what to do. `is_optional`: there is another way without what does not work."""

    name: str
    result: str
    problem: str = ""
    is_optional: bool = False

    @property
    def level(self) -> Level:
        if not self.problem:
            return Level.OK
        return Level.OPTIONAL if self.is_optional else Level.PROBLEM


def examine_all(*, adapt: bool = False, flags: Sequence[str] = ()) -> list[Check]:
    """All checks, in the order in which their problems are best solved. `adapt`: for `--llumlet-adapt`. `flags`: of
    `vllm serve`, for a model that is to be looked at."""
    found = examine(find_vllm(), adapt=adapt)
    checks: tuple[Callable[[], Check], ...] = (
        python,
        modules,
        partial(vllm, found),
        partial(functions, found),
        seams,
        hook,
        variables,
        block_copy,
        local_transport,
        local_between_gpus,
        nixl,
        mooncake,
        *([partial(model, flags)] if flags else []),
    )
    return [check() for check in checks]


def model(flags: Sequence[str]) -> Check:
    """Forecast of how requests of a model would move: vLLM builds it in a process of its own, without weights. flags:
    of `vllm serve`, the model's among them."""
    name, command = "model", [sys.executable, "-m", "vllm_llumnix.engine.compatibility.foresight", *flags]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check(name, f"unknown: vLLM has not built it in {_BUILD_TIMEOUT_S} s")
    if child.returncode:
        said = [line for line in child.stderr.splitlines() if line.strip()]
        return Check(name, "vLLM cannot build it here", said[-1] if said else f"exit status {child.returncode}")
    foreseen = json.loads(child.stdout.splitlines()[-1])
    caches = "; ".join(f"{layers} layers keep {what}" for what, layers in foreseen["caches"].items()) or "no KV cache"
    where = f"{caches} ({foreseen['model_runner']} runner on {foreseen['device']}, pages {foreseen['layout']})"
    if foreseen["unsupported"]:
        return Check(name, f"requests stay where they are: {where}", foreseen["unsupported"])
    if foreseen["kv_unsupported"]:
        return Check(name, f"requests move with their tokens alone ({foreseen['kv_unsupported']}): {where}")
    return Check(name, f"requests move with their KV cache: {where}; single requests: docs/reference/portability.md")


def python() -> Check:
    return Check("Python", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def modules() -> Check:
    """Modules that are there, only looked for: importing torch alone takes seconds."""
    missing = [name for name in _MODULES if not _exists(name)]
    if missing:
        return Check("modules", f"missing: {', '.join(missing)}", "reinstall vllm-llumnix with its dependencies")
    return Check("modules", f"all {len(_MODULES)} found")


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def vllm(found: Installed) -> Check:
    if found.problem or found.series is None:
        return Check("vLLM", found.version or "not usable", found.problem or "")
    made_for = "" if found.version == found.series.version else f", made for {found.series.version}"
    how = f"; patched, adapted: {', '.join(sorted(found.adapted))}" if found.adapted else ""
    return Check("vLLM", f"{found.version}, patch series {found.digest}{made_for}{how}")


def functions(found: Installed) -> Check:
    """Checks that vLLM's functions that the engine side counts on are those of the series' release."""
    name = "vLLM's functions"
    if found.problem or found.series is None:
        return Check(name, "unknown: no patch series fits")
    kept = found.kept()
    if kept.differences or kept.problem:
        differing = "; ".join(map(str, kept.differences)) or "unknown"
        return Check(name, f"not as in {found.series.version}: {differing}", kept.problem or "")
    return Check(name, f"as in {found.series.version}")


def seams() -> Check:
    """Checks that vLLM has every attribute that is wrapped or set at run time; an engine looks again when it starts."""
    name, found = "vLLM's attributes", examine(find_vllm())
    if found.root is None:
        return Check(name, "unknown: there is no vLLM")
    missing = absent(ALL, reader_of(found.root))
    if missing:
        names = ", ".join(row.name for row in missing)
        return Check(
            name, f"missing: {names}", "install a vLLM that a patch series fits, or follow docs/extend/upgrading.md"
        )
    return Check(name, f"all {len(ALL)} that are wrapped or set are there (`vllm-llumnix patch seams`)")


def hook() -> Check:
    """Checks that a Python started as vLLM starts its engine and worker processes gets the patches."""
    if examine(find_vllm()).on_disk:
        return Check("import hook", "not needed: patched on disk")
    code = "import sys; sys.exit(not any(type(f).__name__ == 'PatchFinder' for f in sys.meta_path))"
    try:
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check("import hook", "unknown", f"{sys.executable} does not start within {_START_TIMEOUT_S} s")
    if child.returncode:
        return Check(
            "import hook",
            "not active in child processes",
            "reinstall vllm-llumnix: vllm-llumnix.pth is missing from site-packages, or Python runs without `site`",
        )
    return Check("import hook", "active in child processes")


def variables() -> Check:
    if unknown := unknown_variables("llumlet", (LlumletConfig,), os.environ):
        return Check("variables", f"unknown: {', '.join(unknown)}", "unset them; docs/reference/settings.md has all")
    return Check("variables", "no unknown LLUMNIX_ variable")


def local_transport() -> Check:
    """Checks that a process may read the memory of another one that has given permission, as engines on one host do."""
    name = "transport 'local'"
    obstacle = _read_sibling()
    if obstacle is None:
        return Check(name, "processes can read each other's memory")
    remedy = "allow process_vm_readv: see kernel.yama.ptrace_scope and seccomp; until then moves on this host use tcp"
    return Check(name, f"not available ({obstacle})", remedy, is_optional=True)


def block_copy() -> Check:
    """Finds the backend that would copy KV blocks here: the backends are tried, in a process of their own, as workers
    do."""
    name = "block copy"
    try:
        child = subprocess.run([sys.executable, "-c", _COPY], capture_output=True, text=True, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check(name, f"unknown: the trial took more than {_START_TIMEOUT_S} s")
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return Check(name, f"unknown: {last}")
    device, backend, *passed_over = child.stdout.splitlines()
    reasons = f" (not by {'; '.join(passed_over)})" if passed_over else ""
    return Check(name, f"by {backend} on {device}{reasons}")


def local_between_gpus() -> Check:
    """Checks that an engine that is started here can map the memory of GPUs that other engines run on."""
    name = "'local' between GPUs"
    there, visible = _gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there:
        return Check(name, "no GPU")
    seen = len(there) if visible is None else len([part for part in visible.split(",") if part.strip()])
    if seen < len(there):
        return Check(
            name,
            f"only among {seen} of {len(there)} GPUs (CUDA_VISIBLE_DEVICES={visible}): to others, moves use tcp; "
            "let each engine see all, its own first (docs/operate/transports.md)",
        )
    return Check(name, f"all {seen} GPUs of this host are seen")


def _gpus() -> list[str]:
    """GPUs that the driver shows, of which a container may see fewer."""
    try:
        return os.listdir("/proc/driver/nvidia/gpus")
    except OSError:
        return []


def nixl() -> Check:
    """Checks that an agent comes up, in a process of its own as beside workers, over any network device."""
    name = "transport 'nixl'"
    if (problem := nixl_process.why_not_installed()) is not None:
        return Check(name, problem.replace("not installed", "not installed (optional)"))
    try:
        child = subprocess.run(
            [sys.executable, "-c", _NIXL], env=environment_of("all"),
            capture_output=True, text=True, timeout=_START_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(name, "broken", f"NIXL has not started within {_START_TIMEOUT_S} s", is_optional=True)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"it ends with status {child.returncode}"])[-1]
        return Check(name, "broken", f"NIXL does not start: {last}", is_optional=True)
    return Check(name, "NIXL starts; it is used over the devices of --llumlet-nixl-devices")


def mooncake() -> Check:
    """The other transport that is optional."""
    name = "transport 'mooncake'"
    if not _exists("mooncake"):
        return Check(name, "not installed (optional): pip install vllm-llumnix[mooncake]")
    problem = mooncake_engine.why_not_installed()
    return Check(name, "Mooncake can be loaded" if problem is None else "broken", problem or "", is_optional=True)


def _read_sibling() -> str | None:
    """Start a process, let another one read from it, and return what stood against that."""
    target = subprocess.Popen([sys.executable, "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        reader = subprocess.run(
            [sys.executable, "-c", _READER, str(target.pid), address],
            capture_output=True, text=True, timeout=_START_TIMEOUT_S,
        )  # fmt: skip
    finally:
        target.communicate()
    if reader.returncode == 0:
        return None
    return (reader.stdout.strip() or reader.stderr.strip()).splitlines()[-1]


_NIXL = """
import os
from vllm_llumnix.kv.networks.nixl_process import Agent
Agent("llumnix-doctor")
os._exit(0)
"""
_COPY = """
import torch
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.memory.layout import BlockLayout, TensorRegion
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
layout = BlockLayout(0, 4 * 65536, 2, (TensorRegion(0, 2, 2 * 65536, 65536, 65536),), "LBHNC")
choice = kernels.settle(layout, device)
print(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", choice.backend, *choice.passed_over, sep="\\n")
"""
_TARGET = """
import ctypes, sys
from vllm_llumnix.kv.mover.process import allow_readers
allow_readers()
page = ctypes.create_string_buffer(b"llumnix")
print(ctypes.addressof(page), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
pid, address = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(7)
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here, there = iovec(ctypes.addressof(buffer), 7), iovec(address, 7)
count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
if count != 7 or buffer.raw != b"llumnix":
    sys.exit(print(os.strerror(ctypes.get_errno())) or 1)
"""
