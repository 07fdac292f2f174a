# SPDX-License-Identifier: Apache-2.0
"""A real server and its engine processes end with a runner that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from llumsched.up import reaper

RUNNER = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    from benchmarks.harness import Server, ServerSpec
    server = Server.launch(ServerSpec(Path(sys.argv[1]), llumlet=False), Path(sys.argv[2]))
    server.wait_ready()
    print(json.dumps([server.reaper_pid, *server.pids()]), flush=True)
    time.sleep(600)
    """
)


def test_a_killed_runner_leaves_no_engine(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, str(model_dir), str(tmp_path / "server.log")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as runner:
        assert runner.stdout is not None
        pids = json.loads(runner.stdout.readline())
        assert len(pids) >= 4, "the reaper, the API server, the engine and its worker"
        runner.kill()
    deadline = time.monotonic() + 15
    while left := set(pids) & set(reaper.parents()):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
