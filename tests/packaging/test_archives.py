# SPDX-License-Identifier: Apache-2.0
"""What the wheels and the source distribution hold and declare."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.packaging.environment import ROOT, build, run

HOOK = "vllm-llumnix.pth"
COMPILER = any(map(shutil.which, ["c++", "g++", "clang++"]))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
SERIES = "vllm_llumnix/patching/series_data/"


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def requirements(wheel: Path) -> dict[str, Requirement]:
    files = wheel_files(wheel)
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    found = map(Requirement, message_from_bytes(files[name]).get_all("Requires-Dist", []))
    return {requirement.name: requirement for requirement in found}


def scripts(wheel: Path) -> str:
    files = wheel_files(wheel)
    (name,) = (name for name in files if name.endswith(".dist-info/entry_points.txt"))
    return files[name].decode()


@pytest.mark.parametrize("target", [pytest.param("cuda", marks=pytest.mark.rest), "cpu"])
def test_a_wheel_has_the_hook_and_the_whole_series(wheels: dict[str, Path], target: str) -> None:
    files = wheel_files(wheels[target])
    assert files[HOOK] == (ROOT / HOOK).read_bytes()
    series = {name.removeprefix(SERIES): data for name, data in files.items() if name.startswith(SERIES)}
    checkout = [path for path in (ROOT / "patches").rglob("*") if path.is_file()]
    assert series == {str(path.relative_to(ROOT / "patches")): path.read_bytes() for path in checkout}
    assert "v0.32.0/series" in series


@pytest.mark.rest
def test_a_wheel_has_every_module_and_no_test(wheels: dict[str, Path]) -> None:
    files = wheel_files(wheels["cpu"])
    for package in ("llumlet", "llumsched", "vllm_llumnix"):
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert modules <= files.keys()
    assert {
        "llumlet/contract/proto/llumlet.proto",
        "llumlet/contract/proto/llumlet_pb2.pyi",
        "llumlet/py.typed",
    } <= files.keys()
    tops = {name.split("/")[0] for name in files if ".dist-info/" not in name}
    assert tops == {"llumlet", "llumsched", "vllm_llumnix", HOOK}


@pytest.mark.rest
def test_cuda_is_the_default_and_needs_a_vllm_with_a_series(wheels: dict[str, Path]) -> None:
    assert requirements(wheels["cuda"])["vllm"].specifier == SpecifierSet(">=0.32.0,<0.34")
    assert requirements(wheels[""]) == requirements(wheels["cuda"])


def test_the_cpu_target_leaves_vllm_and_torch_to_the_requirements_file(wheels: dict[str, Path]) -> None:
    declared = requirements(wheels["cpu"]).keys()
    assert not {name for name in declared if "vllm" in name or "torch" in name}
    assert {"grpcio", "msgspec", "pyzmq"} <= declared


def test_the_empty_target_is_the_scheduler_side_alone(wheels: dict[str, Path]) -> None:
    wheel = wheels["empty"]
    declared = requirements(wheel).keys()
    assert {"grpcio", "protobuf", "rich"} <= declared
    assert not {name for name in declared if "vllm" in name or "torch" in name}
    tops = {name.split("/")[0] for name in wheel_files(wheel) if ".dist-info/" not in name}
    assert tops == {"llumlet", "llumsched"}
    assert "llumsched/policy/policies/load-balance.yaml" in wheel_files(wheel)
    assert "llumnix = " in scripts(wheel)
    assert "vllm-llumnix = " not in scripts(wheel)


@pytest.mark.rest
def test_both_commands_come_with_the_engine_side(wheels: dict[str, Path]) -> None:
    for target in ("cuda", "cpu"):
        assert "llumnix = llumsched.cli:main" in scripts(wheels[target]).splitlines()
        assert "vllm-llumnix = vllm_llumnix.cli:main" in scripts(wheels[target]).splitlines()


@needs_compiler
@pytest.mark.rest
def test_an_engines_wheel_has_the_kernels_and_serves_every_python(wheels: dict[str, Path]) -> None:
    expected = {"cuda": {"_cpu.so", "_cuda.so"} if NVCC else {"_cpu.so"}, "cpu": {"_cpu.so"}, "empty": set()}
    for target, libraries in expected.items():
        assert {Path(name).name for name in wheel_files(wheels[target]) if name.endswith(".so")} == libraries
        assert "-py3-none-" in wheels[target].name
        assert wheels[target].name.endswith("-any.whl") == (not libraries)


@pytest.mark.rest
def test_a_missing_compiler_is_told_and_costs_the_kernels_alone(
    source: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "out", source)
    out = run(*command, cwd=tmp_path, VLLM_TARGET_DEVICE="cuda", PATH="", CXX="", CUDA_HOME="")
    told = [line for line in out.splitlines() if "kernels._cpu" in line and "failed: no C++ compiler was found" in line]
    assert len(told) == 1
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert wheel_files(wheel).keys() == {name for name in wheel_files(wheels["cuda"]) if not name.endswith(".so")}


@pytest.mark.rest
def test_an_unknown_target_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="VLLM_TARGET_DEVICE=tpu: one of cuda, cpu, empty is expected"):
        build(source, "wheel", tmp_path / "out", "tpu")


@pytest.mark.rest
def test_a_wheel_made_from_the_source_distribution_is_the_same(
    sdist: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in (
        "LICENSE",
        "Makefile",
        "requirements/cpu.txt",
        "tests/conftest.py",
        "patches/v0.32.0/BASE",
        "csrc/block_pages.h",
    ):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    wheel = build(unpacked, "wheel", tmp_path / "wheel", "cpu")
    ours, theirs = wheel_files(wheels["cpu"]), wheel_files(wheel)
    assert theirs.keys() == ours.keys()
    assert {name for name in ours if theirs[name] != ours[name] and not name.endswith("/RECORD")} == set()


def test_make_lists_its_verbs() -> None:
    listed = {line.split()[1] for line in run("make", "help", cwd=ROOT).splitlines()}
    tests = {"test", "test-rest", "test-full", "test-next", "simulate", "lint"}
    assert listed == tests | {"demo", "docs", "proto", "install", "clean", "help"}
