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
          "--block-size", "32", "--num-gpu-blocks-override", "128", "--enable-prompt-tokens-details")  # fmt: skip
NAME = "org/model"
LONG = "And then they went on, over the hills and far away. " * 8
ASKED = [{"role": "user", "content": "And?"}]
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    "anthropic": ("messages", {"system": [{"type": "text", "text": LONG}], "messages": ASKED}),
    "responses": ("responses", {"instructions": LONG, "input": "And?"}),
}  # fmt: skip
"""A prompt of each API."""


def asked(url: str, document: dict[str, Any] | None = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        content = answer.read()
    return json.loads(content) if content[:1] in b"[{" else content.decode()


def in_hub_cache(model: Path, home: Path) -> None:
    """Makes it a model that the hub has told before, by the name NAME."""
    directory = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (directory / "refs").mkdir(parents=True)
    (directory / "refs" / "main").write_text("0" * 40)
    (directory / "snapshots").mkdir()
    (directory / "snapshots" / ("0" * 40)).symlink_to(model)


def hits_of(metrics: str, api: str) -> tuple[float, float]:
    """Tokens that the scheduler expected in prefix caches, and that engines found there."""
    lines = dict(line.rsplit(" ", 1) for line in asked(f"{metrics}/metrics").splitlines() if line[0] != "#")
    expected, found = (
        float(lines.get(f'gateway_prefix_{kind}_tokens_total{{api="{api}"}}', 0)) for kind in ("expected", "cached")
    )
    return expected, found


def assert_prefixes_are_hit(gateway: str, metrics: str) -> None:
    """Expected hits for each API, at most as many as engines find: a wrong block name hits nothing."""
    for api, (path, prompt) in PROMPTS.items():
        limit = {"max_output_tokens": 1} if api == "responses" else {"max_tokens": 1}
        deadline = time.monotonic() + READY_S
        while not hits_of(metrics, api)[0]:
            assert time.monotonic() < deadline, f"no hit of {api}"
            answer = asked(f"{gateway}/v1/{path}", {"model": "model", **limit} | prompt)
            assert answer["usage"], answer
        expected, found = hits_of(metrics, api)
        assert 64 <= expected <= found, api


def test_up_serves_and_leaves_no_process(model_dir: Path, tmp_path: Path) -> None:
    """A cluster of a model by its hub name, with a policy that uses prefix caches."""
    in_hub_cache(model_dir, tmp_path)
    gateway, scheduler, cms, metrics = free_ports(4)
    ports = ["--port", str(gateway), "--scheduler-port", str(scheduler), "--cms-port", str(cms)]
    ports += ["--metrics-port", str(metrics)]
    command = [sys.executable, "-m", "llumsched.cli", "up", NAME, "--engines", "2", *ports]
    command += ["--scheduling-policy", "prefix-cache", "--", *ENGINE]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(tmp_path)
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
        assert_prefixes_are_hit(f"http://127.0.0.1:{gateway}", f"http://127.0.0.1:{metrics}")
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
