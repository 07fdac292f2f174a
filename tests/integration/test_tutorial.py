# SPDX-License-Identifier: Apache-2.0
"""The commands of `docs/try/tutorial.md`, run as they stand: only the model and the ports are others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llumsched.up import reaper
from llumsched.up.ports import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "try" / "tutorial.md"
MODEL = "export MODEL=Qwen/Qwen3-0.6B\n"
GATEWAY = "http://127.0.0.1:8001/"
NUM_STREAMS, NUM_TOKENS = 4, 800
SCRIPT_S = 540

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]

PGREP = """\
#!{python}
# pgrep among the processes of the tutorial: other tests have engines, too.
import os, subprocess, sys
from llumsched.up import reaper
ours = set(reaper.descendants(int(os.environ["TUTORIAL"]))) - {{os.getpid()}}
found = subprocess.run([{pgrep!r}, *sys.argv[1:]], stdout=subprocess.PIPE, text=True).stdout.split()
print(*(pid for pid in found if int(pid) in ours), sep="\\n")
"""


def script(model: Path, port: int) -> str:
    """The page's commands. After the kill and after the drain they keep the streams for the test to read."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    text = "export TUTORIAL=$$\n" + "".join(blocks)
    assert text.count(MODEL) == 1
    assert GATEWAY in text
    ended = "grep -c '\\[DONE\\]' stream-*.txt\n"
    assert text.count(ended) == 2
    text = text.replace(MODEL, f"export MODEL={model}\n").replace(GATEWAY, f"http://127.0.0.1:{port}/")
    for number in (1, 2):
        text = text.replace(ended, f"mkdir ended-{number} && cp stream-*.txt ended-{number}\n", 1)
    return text


def two_in_a_row() -> int:
    """The first of two free ports, for a scheduler and its CMS."""
    while True:
        (port,) = free_ports(1)
        with_next = subprocess.run(
            [sys.executable, "-c", f"import socket; socket.socket().bind(('127.0.0.1', {port + 1}))"], check=False
        )
        if with_next.returncode == 0:
            return port


def test_tutorial_cuts_no_stream(model_dir: Path, tmp_path: Path) -> None:
    scheduler, (gateway,) = two_in_a_row(), free_ports(1)
    tools = tmp_path / "tools"
    tools.mkdir()
    pgrep = shutil.which("pgrep")
    assert pgrep is not None
    (tools / "pgrep").write_text(PGREP.format(python=sys.executable, pgrep=pgrep))
    (tools / "pgrep").chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": path,
        "LLUMNIX_CLUSTER": f"127.0.0.1:{scheduler}",
        "LLUMNIX_UP_PORT": str(gateway),
        "LLUMNIX_UP_SCHEDULER_PORT": str(scheduler),
        "LLUMNIX_UP_CMS_PORT": str(scheduler + 1),
        "LLUMNIX_UP_METRICS_PORT": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    (tmp_path / "commands").write_text(script(model_dir, gateway))
    with (tmp_path / "said").open("w") as said:
        # However this process ends, nothing of the cluster outlives it.
        shell = subprocess.Popen(
            [sys.executable, "-S", "-I", reaper.__file__, "--", "bash", "-eu", "commands"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            shell.wait(SCRIPT_S)
        finally:
            assert shell.stdin is not None
            shell.stdin.close()
            shell.wait()
    log = (tmp_path / "tutorial" / "up.log").read_text()
    assert shell.returncode == 0, (tmp_path / "said").read_text() + log[-4000:]
    for after in ("ended-1", "ended-2"):
        streams = sorted((tmp_path / "tutorial" / after).glob("stream-*.txt"))
        assert len(streams) == NUM_STREAMS
        for stream in streams:
            *events, end = re.findall(r"^data: (.*)$", stream.read_text(), re.MULTILINE)
            assert end == "[DONE]", stream
            assert json.loads(events[-1])["usage"]["completion_tokens"] == NUM_TOKENS
            assert not any("error" in json.loads(event) for event in events)
