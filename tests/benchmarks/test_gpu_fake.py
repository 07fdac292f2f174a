# SPDX-License-Identifier: Apache-2.0
"""The GPU's side of all of it over a CUDA without a GPU: torch's and vLLM's builds for CUDA, pinned memory, streams,
events, graphs, CUDA IPC, two engines and moves between them.

The copy kernel copies; no other kernel computes anything (`tests/support/fake_gpu`). So blocks must be in their places,
and every program must come to its end; what a GPU computes, or how fast, is not asked. The first run installs 6 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_gpu import environment
from tests.support.fake_gpu.environment import Environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

SMALL = """
import sys
from benchmarks.gpu_check import __main__ as gpu_check, device, pulls
device.BLOCKS, device.REAL_BLOCKS, device.TIMES, pulls.BLOCKS, pulls.SECONDS = 8, 2, 2, 16, 0.5
sys.exit(gpu_check.main(sys.argv[1:]))
"""
STEP_US = "3000"
"""Duration of a graph: that of a small model's step. Without it, an answer ends before its moves."""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment.make(tmp_path_factory.mktemp("fake-gpu"))


def run(fake: Environment, *arguments: str, timeout_s: float, **more: str) -> tuple[dict[str, Any], str]:
    """The last line of standard output, and all of standard error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "LLUMNIX_"))}
    done = subprocess.run(
        [fake.python, *arguments],
        cwd=fake.root,
        env=kept | fake.variables | {"FAKE_GPU_STEP_US": STEP_US} | more,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_paths_that_only_a_gpu_reaches(fake: Environment) -> None:
    found, said = run(fake, "-m", "tests.support.fake_gpu.paths", timeout_s=600, FAKE_GPU_BYTES=str(1 << 30))
    why = found.pop("worker_without_memory")
    assert why.startswith("no GPU memory for copying blocks; a lower --gpu-memory-utilization leaves some: CUDA out of")
    assert f"KV blocks of this worker cannot be moved: {why}" in said
    assert found
    assert all(came is True for came in found.values()), found


def test_parts_of_the_gpu_check(fake: Environment) -> None:
    """Only the `cuda` backend copies here, and no kernel of torch computes. Nothing else may be wrong."""
    report, said = run(fake, "-c", SMALL, "--no-cells", timeout_s=900)
    parts = report["parts"]
    assert report["gpus"] == ["FAKE H100 (no GPU)"]
    for name in ("ipc", "pull_local", "pull_tcp"):
        assert parts[name]["verdict"] == "right", said[-4000:]
    assert parts["pull_local"]["copied_by"] == parts["pull_tcp"]["copied_by"] == "cuda"
    assert parts["self_test"]["copied_by"] == ["cuda"]
    assert {**parts["self_test"]["passed_over"]} == {"triton": "gather of 2 blocks: wrong bytes"}
    assert parts["self_test"]["verdict"] == "wrong", "a GPU on which Triton does not copy is no good one"
    assert parts["kernels"]["missing"] == {}
    assert {case.partition(",")[0] for case in parts["kernels"]["wrong"]} == {"triton", "torch"}
    killed = parts["ipc_killed_source"]["killed"]
    assert [row["when"] for row in killed] == ["before a copy", "during a copy", "after a copy"]
    assert all(row["noticed"] for row in killed)
    assert {row["why"] for row in killed} == {"it computes something else"}, "no call failed"


def test_engines_move_streams(fake: Environment, tmp_path: Path) -> None:
    """vLLM for CUDA with its defaults: V2 runner, asynchronous scheduling, compiled, CUDA graphs, FlashAttention."""
    file = tmp_path / "gpu.jsonl"
    command = ["-m", "benchmarks.gpu_check", "--no-parts", "--cells", "graphs-v2-bf16-gqa-16", "--numerics", "1"]
    command += ["--start-timeout", "1200", "--json", str(file), "--logs", str(tmp_path / "logs")]
    report, said = run(fake, *command, timeout_s=2300)
    (row,) = report["cells"]
    assert (row["verdict"], row["why"]) == ("right", []), said[-4000:]
    assert row["runner"] == "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    assert row["attention"]
    (attempt,) = row["attempts"]
    assert attempt["transports"] == ["local"]
    assert {engine["scheduler"] for engine in attempt["engines"]} == {"AsyncScheduler"}
    logs = [log.read_text(errors="replace") for log in sorted((tmp_path / "logs").rglob("*.log"))]
    assert ["KV blocks are copied by cuda\n" in log for log in logs] == [True, True]
    assert [json.loads(line).get("cell") for line in file.read_text().splitlines()] == [None, row["cell"], None]
