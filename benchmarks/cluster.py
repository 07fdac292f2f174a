# SPDX-License-Identifier: Apache-2.0
"""A real scheduler, which is the CMS too, and a real gateway around engines, for tests and benchmarks.

Engines are started with `--llumlet-cms` and the address of `cms`; they may outlive the two.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from benchmarks.harness import SERVED_NAME, Command
from llumsched.up.ports import free_port

READY_SECONDS = 60.0


class Control:
    """Both run when it is made; `async with`, or `stop`, ends them."""

    def __init__(
        self,
        logs: Path,
        cms_port: int,
        *,
        model: Path | None = None,
        scheduler: Sequence[str] = (),
        gateway: Sequence[str] = (),
        name: str = "",
    ) -> None:
        """`model` is a directory with the tokenizer; `scheduler` and `gateway` are further arguments of theirs."""
        scheduler_port, gateway_port = free_port(), free_port()
        self.cms = f"127.0.0.1:{cms_port}"
        self.scheduler_url = f"http://127.0.0.1:{scheduler_port}"
        self.gateway_url = f"http://127.0.0.1:{gateway_port}"
        tokenizer = [] if model is None else ["--tokenizer-path", f"{SERVED_NAME}={model}"]
        commands = {
            "scheduler": ["--port", str(scheduler_port), "--cms", f"listen://{self.cms}", *scheduler],
            "gateway": ["--port", str(gateway_port), "--scheduler-endpoints", f"127.0.0.1:{scheduler_port}",
                        *tokenizer, *gateway],
        }  # fmt: skip
        self._commands = [
            Command.start(
                part, [sys.executable, "-P", "-m", "llumsched.cli", part, *arguments], logs / f"{name}{part}.log"
            )
            for part, arguments in commands.items()
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        for command in reversed(self._commands):
            command.stop()

    async def knows(self, num_instances: int) -> None:
        """Until the scheduler knows of just so many instances that take requests, and the gateway of their model."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_SECONDS):
            while True:
                try:
                    instances = (await _get(session, f"{self.scheduler_url}/debug/view"))["instances"].values()
                    models = (await _get(session, f"{self.gateway_url}/v1/models"))["data"]
                except aiohttp.ClientError:
                    instances, models = [], []
                taking = sum(1 for one in instances if one["status"] and one["status"]["schedulable"])
                if taking == num_instances and (models or not num_instances):
                    return
                await asyncio.sleep(0.2)

    async def rescheduling(self) -> dict[str, Any]:
        """The last passes and moves of the rescheduler, as JSON has them."""
        async with aiohttp.ClientSession() as session:
            return await _get(session, f"{self.scheduler_url}/debug/rescheduling")


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url, raise_for_status=True) as answer:
        found: dict[str, Any] = await answer.json()
        return found
