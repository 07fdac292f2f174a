# SPDX-License-Identifier: Apache-2.0
"""`pip install .` leaves a vLLM that a series fits as it is, and the Dockerfile takes each of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.environment import ROOT, Environment, build, run
from tests.packaging.test_archives import requirements
from vllm_llumnix.patching.series import available

pytestmark = pytest.mark.rest

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def pretend(environment: Environment, name: str, version: str) -> None:
    """A distribution that pip takes for installed. There is nothing in it."""
    information = environment.site / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / "RECORD").write_text("")


@pytest.fixture
def environment_with(environment: Environment, wheels: dict[str, Path]) -> Environment:
    """All that a CUDA wheel needs is there, but for vLLM."""
    for requirement in requirements(wheels["cuda"]).values():
        if requirement.name != "vllm" and requirement.marker is None:
            (lowest,) = requirement.specifier
            pretend(environment, requirement.name, lowest.version)
    return environment


def planned(environment: Environment, wheel: Path) -> list[str]:
    """What pip would install with the wheel; without an index it can get nothing else. AssertionError if it cannot."""
    report = environment.directory / "report.json"
    pip = (sys.executable, "-m", "pip", "--python", environment.python, "install", "--dry-run", "--report", report)
    run(*pip, wheel, cwd=environment.directory)
    return [one["metadata"]["name"] for one in json.loads(report.read_text())["install"]]


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.33.0", "0.33.1", "0.33.0.post1", "0.33.0+cu129", "0.33.1.dev7+g1234567"]
)
def test_an_installed_vllm_stays(environment_with: Environment, wheels: dict[str, Path], version: str) -> None:
    pretend(environment_with, "vllm", version)
    assert planned(environment_with, wheels["cuda"]) == ["vllm-llumnix"]


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0"])
def test_another_vllm_would_be_replaced(environment_with: Environment, wheels: dict[str, Path], version: str) -> None:
    """Here by none: there is no index."""
    pretend(environment_with, "vllm", version)
    with pytest.raises(AssertionError, match="No matching distribution found for vllm"):
        planned(environment_with, wheels["cuda"])


def test_the_requirement_follows_from_the_series(source: Path, tmp_path: Path) -> None:
    """Every series' release is in it, and no minor version without one."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    shutil.copytree(copy / "patches/v0.33.0", copy / "patches/v0.35.1")
    wheel = build(copy, "wheel", tmp_path / "wheel", "cuda")
    specifier = requirements(wheel)["vllm"].specifier
    allowed = {"0.31.0": False, "0.32.0": True, "0.33.9": True, "0.34.0": False, "0.35.0": True, "0.36.0": False}
    assert {version: specifier.contains(version) for version in allowed} == allowed


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions and their arguments, continued lines joined, comments left out."""
    joined = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def test_the_image_takes_every_release_with_a_series(wheels: dict[str, Path]) -> None:
    """The file is read, and each version put in; `test_image` builds it."""
    steps = instructions(DOCKERFILE.read_text())
    assert [name for name, _ in steps] == ["ARG", "FROM", "ARG", "COPY", "RUN"]
    name, _, default = steps[0][1].partition("=")
    assert (name, default) == ("VLLM_VERSION", max(available(), key=Version))
    assert steps[2] == ("ARG", name), "behind FROM it is empty unless it is named again"
    specifier = requirements(wheels["cuda"])["vllm"].specifier
    for version in available():
        base = steps[1][1].replace("${VLLM_VERSION}", version)
        assert base == f"vllm/vllm-openai:v{version}"
        (constraint,) = re.findall(r'echo "(.*?)" >', steps[4][1].replace("${VLLM_VERSION}", version))
        assert str(Requirement(constraint).specifier) == f"=={version}"
        assert specifier.contains(version), "pip would look for another vLLM, and the constraint forbids it"
    assert not re.search(r"\d+\.\d+\.\d+", "".join(argument for _, argument in steps[1:])), (
        "a version beside the argument"
    )
