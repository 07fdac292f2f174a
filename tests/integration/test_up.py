# SPDX-License-Identifier: Apache-2.0
"""`llumnix up` with real engines: one command, one completion, one Ctrl-C, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from llumsched.up import reaper
from llumsched.up.ports import free_ports

READY_S = 300.0
STOPPED_S = 60.0
ENGINE = ("--served-model-name", "model", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
          "--block-size", "32", "--num-gpu-blocks-override", "128")  # fmt: skip


def asked(url: str, document: dict[str, Any] | None = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        return json.load(answer)


def test_one_command_serves_and_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    gateway, scheduler, cms = free_ports(3)
    ports = ["--port", str(gateway), "--scheduler-port", str(scheduler), "--cms-port", str(cms)]
    command = [sys.executable, "-m", "llumsched.cli", "up", str(model_dir), "--engines", "2", *ports, "--", *ENGINE]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    out = tmp_path / "up.log"
    with out.open("wb") as log:
        up = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=reaper.die_with_parent
        )
    try:
        deadline = time.monotonic() + READY_S
        while "2 engines are ready" not in out.read_text():
            assert up.poll() is None, out.read_text()[-8000:]
            assert time.monotonic() < deadline, out.read_text()[-8000:]
            time.sleep(0.2)
        running = reaper.descendants(up.pid)
        assert len(running) >= 4 + 2 * 3, "four reapers; and engines are several processes each"

        prompt = {"model": "model", "prompt": "Hello", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        answer = asked(f"http://127.0.0.1:{gateway}/v1/completions", prompt)
        assert answer["usage"]["completion_tokens"] == 16
        # By instance id, as every command that asks the CMS sees them.
        top = [sys.executable, "-m", "llumsched.cli", "top", "--cms", f"127.0.0.1:{cms}", "--once", "--json"]
        shown = json.loads(subprocess.run(top, stdout=subprocess.PIPE, timeout=60, check=True).stdout)
        assert [(one["id"], one["state"]) for one in shown["instances"]] == [("engine-0", "open"), ("engine-1", "open")]
        assert asked(f"http://127.0.0.1:{scheduler}/debug/rescheduling")["passes"], "the rescheduler runs"

        up.send_signal(signal.SIGINT)
        assert up.wait(STOPPED_S) == 0
    finally:
        up.kill()
        up.wait()
    deadline = time.monotonic() + STOPPED_S
    while left := set(running) & set(reaper.parents()):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    said = out.read_text()
    stopped = [line for line in said.splitlines() if line.startswith("llumnix up: ") and line.endswith(" stopped")]
    assert stopped == [
        "llumnix up: gateway stopped",
        "llumnix up: engine-0, engine-1 stopped",
        "llumnix up: scheduler stopped",
    ]
