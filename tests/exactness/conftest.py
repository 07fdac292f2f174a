# SPDX-License-Identifier: Apache-2.0
"""Engines for the matrix: at most one configuration runs at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.model import PRESETS, build
from tests.exactness.cells import Configuration


@pytest.fixture(scope="package")
def fleet_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The engines of the configuration that is the parameter, by the letters of its routes."""
    where: Configuration = request.param
    model = build(dataclasses.replace(PRESETS["tiny"], dtype=where.dtype))
    names = sorted(set("".join(where.routes)))
    flags = ("--scheduling-policy", "priority", "--dtype", where.dtype)
    logs = tmp_path_factory.mktemp(str(where))
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "inductor")}
    with Fleet(logs) as fleet:
        specs = [
            ServerSpec(model, name=name, instance_id=name, block_size=where.block_size, flags=flags, env=compiled)
            for name in names
        ]
        engines = dict(zip(names, fleet.start(*specs), strict=True))
        for engine in engines.values():
            _compile_logprobs(engine)
        yield engines


def _compile_logprobs(engine: Server) -> None:
    """vLLM compiles their kernel at the first use, for one row and for several: seconds in which the loop stands still
    and the origin would take its requests elsewhere.
    """
    engine.generate([100] * 40, 3, logprobs=3, prompt_logprobs=2)
    engine.generate([100] * 40, 3, logprobs=3, n=2, temperature=1.0)
