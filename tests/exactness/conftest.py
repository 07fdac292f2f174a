# SPDX-License-Identifier: Apache-2.0
"""Engines for the matrix: at most one configuration runs at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactness.cells import REASONING, Configuration
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import PRESETS, build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def fleet_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The engines of the configuration that is the parameter, by the letters of its routes."""
    where: Configuration = request.param
    model = build(dataclasses.replace(PRESETS["tiny"], dtype=where.dtype))
    names = sorted(set("".join(where.routes)))
    flags = ("--scheduling-policy", "priority", "--dtype", where.dtype, "--llumlet-transport", where.transport)
    flags += ("--reasoning-config", json.dumps(REASONING))
    if where.exact:
        flags += ("--llumlet-exact",)
    if where.processor:
        flags += ("--logits-processors", "tests.exactness.processor:AvoidsTheLatest")
    logs = tmp_path_factory.mktemp(str(where))
    env = {"TORCH_COMPILE_DISABLE": "0", "PYTHONPATH": str(ROOT)}
    with Fleet(logs) as fleet:
        specs = [
            ServerSpec(model, name=name, instance_id=name, block_size=where.block_size, flags=flags, env=env)
            for name in names
        ]
        yield dict(zip(names, fleet.start(*specs), strict=True))
