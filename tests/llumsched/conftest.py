# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from llumlet.contract.server import RunningServer, serve
from llumsched.cms.embedded import EmbeddedStore
from tests.llumlet.fake_agent import FakeAgent, request_info
from tests.support.cms import embedded_store

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Instance:
    agent: FakeAgent
    server: RunningServer

    @property
    def address(self) -> str:
        return str(self.server.address)


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest_asyncio.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with embedded_store() as store:
        yield store


@pytest_asyncio.fixture
async def source() -> AsyncIterator[Instance]:
    requests = [
        request_info("cmpl-abc123-0a1b2c3d", output_tokens=7),
        request_info("cmpl-abd456-ffffffff", output_tokens=9),
        request_info("chat-zzz-00000000", prompt_tokens=4096),
    ]
    async for instance in _instance("fake-a", requests):
        yield instance


@pytest_asyncio.fixture
async def destination() -> AsyncIterator[Instance]:
    async for instance in _instance("fake-b", []):
        yield instance


async def _instance(name: str, requests: list[Any]) -> AsyncIterator[Instance]:
    agent = FakeAgent(name, requests)
    server = await serve(agent)
    yield Instance(agent, server)
    agent.go.set()
    await server.stop(grace_s=0.2)


FROM_A_TERMINAL = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("llumsched.cli", run_name="__main__", alter_sys=True)
"""
"""What is started in the background of a script ignores Ctrl-C, and so do its children; the command line is not."""


async def start(*arguments: str, stdout: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FROM_A_TERMINAL,
        *arguments,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": "error", "PYTHONPATH": str(ROOT)},
    )


async def finish(process: asyncio.subprocess.Process) -> Done:
    try:
        out, err = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(process.returncode, (out or b"").decode(), err.decode())


Llumnix = Callable[..., Awaitable[Done]]


@pytest.fixture
def llumnix() -> Llumnix:
    """Runs the command as its own process."""

    async def run(*arguments: str) -> Done:
        return await finish(await start(*arguments))

    return run
