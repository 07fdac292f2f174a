# SPDX-License-Identifier: Apache-2.0
"""The pinned requirements against what the distributions declare."""

from __future__ import annotations

import re
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.environment import ROOT

FILES = ("cpu.txt", "vllm-cpu.txt", "test.txt", "lint.txt")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def read(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def pin(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    return specifier.version


@pytest.mark.parametrize("name", FILES)
def test_everything_is_pinned(name: str) -> None:
    for requirement in read(name).values():
        if requirement.marker is None:
            assert [specifier.operator for specifier in requirement.specifier] == ["=="], str(requirement)


def test_no_package_is_pinned_twice() -> None:
    names = [name for file in FILES for name in read(file)]
    assert sorted(names) == sorted(set(names))


def test_the_pins_satisfy_vllm_cpu_but_for_three() -> None:
    pins = read("cpu.txt")
    missing = set()
    for declared in map(Requirement, requires("vllm-cpu") or []):
        if declared.marker is not None and not declared.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(declared.name)
        if name == "torch":  # "2.13.0" is what pip is asked for; the build it finds is "2.13.0+cpu"
            assert declared.specifier.contains(f"{pin(pins[name])}+cpu")
        elif name not in pins:
            missing.add(name)
        else:
            assert declared.specifier.contains(pin(pins[name])), str(declared)
    assert missing == LEFT_OUT


def test_the_pins_satisfy_this_package() -> None:
    pins = read("cpu.txt")
    for declared in map(Requirement, requires("vllm-llumnix") or []):
        assert declared.specifier.contains(pin(pins[canonicalize_name(declared.name)])), str(declared)


def test_there_is_a_series_for_each_vllm_that_is_named() -> None:
    (tested_next,) = re.findall(r"^NEXT := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for version in (pin(read("vllm-cpu.txt")["vllm-cpu"]), tested_next):
        assert (ROOT / "patches" / f"v{version}" / "series").is_file()
