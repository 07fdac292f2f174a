# SPDX-License-Identifier: Apache-2.0
"""Three engines with the V2 runner and asynchronous scheduling, for all tests here.

In float32, in which an answer is the same for all practical purposes also where something is computed again, and in
which log probabilities show a difference in the last bit. `a` and `b` have room; `small` lets requests wait and
preempts them. `b` and `small` know `a` as their peer. A test that ends an engine leaves it so: whoever wants it next
gets a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.cells import REASONING
from tests.integration.test_lost_owner import has_engine
from tests.support import input_sessions
from tests.support.faults import with_faults
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.model import PRESETS, build

MAX_MODEL_LEN = 1500
FLAGS = (
    *("--dtype", "float32", "--scheduling-policy", "priority", "--reasoning-config", json.dumps(REASONING)),
    *input_sessions.FLAGS,
)
SMALL_FLAGS = ("--max-num-batched-tokens", "64")
SLOW_COPY_S = 2.0


class Cast:
    """The engines by name: the model of `small` has a process of its own, those of the others run in the engines'.
    While the file `slow` is there, each round of blocks that `b` copies takes `SLOW_COPY_S`."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self._fleet = fleet
        self.slow = directory / "slow"
        port = free_port()
        model = build(PRESETS["tiny"])
        slow = {"point": "mover.pulled", "action": "delay", "seconds": SLOW_COPY_S, "times": 1000}
        peers = ("--llumlet-peers", f"127.0.0.1:{port}", "--llumlet-drain-seconds", "600")
        own: dict[str, dict[str, Any]] = {
            "a": {"flags": (*FLAGS, "--llumlet-port", str(port))},
            "b": {"flags": (*FLAGS, *peers), "env": with_faults([{**slow, "file": str(self.slow)}])},
            "small": {
                "flags": (*FLAGS, *peers, *SMALL_FLAGS),
                "max_num_seqs": 2,
                "num_kv_blocks": 48,
                "executor": "mp",
            },
        }
        self._specs = {
            name: ServerSpec(model, name=name, instance_id=name, runner="v2", max_model_len=MAX_MODEL_LEN, **fields)
            for name, fields in own.items()
        }
        self._servers = dict(zip(self._specs, fleet.start(*self._specs.values()), strict=True))

    def __getitem__(self, name: str) -> Server:
        server = self._servers[name]
        if not (server.alive() and has_engine(server)):
            self._fleet.stop(server)
            (server,) = self._fleet.start(self._specs[name])
            self._servers[name] = server
        return server

    @property
    def a(self) -> Server:
        return self["a"]

    @property
    def b(self) -> Server:
        return self["b"]

    @property
    def small(self) -> Server:
        return self["small"]


@pytest.fixture(scope="package")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    directory = tmp_path_factory.mktemp("runner_v2")
    with Fleet(directory / "logs") as fleet:
        yield Cast(fleet, directory)
