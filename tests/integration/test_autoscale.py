# SPDX-License-Identifier: Apache-2.0
"""`llumnix up --autoscale` with real engines: load brings a second engine, and one that holds a long answer leaves
within seconds, its stream uncut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumsched.up import reaper
from llumsched.up.ports import free_ports
from tests.integration.test_up import asked

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600), pytest.mark.full]

READY_S = 300.0
LEFT_S = 15.0
"""Seconds within which an engine that holds a long answer is gone; on a busy machine, and with vLLM's own end."""
BLOCKS = 512
ENGINE = ("--served-model-name", "model", "--enforce-eager", "--max-model-len", "3200", "--max-num-seqs", "8",
          "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS))  # fmt: skip
FREENESS = ("--autoscale-low-freeness", "400", "--autoscale-high-freeness", "500")
"""56 short answers need two engines; up to four long ones, with 3,000 tokens each, are comfortable in one."""
LONG, SHORT = 3000, 150
NUM_SHORT = 56


class Up:
    def __init__(self, model: Path, out: Path) -> None:
        self.gateway, self.scheduler, cms = free_ports(3)
        ports = ["--port", str(self.gateway), "--scheduler-port", str(self.scheduler), "--cms-port", str(cms)]
        command = [sys.executable, "-m", "llumsched.cli", "up", str(model), "--autoscale", "1:2"]
        command += ["--autoscale-settle-seconds", "3", *FREENESS, "--no-enable-rescheduling", *ports, "--", *ENGINE]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        self._out = out
        with out.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=reaper.die_with_parent
            )

    @property
    def said(self) -> str:
        return self._out.read_text()

    def scale(self) -> dict[str, object]:
        answer: dict[str, object] = asked(f"http://127.0.0.1:{self.scheduler}/scale?model=model")
        return answer

    async def until_scales(self) -> None:
        """Until the scheduler has looked at its instances: the model is known then."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(urllib.error.HTTPError):
                    self.scale()
                    return
                await asyncio.sleep(0.1)

    async def until(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.said:
            assert self.process.poll() is None, self.said[-8000:]
            assert time.monotonic() < deadline, f"not said: {words}\n{self.said[-8000:]}"
            await asyncio.sleep(0.1)

    def view(self) -> dict[str, Any]:
        """What the scheduler knows of each engine."""
        known: dict[str, Any] = asked(f"http://127.0.0.1:{self.scheduler}/debug/view")["instances"]
        return known

    def running(self) -> dict[str, int]:
        """Requests that run in each engine."""
        return {name: int((one["status"] or {}).get("num_running_requests", 0)) for name, one in self.view().items()}

    async def until_known(self, num_engines: int) -> dict[str, int]:
        """The port of each engine's API server, once the scheduler has heard of all."""
        async with asyncio.timeout(READY_S):
            while True:
                ports = {name: int(one["metadata"]["api_server_port"]) for name, one in self.view().items()}
                if len(ports) == num_engines:
                    return ports
                await asyncio.sleep(0.1)

    def left(self) -> list[str]:
        """Engines that were told to leave."""
        return re.findall(r"^llumnix up: (\S+) leaves", self.said, re.MULTILINE)

    def engines(self) -> int:
        """Processes in which an engine is."""
        found = 0
        for pid in reaper.descendants(self.process.pid):
            with contextlib.suppress(OSError):
                found += "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return found


@pytest.fixture
def up(model_dir: Path, tmp_path: Path) -> Iterator[Up]:
    made = Up(model_dir, tmp_path / "up.log")
    yield made
    made.process.kill()
    made.process.wait()


async def tokens(session: aiohttp.ClientSession, port: int, length: int) -> AsyncIterator[str]:
    """The texts of a stream's tokens. Raises if it ends before its length."""
    document = {"model": "model", "prompt": "Hello", "max_tokens": length, "ignore_eos": True, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    usage, finished = 0, False
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=document) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                finished = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                for choice in event["choices"]:
                    yield choice["text"]
    assert finished
    assert usage == length


async def test_load_brings_an_engine_and_its_end_takes_one_with_a_long_answer_in_it(up: Up) -> None:
    await up.until("1 of up to 2 engines are ready", READY_S)
    await up.until_scales()
    assert (up.scale()["wanted"], up.scale()["replicas"]) == (1, 1)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:

        async def whole(length: int, port: int = up.gateway, half: asyncio.Event | None = None) -> int:
            count = 0
            async for _ in tokens(session, port, length):
                count += 1
                if half is not None and count >= length // 2:
                    half.set()
            return count

        async def keep_one(port: int) -> None:
            while not up.left():
                half = asyncio.Event()
                long.append(asyncio.create_task(whole(LONG, port, half)))
                waits = asyncio.create_task(half.wait())
                await asyncio.wait([long[-1], waits], return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()

        load = True

        async def keep_busy() -> int:
            number = 0
            while load:
                await whole(SHORT)
                number += 1
            return number

        busy = [asyncio.create_task(keep_busy()) for _ in range(NUM_SHORT)]
        await up.until("llumnix up: engine-1 is ready", READY_S)
        # Always one to each engine of which half is to come, so that whoever leaves has one.
        ports = await up.until_known(2)
        long: list[asyncio.Task[int]] = []
        keepers = [asyncio.create_task(keep_one(port)) for port in ports.values()]
        await asyncio.sleep(2.0)
        load = False
        # It leaves as soon as there is less to do, with short answers in it as well.
        held = [up.running()]
        while not (left := up.left()):
            held = [*held[-2:], up.running()]
            await asyncio.sleep(0.1)
        began = time.monotonic()
        [leaver] = left
        num_held = max(one.get(leaver, 0) for one in held)
        assert num_held >= 1, "there was nothing to move"
        assert not all(one.done() for one in long), "nothing was left to move"
        while up.engines() > 1:
            assert time.monotonic() - began < LEFT_S, up.said[-8000:]
            await asyncio.sleep(0.1)
        print(f"{leaver} held {num_held} answers; its engine was gone after {time.monotonic() - began:.1f} s")
        assert sum(await asyncio.gather(*busy)) >= NUM_SHORT
        await asyncio.gather(*keepers)
        await asyncio.gather(*long)
    await up.until(f"llumnix up: {leaver} has left", 60.0)
    assert up.scale()["replicas"] == 1
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60.0) == 0
