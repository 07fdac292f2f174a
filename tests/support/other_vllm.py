# SPDX-License-Identifier: Apache-2.0
"""Another version of vLLM for the tests: its Python files over the compiled CPU kernels of the installed one.

    python -m tests.support.other_vllm 0.33.0 DIRECTORY
    PYTHONPATH=DIRECTORY python -m pytest tests/engine

Not every version has a CPU build, and what a version changes is mostly Python. Kernels that do not fit would show in
the first step of an engine. Downloads the version's wheel, some 300 MB, of which the Python files are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import vllm

NEW_DEPENDENCIES = {"0.33.0": ("orjson",)}
"""What a version imports on a CPU that the installed one does not need."""


def build(version: str, directory: Path) -> None:
    """Fill `directory`. Raises CalledProcessError if pip does not find the version."""
    with tempfile.TemporaryDirectory() as downloads:
        _pip("download", "--only-binary", ":all:", "--dest", downloads, f"vllm=={version}")
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory, [name for name in archive.namelist() if not name.endswith(".so")])
    for kernels in Path(vllm.__file__).parent.glob("*.so"):
        shutil.copy(kernels, directory / "vllm")
    # vLLM knows by its version that it is built for CPUs.
    information = directory / f"vllm-{version}.dist-info"
    metadata = information / "METADATA"
    text = metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    metadata.write_text(text)
    information.rename(directory / f"vllm-{version}+cpu.dist-info")
    missing = [name for name in NEW_DEPENDENCIES.get(version, ()) if importlib.util.find_spec(name) is None]
    if missing:
        _pip("install", "--target", str(directory), *missing)


def _pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, "--no-deps"], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.other_vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version")
    parser.add_argument("directory", type=Path, help="is made")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True)
    build(arguments.version, arguments.directory)


if __name__ == "__main__":
    main()
