# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.environment import Environment, build, copy_patched_files, copy_source
from vllm_llumnix.patching import series


@pytest.fixture(scope="package")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree to build from: nothing is written into the checkout."""
    return copy_source(tmp_path_factory.mktemp("packaging") / "source")


@pytest.fixture(scope="package")
def sdist(source: Path) -> Path:
    return build(source, "sdist", source.parent / "sdist")


class Wheels(dict[str, Path]):
    """The wheel of each target, built when it is first asked for; "" is what is built if no target is named."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, target: str) -> Path:
        out = self._source.parent / (target or "default")
        self[target] = build(self._source, "wheel", out, target or None)
        return self[target]


@pytest.fixture(scope="package")
def wheels(source: Path) -> dict[str, Path]:
    return Wheels(source)


@pytest.fixture(scope="package")
def small_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of vLLM that are patched, as released."""
    return copy_patched_files(series.load("0.32.0"), tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)
