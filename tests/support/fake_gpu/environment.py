# SPDX-License-Identifier: Apache-2.0
"""A Python with torch and vLLM for CUDA on a machine without a GPU, and the fake CUDA that they run over.

    environment = make()
    subprocess.run([environment.python, …], env=os.environ | environment.variables, cwd=environment.root)

Made once, in the cache of this project: some 6 GB from the package index, as `make test-next` has its vLLM from there.
torch is 2.11.0, with CUDA 13.0, which is what the fake was written for: not the one that this vLLM asks for. All other
packages are those of requirements/cpu.txt. `root` is a copy of this tree's Python files with `_cuda.so`, the body of
the copy kernel behind its entry on the host; so KV blocks are copied rightly, and nothing else is computed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.model import cache_root

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
TORCH, VISION, VLLM = "2.11.0", "0.26.0", "0.32.0"
HEADERS = ("nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*")
"""Of CUDA's toolkit, to compile the fake and whatever vLLM compiles at its start."""
COPIED = ("benchmarks", "llumlet", "llumsched", "patches", "tests", "vllm_llumnix")
FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++17", "-fvisibility=hidden")


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    python: Path
    root: Path
    variables: dict[str, str]


def make(directory: Path) -> Environment:
    """An environment whose copy of this tree and fake libraries are in `directory`. Raises CalledProcessError."""
    packages = _packages()
    python = packages / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(packages)}))
    toolkit = site / "nvidia" / "cu13"
    root, libraries = directory / "root", directory / "lib"
    libraries.mkdir(parents=True)
    _compile(libraries, toolkit, site)
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    kernels = root / "vllm_llumnix" / "kv" / "kernels"
    _run("g++", *FLAGS, "-O2", "-o", kernels / "_cuda.so", HERE / "block_copy.cpp")
    shutil.copy(HERE / "sitecustomize.py", root)
    variables = {
        "PYTHONPATH": str(root),
        "CUDA_HOME": str(toolkit),
        "LD_PRELOAD": str(libraries / "libfake_runtime.so"),
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
    }
    return Environment(python, root, variables)


def _packages() -> Path:
    """The environment in the cache. A second process waits until the first has made it."""
    packages = cache_root() / f"fake-gpu-torch-{TORCH}-vllm-{VLLM}"
    packages.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{packages}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (packages / "ready").exists():
            shutil.rmtree(packages, ignore_errors=True)
            _install(packages)
            (packages / "ready").touch()
    return packages


def _install(directory: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", directory)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--python",
        directory / "bin" / "python",
    )
    _run(*pip, "install", f"torch=={TORCH}", f"torchvision=={VISION}", *HEADERS)
    wanted = directory / "requirements.txt"
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines(keepends=True)
    wanted.write_text("".join(line for line in lines if not line.startswith(("torch==", "triton=="))))
    _run(*pip, "install", "--no-deps", "-r", wanted, f"vllm=={VLLM}")


def _compile(libraries: Path, toolkit: Path, site: Path) -> None:
    """cuBLAS is as many functions as torch asks for by name."""
    torch = sorted((site / "torch" / "lib").glob("libtorch_cuda*.so"))
    asked = subprocess.run(["nm", "-D", "--undefined-only", *torch], check=True, capture_output=True, text=True).stdout
    source = libraries / "cublas.c"
    made = subprocess.run([sys.executable, HERE / "cublas.py"], check=True, input=asked, capture_output=True, text=True)
    source.write_text(made.stdout)
    _run("gcc", "-O1", "-w", "-fPIC", "-c", "-o", libraries / "cublas.o", source)
    runtime = ("-o", libraries / "libfake_runtime.so", HERE / "runtime.cpp", libraries / "cublas.o", "-ldl")
    _run("g++", *FLAGS, f"-I{toolkit / 'include'}", *runtime)
    driver = ("-Wl,-soname,libcuda.so.1", "-o", libraries / "libcuda.so.1", HERE / "driver.cpp", "-ldl")
    _run("g++", *FLAGS, *driver)
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
    nvml = ("-Wl,-soname,libnvidia-ml.so.1", "-o", libraries / "libnvidia-ml.so.1", HERE / "nvml.c")
    _run("gcc", "-O1", "-fPIC", "-shared", *nvml)


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)
