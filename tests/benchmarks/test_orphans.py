# SPDX-License-Identifier: Apache-2.0
"""A real server and its engine processes end with a runner that is killed, started cold or from a warm parent."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from llumsched.up import reaper

RUNNER = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    from tests.support import harness
    from tests.support.harness import Server, ServerSpec
    from tests.support import warm
    if sys.argv[3] == "warm":
        harness.start_server = warm.Parents().start
    server = Server.launch(ServerSpec(Path(sys.argv[1]), llumlet=False), Path(sys.argv[2]))
    server.wait_ready()
    tree = [server.pid, server.process("VLLM::EngineCore"), server.process("VLLM::Worker")]
    print(json.dumps([tree, [server.reaper_pid, *server.pids()]]), flush=True)
    time.sleep(600)
    """
)


@pytest.mark.parametrize("start", ["cold", pytest.param("warm", marks=pytest.mark.full)])
def test_a_killed_runner_leaves_no_engine(model_dir: Path, tmp_path: Path, start: str) -> None:
    command = [sys.executable, "-c", RUNNER, str(model_dir), str(tmp_path / "server.log"), start]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as runner:
        assert runner.stdout is not None
        (server, engine, worker), pids = json.loads(runner.stdout.readline())
        parents = reaper.parents()
        assert (parents[worker], parents[engine], parents[server]) == (engine, server, pids[0])
        pids.append(parents[pids[0]])  # the runner, or the parent of warm servers
        runner.kill()
    deadline = time.monotonic() + 15
    while left := set(pids) & set(reaper.parents()):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
